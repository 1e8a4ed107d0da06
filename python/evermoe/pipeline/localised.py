"""Localised recovery of a pipeline: after a failure only the ranks that lost their state compute again.

All ranks resume from the newest version of which every unit is left, in new schedules, and run the steps since then
again. But a rank that has computed a microbatch of them before answers from its log (`border_log`): it sends the same
activations and gradients again. So the newcomers of a lost stage compute with the same inputs, and all other ranks
compute nothing until they reach a microbatch that no rank has computed. Ranks need no further agreement: a rank that
lacks a record in its log computes it, with the same bits. Ranks that divide the experts of a stage compute together:
they answer from their logs only if all of them have the same records of the step.

    version       v              v + 1                failure
    lost stage    computes v ─── computes v + 1 ─── x   starts from v (its copies), computes v and v + 1 again
    the others    compute v ──── compute v + 1 ────     send v again, then their part of v + 1, then continue

If the copies of the lost stage are older than the state of the other ranks, these are *ahead*. They restore the copies'
version, since all ranks must protect the same one, and keep the newer state aside until they have sent the steps
between again. (With sparse versions they keep their state: see `evermoe.pipeline.sparse_windows`.) The idea is
MoEvement's, a later form of MoEtion, whose text we did not have.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.pipeline.border_log import BorderLog, LoggedStep
from evermoe.pipeline.stages import StageState
from evermoe.state.version import step_of

logger = logging.getLogger(__name__)


class LocalisedRecovery:
    """Decides what this rank need not compute again, and keeps the state to which its log leads.

    Args:
        state: of the stage.
        stage: its number.
        is_on: False to log nothing.
        is_spread: whether the stage's ranks exchange tokens, so that they compute each microbatch together.
    """

    def __init__(self, state: StageState, stage: int, *, is_on: bool, is_spread: bool) -> None:
        self._state, self._stage, self._is_on, self._is_spread = state, stage, is_on, is_spread
        self.log = BorderLog(
            lambda: [parameter for some in state.parameters() for parameter in some],
            [layer.count for layer in state.layers.values()] if is_spread else [],
        )
        self._logs: list[dict[str, Any]] = []
        """Contents of each rank's log, by rank."""
        self._newer: dict[str, Tensor] = {}
        """Bytes of all units of this stage after `_reaches` steps; empty if the state has them, or they are unknown."""
        self._is_ahead = False
        """Whether this rank took steps that are repeated now."""
        self._reaches = 0
        """Steps that this rank had taken before it went back, if it is ahead."""
        self._ahead_until = 0
        """Steps up to which no version is copied, since some stages are ahead or not dense; the same on all ranks."""
        self._repeats_until = -1
        """The last step of which some rank may have computed something; the same on all ranks."""

    # ---- a step

    def begin_step(self, version: int) -> LoggedStep | None:
        """The record of a step that begins, with the gradients that it has; None if nothing is logged.

        Tokens are counted again, from those of its recorded forwards.
        """
        self._state.expert_load.forget_step()
        return self.log.begin_step(version) if self._is_on else None

    def is_repeated(self, step: int) -> bool:
        """Whether some ranks may have computed a part of the step before."""
        return self._is_on and step <= self._repeats_until

    def retake(self, after: int) -> bool:
        """Whether this rank took the step to a version before. Its state follows once it has sent all such steps."""
        if not self._is_ahead:
            return False
        self._state.is_of_version = step_of(after) == self._reaches
        if self._state.is_of_version:
            self._state.write(self._newer)
            self._newer, self._is_ahead = {}, False
        return True

    def needs_copies(self, after: int) -> bool:
        """Whether a version is copied to other nodes: not while some stages have another state, or a part of it."""
        return step_of(after) >= self._ahead_until

    def was_retaken(self, after: int) -> bool:
        """Whether some rank took the step to a version before, and has no gradients of it; known to all ranks."""
        return step_of(after) <= self._ahead_until

    # ---- failures

    def exchange_logs(self, group: Group, version: int) -> None:
        """Gather the contents of all ranks' logs; collective.

        Args:
            group: all ranks.
            version: of this rank's state.
        """
        if not self._is_on:
            return
        is_partial = not self._state.is_of_version and not self._is_ahead  # a replay was interrupted, and begins again
        taken = [step.before for step in self.log.steps if step.is_taken and step.chunks]
        mine = {
            "stage": self._stage,
            "taken": [] if is_partial else taken,
            "reaches": self._reaches if self._is_ahead else step_of(version),
            "computed": self.log.computed() if self._is_spread else None,
            "distrusts": any(step.is_distrusted for step in self.log.steps),
        }
        self._logs = gather_json(group, mine)
        self._repeats_until = max(each["reaches"] for each in self._logs)

    def go_back(self, version: int, dense_at: int = 0) -> bool:
        """Resume from a version with all ranks. Return whether this rank has taken more steps and keeps its state.

        Sets the state aside if it is overwritten nevertheless.

        Args:
            version: of all ranks.
            dense_at: steps after which the state is complete, if the version begins a sparse window; else 0.
        """
        if not self._is_on:
            return False
        self._ahead_until = dense_at
        if any(each["distrusts"] for each in self._logs):
            logger.warning(
                "a repeated microbatch had other bits than before the failure: all ranks compute the step again"
            )
            self._forget()
            return False
        ahead = _stages_ahead(self._logs, version)
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
        peers = [each["computed"] for each in self._logs if each["stage"] == self._stage]
        if any(each != peers[0] for each in peers):
            self.log.drop_unfinished()
        return self._is_ahead and bool(dense_at)

    def begin_again(self) -> None:
        """Forget the log, since some experts went back to older copies: all ranks compute all steps again."""
        self._forget()
        self._ahead_until, self._repeats_until = 0, -1

    def _forget(self) -> None:
        self.log.clear()
        self._newer, self._is_ahead = {}, False


def _stages_ahead(logs: Sequence[dict[str, Any]], version: int) -> dict[int, int]:
    """Stages whose ranks have all taken the step that begins with a version; the steps that each has taken.

    >>> logs = [{"stage": 0, "taken": [7], "reaches": 8}, {"stage": 1, "taken": [], "reaches": 0}]
    >>> _stages_ahead(logs, 7)
    {0: 8}
    >>> _stages_ahead(logs + [{"stage": 0, "taken": [], "reaches": 0}], 7)  # a peer that has just come
    {}
    """
    found = {}
    for stage in {each["stage"] for each in logs}:
        ranks = [each for each in logs if each["stage"] == stage]
        reached = {each["reaches"] for each in ranks}
        if all(version in each["taken"] for each in ranks) and len(reached) == 1:
            found[stage] = reached.pop()
    return found
