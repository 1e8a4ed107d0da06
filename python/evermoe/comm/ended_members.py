"""Answers at the Lighthouse in the name of members whose processes have ended, so that nobody waits for them there.

The Lighthouse names a set once all whose heartbeats are fresh have asked. A process that has ended asks no more, and
its last heartbeat is fresh for the Lighthouse's limit, 5 s by default. Where there is doubt whether a member has ended,
nobody speaks for it, and members wait until its heartbeat is old.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from evermoe.comm._torchft import torchft
from evermoe.comm.messages import Messages, Told
from evermoe.comm.reachability import Reachability
from evermoe.native_calls import native_call

logger = logging.getLogger(__name__)

SPEAKERS = 2
"""Members that speak for one that has ended: the next ones in the order of ranks."""
REMEMBERED_SECONDS = 10.0
"""Time for which the Lighthouse may take a member for alive that was spoken for, as that counts as a heartbeat: so long
it is spoken for in further agreements, too."""
MAX_DOUBTS = 2
"""Sets in a row that are not believed, until there is doubt: one may have what a member asked before it ended."""
ANSWER_LIMIT = timedelta(seconds=2)
"""Time after which the Lighthouse is told again."""
RETRY_SECONDS = 0.05
"""Time between two times that it is told."""
LATER_SECONDS = 0.01
"""Time by which the member's own name comes after the other one, without which it is not believed."""


class EndedMembers:
    """Speaks for members that have ended.

    Args:
        member: this member's id.
        messages: writes what the Lighthouse is told.
        reach: knows who has ended.
        speaks: False for one that goes on without others in any case, which it might wrongly take for dead.
    """

    def __init__(self, member: str, messages: Messages, reach: Reachability, *, speaks: bool = True) -> None:
        self._speaks = speaks
        self._member, self._messages, self._reach = member, messages, reach
        self._ended: set[str] = set()
        """Members that have ended, as far as was known when the Lighthouse was asked."""
        self._until: dict[str, float] = {}
        """Until when members are spoken for."""
        self._doubts, self._doubtful = 0, set[str]()

    @contextmanager
    def speaking(self, address: str, members: Sequence[str]) -> Iterator[None]:
        """Tells the Lighthouse that members have ended, in threads, while this one asks it itself.

        It does so for those for which this member is among `speakers`, and for those for which it has done so lately.
        Of half of a group it does not believe that they have ended: it may be this member that is cut off. Where there
        was doubt, it speaks for nobody until the group is another one.

        Args:
            address: of the Lighthouse.
            members: ids of the latest group, in the order of ranks.
        """
        now, self._messages.refused = time.monotonic(), None
        self._ended = set(self._reach.ended)
        gone = self._ended.intersection(members)
        is_sure = self._speaks and 2 * len(gone) < len(members) and set(members) != self._doubtful
        for each in gone if is_sure else ():
            if self._member in speakers(each, members, gone):
                if each not in self._until:
                    logger.info("telling the Lighthouse that %s has ended", each)
                self._until[each] = now + REMEMBERED_SECONDS
        self._until = {each: until for each, until in self._until.items() if until > now and is_sure}
        is_over = threading.Event()
        for each in self._until:
            for number, (name, data) in enumerate(self._messages.write_ended(each).items()):
                arguments = (is_over, address, name, data, number * LATER_SECONDS)
                thread = threading.Thread(target=_tell, args=arguments, name="evermoe-ended", daemon=True)
                with suppress(RuntimeError):  # it cannot be started: then the heartbeats get old
                    thread.start()
        try:
            yield
        finally:
            is_over.set()

    def check(self, number: int, told: list[Told], group: Collection[str]) -> None:
        """Checks whether the set that the Lighthouse has answered with is to be believed.

        Args:
            number: the set's.
            told: its members, as `Messages.read` has them.
            group: this member's latest one.

        Raises:
            ConnectionError: it is not; ask again.
        """
        alive = {each.id: each.data["probe_address"] for each in told}
        doubtful = {each: alive[each] for each in self._ended.intersection(alive)}
        if doubtful:  # either it has asked before it ended, or it lives
            self._reach.probe(doubtful)
        for each in alive:
            self._until.pop(each, None)
        problem = self._messages.problem(told, group)
        if problem:
            self._messages.refused = number if self._messages.names(told) else None
            self._doubts += 1
            if self._doubts >= MAX_DOUBTS or self._messages.is_spoken_for:
                self._doubts, self._doubtful = 0, set(group)
            raise ConnectionError(problem)
        self._doubts = 0
        self._reach.ended -= self._ended.difference(alive)


def _tell(is_over: threading.Event, address: str, name: str, data: dict[str, Any], pause: float) -> None:
    """Tells the Lighthouse again and again until the member that asks has its answer, which may come in a later set."""
    while not is_over.wait(pause):
        pause = RETRY_SECONDS
        try:
            with native_call():
                client = torchft().coordination.LighthouseClient(address, ANSWER_LIMIT)
                client.quorum(name, ANSWER_LIMIT, world_size=1, data=data)
        except Exception as error:  # torchft's are of many kinds; the heartbeats get old
            logger.info("the Lighthouse was not told so under the name %s: %s", name, error)


def speakers(ended: str, members: Sequence[str], all_ended: Iterable[str]) -> list[str]:
    """The members that speak for one that has ended: the first that follow it, of those that have not.

    >>> speakers("b", ["a", "b", "c", "d"], {"b", "c"})
    ['d', 'a']
    """
    at = members.index(ended)
    following = [*members[at + 1 :], *members[:at]]
    return [each for each in following if each not in all_ended][:SPEAKERS]
