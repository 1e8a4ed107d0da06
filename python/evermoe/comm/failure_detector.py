"""Failure detection in a group: finds silent members, and learns when others have waited for this one in vain."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from evermoe import _native
from evermoe.comm.activity import READS, Activity
from evermoe.comm.group import Group
from evermoe.comm.nccl import Nccl
from evermoe.comm.reachability import Reachability
from evermoe.process.native_calls import native_call

logger = logging.getLogger(__name__)

MAX_WATCHED = 64
"""Largest number of members that one member probes: those that follow it in the order of ranks."""
AT_ONCE = 0.1
"""A collective that fails within these seconds began after the others' collective had timed out."""
BACKOFF = 10
"""Backoff, in hang timeouts, of a member for which others have waited in vain; doubled each further time."""
CHECKS = 8
"""Checks per hang timeout for a long wait and a long read of a batch: no event reports them."""
GPU_CHECK = 0.5
"""Most seconds between two checks whether a communicator of NCCL has ended."""
LONG_READ = 0.5
"""Time that a read of a batch takes, in hang timeouts, when it is reported: before the others give up."""


class FailureDetector:
    """Probes the other members of a group, and ends the waits for a silent one.

    Args:
        reach: this member's probe server and the addresses of the others'.
        groups: groups in which this member may wait for others. The first is used in every epoch, and dropped with the
            others; unused ones stay broken.
        heartbeat_timeout: seconds without an answer after which a member is silent.
        hang_timeout: seconds that a collective waits.
        on_silent: called in the detector's thread with the reason to drop the group.
        on_left_out: called in the detector's thread when others continue without this member.
    """

    def __init__(
        self,
        reach: Reachability,
        groups: Iterable[Group],
        *,
        heartbeat_timeout: float,
        hang_timeout: float,
        on_silent: Callable[[str], None],
        on_left_out: Callable[[], None],
    ) -> None:
        self._reach, self._groups = reach, list(groups)
        self._limit, self._hang_timeout = heartbeat_timeout, hang_timeout
        self._on_silent, self._on_left_out = on_silent, on_left_out
        self._detector: _native.FailureDetector | None = None
        self._threads: list[threading.Thread] = []
        self._is_over = threading.Event()
        self.activity = Activity(reach, self._groups, hang_timeout)
        self._members: dict[str, str] = {}
        self.silent: list[str] = []
        """Members that no longer answer, by id."""
        self.late = ""
        """Members for which the others waited in vain in the latest group, as text for users."""
        self._waited_for_me: str | None = None
        self._times_left_out = 0

    def begin_watch(self, epoch: int, members: Mapping[str, str], first: int) -> None:
        """Begin to probe the other members of a new group.

        Args:
            epoch: name of the group.
            members: addresses of their probe servers, by id, in the order of ranks.
            first: number of them whose ranks are lower than this member's.
        """
        self.end_watch()
        for group in self._all_groups():
            group.timed_out = False
        self._members = dict(members)
        self.activity.begin_epoch(epoch)
        following = list(members.items())
        following = (following[first:] + following[:first])[:MAX_WATCHED]
        self._detector = self._reach.start_detector(dict(following), epoch, self._limit)
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._wait, args=[self._detector], name="evermoe-watch", daemon=True),
            threading.Thread(target=self._check, args=[self._is_over], name="evermoe-checks", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def end_watch(self) -> None:
        """Stop probing."""
        self.activity.end()
        if self._detector is not None:
            self._detector.stop()
            self._is_over.set()
            for thread in self._threads:
                thread.join()
            self._detector = None
            self._members, self.silent = {}, []

    def probe_members(self) -> None:
        """Find out which members of a broken group still answer, and which have waited for which."""
        if self._detector is None:
            return
        gave_up, epoch = any(group.timed_out for group in self._all_groups()), self.activity.epoch
        self.activity.gave_up = gave_up
        self._reach.set_status(gave_up=epoch if gave_up else 0)
        self._reach.probe_group(self._members, self.silent)
        answers = self._reach.answers
        if gave_up:
            how = {epoch: "", epoch ^ READS: ", which reads its batch from its loader"}
            late = {
                each: f"{each} at {self._members[each]}{how[computes]}"
                for each, (computes, _) in answers.items()
                if computes in how
            }
            self.late = ", ".join(late.values())
            if late:  # they learn it from this member's probe server
                logger.warning("waited %g s for %s: the others continue without it", self._hang_timeout, self.late)
            self.activity.reports.log_reports(list(late), list(self._members))
        elif self.activity.own_time.latest_wait < AT_ONCE and self._waited_for_me is None:
            self._waited_for_me = next((each for each, (_, given_up) in answers.items() if given_up == epoch), None)
        self.end_watch()

    def backoff_seconds(self) -> float:
        """Return the seconds to stay away after others have waited for this member in vain; 0 if they have not."""
        if self._waited_for_me is None:
            return 0.0
        seconds = BACKOFF * self._hang_timeout * 2**self._times_left_out
        logger.warning(
            "%s has waited for this member longer than hang_timeout = %g s, and the others continue without it. It "
            "asks to join again in %g s; a new process may join at once. Raise hang_timeout if members' steps differ "
            "more.",
            self._waited_for_me,
            self._hang_timeout,
            seconds,
        )
        self._waited_for_me = None
        self._times_left_out += 1
        self._on_left_out()
        return seconds

    def _wait(self, detector: _native.FailureDetector) -> None:
        self.silent, has_ended, gave_up = detector.wait()
        with native_call():
            self._act(has_ended, gave_up)

    def _check(self, is_over: threading.Event) -> None:
        """Report long waits and reads, and end the collectives of a communicator that has ended.

        This thread calls no driver, which could hold it up.
        """
        pause = self._hang_timeout / CHECKS
        while not is_over.wait(min(pause, GPU_CHECK) if self._communicators() else pause):
            self.activity.read.report_long(LONG_READ * self._hang_timeout)
            self.activity.reports.write_long()
            self._check_gpu()

    def _all_groups(self) -> set[Group]:
        """Return the groups, and the groups linked to them."""
        linked = [each for group in self._groups for each in group.linked if isinstance(each, Group)]
        return {*self._groups, *linked}

    def _communicators(self) -> list[Nccl]:
        return [group.nccl for group in self._all_groups() if group.nccl is not None and group.broken is None]

    def _check_gpu(self) -> None:
        """Drop the members if a communicator has ended, as NCCL has failed or the GPU has waited too long."""
        for nccl in self._communicators():
            end = nccl.end()
            if end is not None:
                self._groups[0].timed_out |= nccl.has_timed_out()
                with native_call():
                    self._on_silent(end)
            elif nccl.has_waited(self._hang_timeout / 2):
                self._reach.set_computes(0)  # the host may be in the script's own wait for the GPU

    def _gpu_waits(self) -> bool:
        """Whether the GPU has waited long enough for others that they cannot have waited for this member."""
        return any(nccl.has_waited(self._hang_timeout / 2) for nccl in self._communicators())

    def _act(self, has_ended: bool, gave_up: str | None) -> None:
        """End the waits of this member after a finding of the detector."""
        if self.silent:
            if has_ended:
                self._reach.ended.add(self.silent[0])
            who = f"{self.silent[0]} at {self._members[self.silent[0]]}"
            self._on_silent(f"{who} has ended" if has_ended else f"{who} has not answered for {self._limit:g} s")
        elif gave_up is not None:
            is_late = self.activity.is_computing and not self._gpu_waits()
            who = "this member" if is_late else "another member"
            self._waited_for_me = gave_up if is_late else None
            reads = ", which reads its batch from its loader," if is_late and self.activity.read.is_on else ""
            self._on_silent(
                f"{gave_up} has waited for {who}{reads} longer than hang_timeout = {self._hang_timeout:g} s"
            )
            if is_late:
                self._on_left_out()
