"""The steps after which snapshots on units' own nodes are made."""

from __future__ import annotations

import math

from evermoe.config.copies import CopyConfig
from evermoe.presets import LocalSnapshots, Pec
from evermoe.state.keeper import Assignment

MAX_LOCAL_STEPS = 1000
"""Maximum steps between two snapshots on a unit's own node."""


class LocalSchedule:
    """Makes local snapshots at a given interval, or as often as a budget allows; the same on all members.

    Args:
        options: the preset, with its options.
    """

    def __init__(self, options: CopyConfig) -> None:
        local, in_turns = options.preset.group(LocalSnapshots), options.preset.group(Pec)
        self._choices, self._budget = options.choices, local.copy_budget
        self._given = in_turns.snapshot_interval if self._choices.takes_turns else local.snapshot_interval
        """Steps between local snapshots; None for as few as the budget allows."""
        self._steps = 1
        self._newest: float = 0
        self.begins_later = False
        """Whether the first local snapshots of the plan are made a step later than peers' copies, which come first."""

    def replan(self, assignment: Assignment, *, had_room: bool) -> None:
        """Follow a new plan; `restart` must follow.

        Args:
            assignment: the plan.
            had_room: whether this host had memory for the copies of the previous plan.
        """
        self._steps = self._given or 1
        as_budget_allows = self._given is None and not self._choices.per_expert_versions
        self.begins_later = assignment.in_background and as_budget_allows and not assignment.copies_late and had_room

    def restart(self, step: int) -> None:
        """Resume training after this number of steps."""
        self._newest = -math.inf if self.begins_later else step

    def set_pace(self, capture_seconds: float, step_seconds: float, share: float) -> None:
        """Set the interval at which snapshots stay within the budget.

        Args:
            capture_seconds: of a capture, summed over all members.
            step_seconds: of a step, summed over all members.
            share: part of the budget that they may take.
        """
        if self._given is None and step_seconds > 0:
            steps = math.ceil(capture_seconds / (share * self._budget * step_seconds))
            self._steps = min(max(steps, 1), MAX_LOCAL_STEPS)

    def is_due(self, step: int) -> bool:
        """Return whether snapshots are scheduled after this step."""
        return step >= self._newest + self._steps

    def begin_round(self, step: int) -> None:
        """Record that a round of copies begins after this step, with local snapshots if they are scheduled."""
        if self.is_due(step):
            self._newest = step
