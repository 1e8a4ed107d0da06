"""The training loop's state in a recovery: the script's own where it continues, else that of the unit `session`.

The unit has the state that the latest update found. Between two steps a script may have changed it: a learning rate,
the best value of a metric. A member that continues at the version of the recovery keeps that, and gives it to those
that join. The unit itself is not written here: other nodes have copies of it with this version.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from evermoe.comm.gather import share_json
from evermoe.comm.group import Group
from evermoe.errors import PeerLost
from evermoe.state import loop_state
from evermoe.state.loop_state import LoopParts

logger = logging.getLogger(__name__)

_JOINS, _UNCHANGED, _CHANGED = range(3)
"""A member's state before a recovery: of another version, of the latest update, or with changes of its script."""


class LoopRestore:
    """Restores the training loop of one member.

    Args:
        parts: of the loop.
        group: the members that train.
        job: name of the job.
    """

    def __init__(self, parts: LoopParts, group: Group, job: str) -> None:
        self._parts, self._group, self._job = parts, group, job

    def restore(self, progress: dict[str, Any], *, continues: bool) -> None:
        """Restores the loop on all members that train; collective.

        Where a member is lost meanwhile, the group is dropped, and this member keeps what it has or takes `progress`.

        Args:
            progress: of the unit `session`.
            continues: whether this member already had the version of the recovery.
        """
        mine = loop_state.collect(self._parts) if continues else None
        try:
            progress = self._agree(progress, mine)
        except PeerLost as lost:
            self._group.drop(str(lost))
            progress = progress if mine is None else mine
        loop_state.restore(progress, self._parts)

    def _agree(self, progress: dict[str, Any], mine: dict[str, Any] | None) -> dict[str, Any]:
        """What all members take: the state of the first whose script has changed it, else that of the unit."""
        standing = _JOINS if mine is None else _UNCHANGED
        if mine is not None and loop_state.encoded(mine) != loop_state.encoded(progress):
            standing = _CHANGED
        standings = self._group.all_gather(torch.tensor([standing])).flatten().tolist()
        return share_json(self._group, mine, standings.index(_CHANGED)) if _CHANGED in standings else progress

    def warn_of_settings(self, progress: dict[str, Any]) -> None:
        """Names the settings of the script that are not used, as the job has others."""
        differing = loop_state.differences(progress, self._parts.optimizer, self._parts.scheduler)
        for name, (own, used) in sorted(differing.items()):
            logger.warning(
                "the optimizer's %s is %s in this script, but %s where job %s goes on, and that is used; to change it, "
                "set it in optimizer.param_groups between two steps, on all workers",
                name,
                own,
                used,
                self._job,
            )
