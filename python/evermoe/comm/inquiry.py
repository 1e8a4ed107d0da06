"""Background requests to the Lighthouse for the current members, so that no step waits for an answer."""

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
from evermoe.process.native_calls import native_call

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 2.0
"""Time between two requests: the Lighthouse sends nothing unless it is asked. Its join timeout must exceed this."""
REQUESTS_PER_SECOND = 50
"""Requests per second of all members together: members of large groups send fewer."""
RETRY_SECONDS = 0.1
"""Time between two attempts."""
CONNECT_LIMIT = timedelta(seconds=3)
ANSWER_LIMIT = timedelta(seconds=15)
"""Time after which a request is repeated: the Lighthouse hangs, or waits for late members."""
SILENT_SECONDS = 5.0
"""Time without a Lighthouse after which a warning is logged."""
RETURN_SECONDS = 30.0
"""Time between two attempts to reach an earlier one of several Lighthouses again."""
CLOSE_SECONDS = 1.0
"""Time that a request gets to end after its connection is shut."""


class Inquiry:
    """A thread that repeatedly requests the current members from the Lighthouse.

    Args:
        lighthouses: the job's Lighthouses.
        member: this member's id.
    """

    def __init__(self, lighthouses: Lighthouses, member: str) -> None:
        self._lighthouses, self._member = lighthouses, member
        self._address, self._client = lighthouses.current, None
        self._returned = 0.0
        self._data: dict[str, Any] = {}
        self._seconds = 0.0
        self._is_over, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._latest: dict[str, tuple[int, set[str]]] = {}
        """Number and members of the latest known set of each Lighthouse, by address."""
        self._last_answer = 0.0
        self._has_warned = False

    def begin_asking(self, data: dict[str, Any], members: int) -> None:
        """Send a request now, unless one is in progress, and repeat it from time to time.

        Args:
            data: this member's message, used from the next request on.
            members: number of members that send such requests.
        """
        self._data, self._seconds = data, max(REQUEST_SECONDS, members / REQUESTS_PER_SECOND)
        self._wake.set()
        if self._is_over.is_set() or not self._thread.is_alive():
            self._is_over, self._wake = threading.Event(), threading.Event()
            self._last_answer = time.monotonic()
            arguments = (self._is_over, self._wake, self._answers)
            self._thread = threading.Thread(target=self._run, args=arguments, name="evermoe-inquiry", daemon=True)
            self._thread.start()

    def take_answers(self) -> list[Any]:
        """Return the answers that have arrived since the last call."""
        taken = []
        while not self._answers.empty():
            taken.append(self._answers.get())
            self._note_set(taken[-1])
        return taken

    def _note_set(self, answer: Any) -> bool:
        """Store the set; return whether the Lighthouse has lost the previous one in a restart."""
        address = self._lighthouses.current
        number, members = self._latest.get(address, (0, set()))
        self._latest[address] = found = answer.quorum_id, {each.replica_id for each in answer.participants}
        return found[0] <= number and found[1] != members

    def supersede(self, answer: Any, *, is_intact: bool) -> None:
        """Stop the requests and drop outstanding answers, as the training thread's own request was answered.

        Args:
            answer: the answer to that request.
            is_intact: whether the members are complete, whatever a Lighthouse answers.

        Raises:
            ConnectionError: the Lighthouse was restarted, and other members may not have reached it yet; request again.
        """
        self.drop_answers()
        if self._note_set(answer) and not is_intact:
            raise ConnectionError("the Lighthouse was restarted, and other members may not have reached it yet")

    def stop_asking(self) -> None:
        """Send no more requests. Outstanding ones may still be answered."""
        self._is_over.set()
        self._wake.set()

    def drop_answers(self) -> None:
        """Send no more requests, and drop outstanding answers."""
        self.stop_asking()
        taken, self._answers = self.take_answers(), queue.SimpleQueue()
        for answer in taken:
            self._answers.put(answer)

    def close(self) -> None:
        """Stop the thread."""
        self.drop_answers()
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            for address in self._lighthouses.addresses:
                end_connections(f":{urlsplit(address).port or 80}")
            self._thread.join(RETRY_SECONDS)

    def _run(self, is_over: threading.Event, wake: threading.Event, answers: queue.SimpleQueue[Any]) -> None:
        while not is_over.is_set():
            wake.clear()
            try:
                with native_call():
                    client = self._connected(is_over)
                    answer = client.quorum(self._member, ANSWER_LIMIT, world_size=1, data=self._data)
            except Exception as error:  # torchft raises many kinds; after any of them this thread continues
                with native_call():
                    self._handle_silence(str(error).split("\n", 1)[0], is_over)
                is_over.wait(RETRY_SECONDS)
                continue
            answers.put(answer)
            self._note_answer()
            wake.wait(self._seconds)

    def _connected(self, is_over: threading.Event) -> Any:
        """Return a client of the current Lighthouse, and keep the heartbeat running."""
        if time.monotonic() - self._returned > RETURN_SECONDS:
            self._returned = time.monotonic()
            self._lighthouses.return_to_earlier(is_over.is_set)
        if self._client is None or self._address != self._lighthouses.current:
            self._address, self._client = self._lighthouses.connect_client(CONNECT_LIMIT)
        self._lighthouses.start_heartbeat(CONNECT_LIMIT)
        return self._client

    def _handle_silence(self, why: str, is_over: threading.Event) -> None:
        client, self._client = self._client, None
        try:
            if client is not None:
                client.heartbeat(self._member, CONNECT_LIMIT)
                self._note_answer()  # it answers heartbeats, so it is only waiting for members
                return
        except Exception:  # as above
            logger.debug("no heartbeat reaches the Lighthouse at %s", self._address)
        if time.monotonic() - self._last_answer <= SILENT_SECONDS:
            return
        if self._lighthouses.are_several and not is_over.is_set():
            self._lighthouses.switch_to_next(why)
            self._last_answer = time.monotonic()
            return
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "no Lighthouse answers at %s (%s): training continues without it; until it is back no worker can join, "
                "and after a failure the members wait for it",
                " and ".join(self._lighthouses.addresses),
                why,
            )

    def _note_answer(self) -> None:
        if self._has_warned:
            logger.warning("the Lighthouse at %s answers again", self._address)
        self._last_answer, self._has_warned = time.monotonic(), False
