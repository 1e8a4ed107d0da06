"""The current activity of a member, as its probe server reports it: computing, reading its batch, or waiting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from evermoe.comm.batch_read import BatchRead
from evermoe.comm.group import Group
from evermoe.comm.hang_reports import HangReports
from evermoe.comm.own_time import OwnTime
from evermoe.comm.reachability import Reachability

READS = 1 << 63
"""Bit that is flipped in the epoch which a member answers to probes while it computes: it reads its batch just then."""


class Activity:
    """Follows the waits of this member in its groups, and publishes whether it computes or waits.

    Args:
        reach: this member's probe server.
        groups: groups in which this member may wait for others. The first is broken whenever another one is.
        hang_timeout: seconds that a collective waits.
    """

    def __init__(self, reach: Reachability, groups: Sequence[Group], hang_timeout: float) -> None:
        self._reach, self._group = reach, groups[0]
        self.reports = HangReports(groups, hang_timeout)
        self.own_time = OwnTime()
        """Time of the training thread, apart from its waits for others."""
        self.read = BatchRead()
        self.epoch = 0
        """Name of the group that is watched."""
        self.gave_up = False
        """Whether it has waited for others until `hang_timeout` in the latest group."""
        self._is_training = self._is_waiting = False
        for group in groups:
            group.on_wait = self._on_wait

    @property
    def is_computing(self) -> bool:
        """Whether others may have to wait for this member, which waits for none."""
        # A collective that fails breaks its group before it ends: a member that waited with the others is not late.
        return self._is_training and not self._is_waiting and self._group.broken is None

    def begin_epoch(self, epoch: int) -> None:
        """Begin with the members of a new group."""
        self.own_time.latest_wait = math.inf
        self.epoch = epoch
        self._reach.set_status()

    def begin_step(self) -> None:
        """Publish that this member computes, so that others may have to wait for it."""
        if not self._is_training:
            self._is_training = True
            self.reports.note(computes=True)
            self._reach.set_computes(self.epoch)

    @contextmanager
    def reading(self, on_long: Callable[[float], None]) -> Iterator[None]:
        """Publish that this member reads its batch, so that those that wait for it learn the reason.

        Args:
            on_long: called in another thread with the seconds so far, once, if the read takes half of `hang_timeout`.
        """
        self.read.begin_read(on_long)
        self._publish()
        try:
            yield
        finally:
            self.read.end_read()
            self._publish()

    def end(self) -> None:
        """Stop computing: no other member waits for this one any more."""
        self._is_training = False
        self.reports.note(computes=False)

    def _on_wait(self, begins: bool, has_succeeded: bool = True) -> None:
        if begins:
            self.own_time.begin_wait()
        else:
            self.own_time.end_wait()
        self._is_waiting = begins
        self.reports.note(computes=self._is_training and not begins)
        # A member whose wait failed still counts as waiting; one that begins a wait after the others timed out is late.
        # So the status from when the group broke stays, even if another wait ends later.
        if has_succeeded:
            self._publish()

    def _publish(self) -> None:
        """Publish whether this member computes, and reads its batch at that."""
        if self._is_training and self._group.broken is None:
            self._reach.set_computes(0 if self._is_waiting else self.epoch ^ (READS if self.read.is_on else 0))
