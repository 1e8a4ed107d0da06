"""The training loop's state in a recovery: the script's own where it continues, else that of the unit `session`.

The unit has the state at the latest update. Between two steps a script may have changed it: a learning rate,
the best value of a metric. A member that continues at the version of the recovery keeps that, and gives it to those
that join. The unit itself is not written here: other nodes have copies of it with this version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from evermoe.comm.gather import share_json
from evermoe.comm.group import Group
from evermoe.errors import PeerLost
from evermoe.state import loop_state, lr_schedule
from evermoe.state.loop_state import LoopParts

logger = logging.getLogger(__name__)

_NEW, _BEHIND, _BEHIND_WITH_OWN, _UNCHANGED, _CHANGED = range(5)
"""A member's loop before a recovery: new; of another version; of another version in a job that has taken this script's
settings; as of the latest update; or with changes that the script made after it."""


class LoopRestore:
    """Restores the training loop of one member.

    Args:
        parts: of the loop, before the first step.
        reading: measures the wait for a sampler that reads again what the job has consumed before a step.
        group: the members that train.
        job: name of the job.
        takes_own: whether a job whose processes all start again takes the settings of the script.
    """

    def __init__(
        self,
        parts: LoopParts,
        reading: Callable[[int], AbstractContextManager[None]],
        group: Group,
        job: str,
        *,
        takes_own: bool,
    ) -> None:
        self._reading = reading
        self._parts, self._group, self._job, self._takes_own = parts, group, job, takes_own
        self._settings = loop_state.settings_of(parts, is_used=takes_own)
        self._has_own = False
        """Whether the job has taken the settings of this script."""

    def restore(self, progress: dict[str, Any], step: int, *, is_new: bool, continues: bool) -> None:
        """Restore the loop on all members that train; collective.

        Where a member is lost meanwhile, the group is dropped, and this member keeps what it has or takes `progress`.

        Args:
            progress: of the unit `session`.
            step: steps that the state has taken.
            is_new: whether this member has no state of the running job.
            continues: whether it already had the version of the recovery.

        Raises:
            UnsupportedState: the job has a scheduler of another class, and keeps its settings.
        """
        mine = loop_state.collect(self._parts) if continues else None
        try:
            progress = self._agree(progress, mine, step, is_new=is_new)
        except PeerLost as lost:
            self._group.drop(str(lost))
            progress = progress if mine is None else mine
        with self._reading(step):
            loop_state.restore(progress, self._parts)

    def _agree(
        self, progress: dict[str, Any], mine: dict[str, Any] | None, step: int, *, is_new: bool
    ) -> dict[str, Any]:
        """Return the state that all members take: of the first whose script has changed it, else of the unit.

        If none continues, and the job takes the script's settings, it has those of the first member.
        """
        own = _NEW if is_new else _BEHIND_WITH_OWN if self._has_own else _BEHIND
        if mine is not None:
            own = _UNCHANGED if loop_state.encoded(mine) == loop_state.encoded(progress) else _CHANGED
        standings = self._group.all_gather(torch.tensor([own])).flatten().tolist()
        is_start = set(standings) == {_NEW}
        if is_new and step:
            self._report_settings(progress, is_used=is_start and self._takes_own)
        if _CHANGED in standings:
            return share_json(self._group, mine, standings.index(_CHANGED))
        if _UNCHANGED in standings:
            return progress
        if _BEHIND_WITH_OWN in standings or (is_start and self._takes_own and step):
            source = standings.index(_NEW if is_start else _BEHIND_WITH_OWN)
            self._has_own = self._has_own or is_start
            if source == self._group.rank:
                loop_state.restore_with(self._settings, progress, self._parts, step)
                mine = loop_state.collect(self._parts)
            return share_json(self._group, mine, source)
        return progress

    def _report_settings(self, progress: dict[str, Any], *, is_used: bool) -> None:
        """Name the settings that differ between the script and the job, and those that are used."""
        for name, (own, job) in sorted(loop_state.differences(progress, self._settings).items()):
            if is_used or lr_schedule.FUNCTIONS_OF in name:
                logger.warning("the %s was %s in job %s, and is the script's now: %s", name, job, self._job, own)
            else:
                logger.warning(
                    "the %s is %s in this script, but %s where job %s continues, and that is used; to take the "
                    "script's settings, start all workers again with Session(resume_settings='script')",
                    name,
                    own,
                    job,
                    self._job,
                )
