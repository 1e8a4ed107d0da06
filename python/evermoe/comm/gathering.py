"""The members that have joined an agreement and those that were refused, for the error message of a timeout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evermoe.comm.lighthouse import UNNAMED
from evermoe.errors import JoinTimeout

MAX_NAMED = 1000
"""Largest number of refused processes to keep."""


class Gathering:
    """Members and refusals of one agreement, collected from the answers of the Lighthouse."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        """Ids of the members that train, in the largest set that the Lighthouse has named."""
        self.needed = 0
        """Number of members that train and that the agreement needs; 0 if none are known to be missing."""
        self.refused: dict[str, str] = {}
        """Processes at the same Lighthouse that do not belong to this member's job: the reasons, by id."""
        self.doubt = ""
        """The reason to wait if at least as many processes differ from this member's secret as share it; else empty."""

    def begin_agreement(self, needed: int) -> None:
        """Begin a new agreement that needs this number of training members."""
        self.arrived, self.needed = [], needed
        self.refused.clear()

    def note_members(self, named: Mapping[str, Mapping[str, Any]]) -> None:
        """Record the members of the job in a set of the Lighthouse: their reports, by id."""
        self.arrived = max(
            self.arrived, sorted(each for each, report in named.items() if report["role"] == "train"), key=len
        )

    def note_refusal(self, who: str, why: str) -> None:
        """Record that a process does not belong to this member's job."""
        if len(self.refused) < MAX_NAMED:
            self.refused[who] = why

    def timeout_error(self, problem: str, seconds: int, address: str, *, lighthouse_runs: bool) -> JoinTimeout:
        """Return the error of an agreement that took too long.

        Args:
            problem: the latest problem; empty if only members were missing.
            seconds: time limit of the agreement.
            address: address of the Lighthouse.
            lighthouse_runs: whether the Lighthouse answers now.
        """
        head = f"no agreement on the members within {seconds} s (Lighthouse {address}): "
        if not lighthouse_runs:
            return JoinTimeout(
                f"{head}{problem or 'it does not answer'}. Check that the Lighthouse runs and is reachable, and that "
                "all workers were started with its address."
            )
        missing = self.needed - len(self.arrived)
        parts = [problem] if problem and not (problem == UNNAMED and missing > 0) else []
        if self.doubt and self.doubt != problem:
            parts.append(self.doubt)
        if missing > 0:
            ids = ", ".join(self.arrived) or "the Lighthouse answers"
            parts.append(f"{len(self.arrived)} of {self.needed} members have joined ({ids})")
        parts += [f"{each} was refused: {why}" for each, why in self.refused.items()]
        if self.refused:
            parts.append("all workers need the same script, options, versions and secret")
        if missing > 0:
            parts.append(f"start {missing} more, or set the number of members that exist (--members, EVERMOE_MEMBERS)")
        return JoinTimeout(f"{head}{'; '.join(parts)}.")


def not_admitted_error(seconds: int) -> JoinTimeout:
    """Return the error of a newcomer that the job's members know of but have not admitted."""
    return JoinTimeout(
        f"the job's members have not admitted this one within {seconds} s: they do so between two steps. Make "
        "quorum_timeout longer than a few steps."
    )
