"""Answers at the Lighthouse in the name of members whose processes have ended, so that nobody waits for them there.

The Lighthouse names a set once all whose heartbeats are fresh have asked. A process that has ended asks no more, and
its last heartbeat is fresh for the Lighthouse's limit, 5 s by default.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from evermoe.comm._torchft import torchft
from evermoe.comm.messages import Messages

logger = logging.getLogger(__name__)

SPEAKERS = 2
"""Members that speak for one that has ended: the next ones in the order of ranks."""
REMEMBERED_SECONDS = 60.0
"""Time for which one that was spoken for may still count as alive at a Lighthouse, as that takes it for a heartbeat."""
ANSWER_LIMIT = timedelta(seconds=2)
"""Time after which it is told again."""
RETRY_SECONDS = 0.05
"""Time between two times that it is told."""
LATER_SECONDS = 0.01
"""Time by which the second of the two names comes later: a set that has it without the first says nothing, and members
ask again."""


class EndedMembers:
    """Speaks for members that have ended.

    Args:
        member: this member's id.
        messages: writes what the Lighthouse is told.
    """

    def __init__(self, member: str, messages: Messages) -> None:
        self._member, self._messages = member, messages
        self._until: dict[str, float] = {}

    @contextmanager
    def speaking(self, address: str, ended: Iterable[str], members: Sequence[str]) -> Iterator[None]:
        """Tells the Lighthouse that members have ended, in threads, while this one asks it itself.

        It does so for those for which this member is among `speakers`, and for those for which it has done so lately.

        Args:
            address: of the Lighthouse.
            ended: the members, by id.
            members: ids of the group that they were in, in the order of ranks.
        """
        now = time.monotonic()
        ended = set(ended)
        for each in ended.intersection(members):
            if self._member in speakers(each, members, ended):
                self._until.setdefault(each, now + REMEMBERED_SECONDS)
        self._until = {each: until for each, until in self._until.items() if until > now}
        is_over = threading.Event()
        for each in self._until:
            logger.info("telling the Lighthouse that %s has ended", each)
            for number, (name, data) in enumerate(self._messages.write_ended(each).items()):
                arguments = (is_over, address, name, data, number * LATER_SECONDS)
                thread = threading.Thread(target=_tell, args=arguments, name="evermoe-ended", daemon=True)
                with suppress(RuntimeError):  # it cannot be started: then the heartbeats get old
                    thread.start()
        try:
            yield
        finally:
            is_over.set()

    def forget(self, alive: Iterable[str]) -> None:
        """Speaks no more for members that speak for themselves."""
        for each in alive:
            self._until.pop(each, None)


def _tell(is_over: threading.Event, address: str, name: str, data: dict[str, Any], pause: float) -> None:
    """Tells it again where it was in a set of which the member that asks has not heard."""
    while not is_over.wait(pause):
        pause = RETRY_SECONDS
        try:
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
