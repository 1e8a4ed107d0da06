"""Reports to the Lighthouse that members' processes have ended, so that no member waits for their heartbeats to expire.

The Lighthouse names a set once all processes with a fresh heartbeat have requested one. A process that has ended
requests none, but its last heartbeat stays fresh for the Lighthouse's limit, 5 s by default. So other members request a
set in its name. If they are not sure that it has ended, none does, and all wait until its heartbeat expires.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from evermoe.comm._torchft import coordination
from evermoe.comm.messages import MemberReport, Messages, participant
from evermoe.comm.reachability import Reachability
from evermoe.process.native_calls import native_call

logger = logging.getLogger(__name__)

REPORTERS = 2
"""Number of members that report one that has ended: the next ones in the order of ranks."""
REMEMBERED_SECONDS = 10.0
"""Time for which a member is reported in later agreements, too: a report counts as a heartbeat, so the Lighthouse may
consider the member alive."""
MAX_DOUBTS = 2
"""Consecutive inconsistent sets after which this member doubts its reports: one may hold a request that a member sent
before it ended."""
ANSWER_LIMIT = timedelta(seconds=2)
"""Time after which an unanswered report is sent again."""
RETRY_SECONDS = 0.05
"""Time between two reports."""
LATER_SECONDS = 0.01
"""Delay of the report under the member's own name, which is valid only after the one under the other name."""


class EndedMembers:
    """Reports members that have ended to the Lighthouse.

    Args:
        member: this member's id.
        messages: writes the reports.
        reach: knows which members have ended.
        reports: False for a member that resumes without others in any case: it might wrongly report them.
    """

    def __init__(self, member: str, messages: Messages, reach: Reachability, *, reports: bool = True) -> None:
        self._reports = reports
        self._member, self._messages, self._reach = member, messages, reach
        self._ended: set[str] = set()
        """Members known to have ended when the latest set was requested."""
        self._until: dict[str, float] = {}
        """Time until which each member is reported."""
        self._doubts, self._doubtful = 0, set[str]()

    @contextmanager
    def reporting_ended(self, address: str, members: Sequence[str]) -> Iterator[None]:
        """Report members that have ended, in threads, while this thread requests a set for itself.

        This member reports those for which it is among the `reporters`, and those that it has reported recently. It
        reports none if half of the group seems to have ended, as this member may be the one that is cut off. After
        doubt about a group, it reports none until the group changes.

        Args:
            address: address of the Lighthouse.
            members: ids of the latest group, in the order of ranks.
        """
        now, self._messages.refused = time.monotonic(), None
        self._ended = set(self._reach.ended)
        ended = self._ended.intersection(members)
        is_sure = self._reports and 2 * len(ended) < len(members) and set(members) != self._doubtful
        for each in ended if is_sure else ():
            if self._member in reporters(each, members, ended):
                if each not in self._until:
                    logger.info("reporting to the Lighthouse that %s has ended", each)
                self._until[each] = now + REMEMBERED_SECONDS
        self._until = {each: until for each, until in self._until.items() if until > now and is_sure}
        is_over = threading.Event()
        for each in self._until:
            for number, (name, data) in enumerate(self._messages.write_ended(each).items()):
                arguments = (is_over, address, name, data, number * LATER_SECONDS)
                thread = threading.Thread(target=_report, args=arguments, name="evermoe-ended", daemon=True)
                with suppress(RuntimeError):  # no thread can be started: then the heartbeat expires
                    thread.start()
        try:
            yield
        finally:
            is_over.set()

    def check_set(self, number: int, members: list[MemberReport], group: Collection[str]) -> None:
        """Check that a set of the Lighthouse is consistent.

        Args:
            number: number of the set.
            members: its members, as `Messages.read_members` returns them.
            group: ids of this member's latest group.

        Raises:
            ConnectionError: it is not consistent; request another one.
        """
        alive = {each.id: each.data["probe_address"] for each in members}
        doubtful = {each: alive[each] for each in self._ended.intersection(alive)}
        if doubtful:  # each has requested a set before it ended, or is alive
            self._reach.probe(doubtful)
        for each in alive:
            self._until.pop(each, None)
        problem = self._messages.problem(members, group)
        if problem:
            is_named, self._messages.refused = self._messages.names_this_member(members), None
            if is_named:
                named = [participant(each.id, each.data) for each in members]
                self._messages.refused = {"id": number, "participants": named}
            self._doubts += 1
            if self._doubts >= MAX_DOUBTS or self._messages.is_reported_ended:
                self._doubts, self._doubtful = 0, set(group)
            raise ConnectionError(problem)
        self._doubts = 0
        self._reach.ended -= self._ended.difference(alive)


def _report(is_over: threading.Event, address: str, name: str, data: dict[str, Any], pause: float) -> None:
    """Repeat a report until this member's request is answered, which may take several sets."""
    while not is_over.wait(pause):
        pause = RETRY_SECONDS
        try:
            with native_call():
                client = coordination().LighthouseClient(address, ANSWER_LIMIT)
                client.quorum(name, ANSWER_LIMIT, world_size=1, data=data)
        except Exception as error:  # torchft raises many kinds; without a report the heartbeat expires
            logger.info("a report to the Lighthouse under the name %s failed: %s", name, error)


def reporters(ended: str, members: Sequence[str], all_ended: Iterable[str]) -> list[str]:
    """Return the members that report one that has ended: the first ones after it that have not ended.

    >>> reporters("b", ["a", "b", "c", "d"], {"b", "c"})
    ['d', 'a']
    """
    at = members.index(ended)
    following = [*members[at + 1 :], *members[:at]]
    return [each for each in following if each not in all_ended][:REPORTERS]
