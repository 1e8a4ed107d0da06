"""Localised recovery of a pipeline: after a failure only the ranks that lost their state compute again.

All ranks resume from the newest version of which every unit is left, in schedules that are made anew, and run the steps
since then once more. But a rank that has computed a microbatch of them before answers from its log (`border_log`): it
sends the same activations and gradients again. So the newcomers of a lost stage compute with the same inputs, and all
others compute nothing before what nobody has computed yet. Nothing is agreed on beyond what is said below: whoever
lacks something in its log computes it, with the same bits. Where experts are spread over the ranks of a stage, these
compute together: they answer from their logs if all of these have the same of the step.

    version       v              v + 1                failure
    lost stage    computes v ─── computes v + 1 ─── x   starts from v (its copies), computes v and v + 1 again
    the others    compute v ──── compute v + 1 ────     send v again, then what they had of v + 1, then go on

Where the copies of the lost stage are older than the others' state, these are *ahead*: they bring their state to the
copies' version, as all ranks must protect the same one, and keep the newer state aside until the steps between have
been sent again. (Where versions are sparse, it stays where it is: see `train.sparse_windows`.) The idea is MoEvement's
(a later form of MoEtion); its text was not at hand.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.state.version import step_of
from evermoe.train.border_log import BorderLog, LoggedStep
from evermoe.train.stages import StageState

logger = logging.getLogger(__name__)


class LocalisedRecovery:
    """What this rank need not compute again, and the state to which its log leads.

    Args:
        state: of the stage.
        parameters: of the stage.
        stage: its number.
        is_on: False to log nothing.
        is_spread: whether the stage's ranks exchange tokens, so that they compute a microbatch together or not at all.
    """

    def __init__(
        self, state: StageState, parameters: Sequence[nn.Parameter], stage: int, *, is_on: bool, is_spread: bool
    ) -> None:
        self._state, self._stage, self._is_on, self._is_spread = state, stage, is_on, is_spread
        self.log = BorderLog(parameters, [layer.count for layer in state.layers.values()] if state.has_marks else [])
        self._told: list[dict[str, Any]] = []
        """By rank, what its log has."""
        self._newer: dict[str, Tensor] = {}
        """Bytes of all units of this stage after `_reaches` steps; empty where they are in the state, or not known."""
        self._is_ahead = False
        """Whether this rank has taken steps that are repeated now."""
        self._reaches = 0
        """Steps that this rank had taken before it went back, where it is ahead."""
        self._ahead_until = 0
        """Steps up to which no version is copied, as some stages are ahead, or not dense; the same on all ranks."""
        self._repeats_until = -1
        """The last step of which some rank may have computed something; the same on all ranks."""

    # ---- a step

    def begin(self, version: int) -> LoggedStep | None:
        """The record of a step that begins, with the gradients that were made in it; None if nothing is logged.

        Tokens are counted anew, from those of the forwards that it has.
        """
        self._state.expert_load.forget_step()
        return self.log.begin(version) if self._is_on else None

    def is_repeated(self, step: int) -> bool:
        """Whether some ranks may have computed a part of the step before."""
        return self._is_on and step <= self._repeats_until

    def retake(self, after: int) -> bool:
        """Whether this rank took the step to a version before; then its state follows once it has sent all of them."""
        if not self._is_ahead:
            return False
        self._state.is_of_version = step_of(after) == self._reaches
        if self._state.is_of_version:
            self._state.write(self._newer)
            self._newer, self._is_ahead = {}, False
        return True

    def needs_copies(self, after: int) -> bool:
        """Whether a version is copied to other nodes: not while stages have another state, or a part of it."""
        return step_of(after) >= self._ahead_until

    def was_retaken(self, after: int) -> bool:
        """Whether some rank had taken the step to a version before, and has no gradients of it; known to all ranks."""
        return step_of(after) <= self._ahead_until

    # ---- failures

    def tell(self, group: Group, version: int) -> None:
        """Tells all ranks what the log has; collective.

        Args:
            group: all ranks.
            version: of this rank's state.
        """
        if not self._is_on:
            return
        is_partial = not self._state.is_of_version and not self._is_ahead  # a replay was interrupted: it begins anew
        taken = [step.before for step in self.log.steps if step.is_taken and step.chunks]
        mine = {
            "stage": self._stage,
            "taken": [] if is_partial else taken,
            "reaches": self._reaches if self._is_ahead else step_of(version),
            "computed": self.log.computed() if self._is_spread else None,
            "distrusts": any(step.is_distrusted for step in self.log.steps),
        }
        self._told = gather_json(group, mine)
        self._repeats_until = max(each["reaches"] for each in self._told)

    def go_back(self, version: int, dense_at: int = 0) -> bool:
        """All ranks resume from a version: says whether this rank's state is that after more steps, and is to stay.

        Sets it aside where it is to be overwritten all the same.

        Args:
            version: of all ranks.
            dense_at: where that is the first one of a sparse window, the steps after which all state is there; else 0.
        """
        if not self._is_on:
            return False
        self._ahead_until = dense_at
        if any(each["distrusts"] for each in self._told):
            logger.warning("a repeated microbatch had other bits than before the failure: all ranks compute anew")
            self._forget()
            return False
        ahead = _stages_ahead(self._told, version)
        self._ahead_until = max([dense_at, *ahead.values()])
        self.log.keep_from(version)
        if self._stage in ahead:
            self._is_ahead, self._reaches = True, ahead[self._stage]
            if not self._newer and not dense_at:
                self._newer = self._state.copy()
        elif self.log.steps and self.log.steps[0].is_taken:  # its peers have no log of that step
            self._forget()
        else:
            self._newer, self._is_ahead = {}, False
        peers = [each["computed"] for each in self._told if each["stage"] == self._stage]
        if any(each != peers[0] for each in peers):
            self.log.drop_unfinished()
        return self._is_ahead and bool(dense_at)

    def begin_anew(self) -> None:
        """Some experts went back to older copies, so that what others have computed does not fit: all compute anew."""
        self._forget()
        self._ahead_until, self._repeats_until = 0, -1

    def _forget(self) -> None:
        self.log.clear()
        self._newer, self._is_ahead = {}, False


def _stages_ahead(told: Sequence[dict[str, Any]], version: int) -> dict[int, int]:
    """Stages all ranks of which have taken the step that begins with a version; how many steps each has taken.

    >>> told = [{"stage": 0, "taken": [7], "reaches": 8}, {"stage": 1, "taken": [], "reaches": 0}]
    >>> _stages_ahead(told, 7)
    {0: 8}
    >>> _stages_ahead(told + [{"stage": 0, "taken": [], "reaches": 0}], 7)  # a peer that has just come
    {}
    """
    found = {}
    for stage in {each["stage"] for each in told}:
        ranks = [each for each in told if each["stage"] == stage]
        reached = {each["reaches"] for each in ranks}
        if all(version in each["taken"] for each in ranks) and len(reached) == 1:
            found[stage] = reached.pop()
    return found
