"""Who has come to an agreement on the members, and who was refused: for the error of one that took too long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evermoe.comm.lighthouse import UNNAMED
from evermoe.errors import JoinTimeout

MAX_NAMED = 1000
"""Refused processes that are remembered."""


class Gathering:
    """What this member has learnt in one agreement, from the answers of the Lighthouse."""

    def __init__(self) -> None:
        self.come: list[str] = []
        """Ids of the members that train: of the largest set that the Lighthouse has named."""
        self.needed = 0
        """Members that train without which the agreement cannot end; 0 where none are known to be missing."""
        self.refused: dict[str, str] = {}
        """Processes at the same Lighthouse that are not of this member's job: the reason for each, by id."""
        self.doubt = ""
        """The reason why this member waits: as many differ from it in the secret as agree with it. Else empty."""

    def begin(self, needed: int) -> None:
        """Begins a new agreement, for which this number of members that train is needed."""
        self.come, self.needed = [], needed
        self.refused.clear()

    def meet(self, named: Mapping[str, Mapping[str, Any]]) -> None:
        """The Lighthouse has named these members of the job, with what each has told."""
        self.come = max(self.come, sorted(each for each, told in named.items() if told["role"] == "train"), key=len)

    def refuse(self, who: str, why: str) -> None:
        """A process is not of this member's job."""
        if len(self.refused) < MAX_NAMED:
            self.refused[who] = why

    def timeout(self, problem: str, seconds: int, address: str, *, lighthouse_runs: bool) -> JoinTimeout:
        """The error of the agreement.

        Args:
            problem: what it was spent on; empty if that is the wait for members.
            seconds: that it may take.
            address: of the Lighthouse.
            lighthouse_runs: whether the Lighthouse answers now.
        """
        head = f"no agreement on the members within {seconds} s (Lighthouse {address}): "
        if not lighthouse_runs:
            return JoinTimeout(
                f"{head}{problem or 'it does not answer'}. Check that the Lighthouse runs and is reachable, and that "
                "all workers were started with its address."
            )
        missing = self.needed - len(self.come)
        said = [problem] if problem and not (problem == UNNAMED and missing > 0) else []
        if self.doubt and self.doubt != problem:
            said.append(self.doubt)
        if missing > 0:
            ids = ", ".join(self.come) or "the Lighthouse answers"
            said.append(f"{len(self.come)} of {self.needed} members have come ({ids})")
        said += [f"{each} was refused: {why}" for each, why in self.refused.items()]
        if self.refused:
            said.append("all workers need the same script, options, versions and secret")
        if missing > 0:
            said.append(f"start {missing} more, or give the number that there is (--members, EVERMOE_MEMBERS)")
        return JoinTimeout(f"{head}{'; '.join(said)}.")


def not_taken_in(seconds: int) -> JoinTimeout:
    """The error of a newcomer that the job's members have heard of."""
    return JoinTimeout(
        f"the job's members have not taken this one in within {seconds} s: they do so between two steps. Make "
        "quorum_timeout longer than a few steps."
    )
