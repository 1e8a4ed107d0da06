"""Questions to the Lighthouse that are asked beside training, so that no step waits for its answer."""

from __future__ import annotations

import logging
import queue
import threading
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from evermoe.comm.lighthouse import Lighthouses
from evermoe.comm.reachability import end_connections
from evermoe.native_calls import native_call

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 2.0
"""Time between two questions. The Lighthouse's join limit must exceed it."""
ANSWERED_A_SECOND = 50
"""Answers a second that all members together ask for: large groups ask less often."""
RETRY_SECONDS = 0.1
"""Time between two attempts."""
CONNECT_LIMIT = timedelta(seconds=3)
ANSWER_LIMIT = timedelta(seconds=15)
"""Time after which a question is asked again: it waits for members that are late, or for a Lighthouse that hangs."""
SILENT_SECONDS = 5.0
"""Time without a Lighthouse after which the log says so."""
BACK_SECONDS = 30.0
"""Time between two attempts to reach an earlier one of several Lighthouses again."""
CLOSE_SECONDS = 1.0
"""Time that a question is given to end when its connection is shut."""


class Inquiry:
    """Asks the Lighthouse who there is, in a thread, again and again.

    Args:
        lighthouses: the job's.
        member: this member's id.
    """

    def __init__(self, lighthouses: Lighthouses, member: str) -> None:
        self._lighthouses, self._member = lighthouses, member
        self._address, self._client = lighthouses.current, None
        self._went_back = 0.0
        self._data: dict[str, Any] = {}
        self._seconds = 0.0
        self._is_over, self._is_due = threading.Event(), threading.Event()
        self._thread = threading.Thread()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._latest: dict[str, tuple[int, set[str]]] = {}
        """By Lighthouse, number and members of the latest set that it has answered, so far as this is known."""
        self._heard = 0.0
        self._has_said = False

    def begin(self, data: dict[str, Any], members: int) -> None:
        """Asks now, unless a question is under way, and then again from time to time.

        Args:
            data: what the Lighthouse is told, from the next question on.
            members: how many of them ask so.
        """
        self._data, self._seconds = data, max(AGAIN_SECONDS, members / ANSWERED_A_SECOND)
        self._is_due.set()
        if self._is_over.is_set() or not self._thread.is_alive():
            self._is_over, self._is_due = threading.Event(), threading.Event()
            self._heard = time.monotonic()
            arguments = (self._is_over, self._is_due, self._answers)
            self._thread = threading.Thread(target=self._run, args=arguments, name="evermoe-inquiry", daemon=True)
            self._thread.start()

    def take(self) -> list[Any]:
        """The answers that have come since the last call."""
        taken = []
        while not self._answers.empty():
            taken.append(self._answers.get())
            self._note_set(taken[-1])
        return taken

    def _note_set(self, answer: Any) -> bool:
        """Remembers the set; whether the Lighthouse no longer knew of the latest one before it."""
        address = self._lighthouses.current
        number, members = self._latest.get(address, (0, set()))
        self._latest[address] = found = answer.quorum_id, {each.replica_id for each in answer.participants}
        return found[0] <= number and found[1] != members

    def give_way(self, answer: Any, *, is_intact: bool) -> None:
        """Asks no more, and drops the answers that have not come yet, as another question was answered.

        Args:
            answer: to that question.
            is_intact: whether the members are all there, whatever a Lighthouse says.

        Raises:
            ConnectionError: the Lighthouse has lost its memory, and others may be on their way to it; ask again.
        """
        self.forget()
        if self._note_set(answer) and not is_intact:
            raise ConnectionError("the Lighthouse has lost its memory, and others may be on their way to it")

    def end(self) -> None:
        """Asks no more. What has been asked may still be answered."""
        self._is_over.set()
        self._is_due.set()

    def forget(self) -> None:
        """Asks no more, and drops the answers that have not come yet."""
        self.end()
        taken, self._answers = self.take(), queue.SimpleQueue()
        for answer in taken:
            self._answers.put(answer)

    def close(self) -> None:
        """Ends the thread."""
        self.forget()
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            for address in self._lighthouses.addresses:
                end_connections(f":{urlsplit(address).port or 80}")
            self._thread.join(RETRY_SECONDS)

    def _run(self, is_over: threading.Event, is_due: threading.Event, answers: queue.SimpleQueue[Any]) -> None:
        while not is_over.is_set():
            is_due.clear()
            try:
                with native_call():
                    client = self._connected(is_over)
                    answer = client.quorum(self._member, ANSWER_LIMIT, world_size=1, data=self._data)
            except Exception as error:  # torchft's are of many kinds; whatever it is, this thread goes on
                with native_call():
                    self._note_silence(str(error).split("\n", 1)[0], is_over)
                is_over.wait(RETRY_SECONDS)
                continue
            answers.put(answer)
            self._note_answer()
            is_due.wait(self._seconds)

    def _connected(self, is_over: threading.Event) -> Any:
        """The client of the Lighthouse that is asked now."""
        if time.monotonic() - self._went_back > BACK_SECONDS:
            self._went_back = time.monotonic()
            self._lighthouses.go_back(is_over.is_set)
        if self._client is None or self._address != self._lighthouses.current:
            self._address, self._client = self._lighthouses.connect(CONNECT_LIMIT)
        self._lighthouses.beat(CONNECT_LIMIT)
        return self._client

    def _note_silence(self, why: str, is_over: threading.Event) -> None:
        client, self._client = self._client, None
        try:
            if client is not None:
                client.heartbeat(self._member, CONNECT_LIMIT)
                self._note_answer()  # it is there, and waits for members
                return
        except Exception:  # as above
            logger.debug("no heartbeat reaches the Lighthouse at %s", self._address)
        if time.monotonic() - self._heard <= SILENT_SECONDS:
            return
        if self._lighthouses.are_several and not is_over.is_set():
            self._lighthouses.move_on(why)
            self._heard = time.monotonic()
            return
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "no Lighthouse answers at %s (%s): training goes on without it; until it is back nobody can join, and "
                "after a failure the members wait for it",
                " and ".join(self._lighthouses.addresses),
                why,
            )

    def _note_answer(self) -> None:
        if self._has_said:
            logger.warning("the Lighthouse at %s answers again", self._address)
        self._heard, self._has_said = time.monotonic(), False
