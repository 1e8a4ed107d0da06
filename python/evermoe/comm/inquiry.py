"""Questions to the Lighthouse that are asked beside training, so that no step waits for its answer."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from evermoe.comm.reach import end_connections

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.1
"""Time between two attempts."""
SILENT_SECONDS = 5.0
"""Time without a Lighthouse after which the log says so."""
CLOSE_SECONDS = 1.0
"""Time that a question is given to end when its connection is shut."""


class Inquiry:
    """Asks the Lighthouse who there is, in a thread, until it answers.

    Args:
        lighthouse: its address.
        connect: makes a client of it; raises what `ask` may raise.
        ask: asks by such a client, with the text of the question.
    """

    def __init__(self, lighthouse: str, connect: Callable[[], Any], ask: Callable[[Any, dict[str, Any]], Any]) -> None:
        self._lighthouse, self._connect, self._ask = lighthouse, connect, ask
        self._client: Any = None
        self._asked: Any = None
        self._is_over = threading.Event()
        self._is_over.set()
        self._thread = threading.Thread()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._silent_since: float | None = None
        self._has_said = False

    def begin(self, asked: Any, data: dict[str, Any]) -> None:
        """Asks, unless the same is being asked.

        Args:
            asked: what the question is compared by.
            data: its text.
        """
        if asked == self._asked and not self._is_over.is_set():
            return
        self.end()
        self._asked, self._is_over = asked, threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=[data, self._is_over], name="evermoe-inquiry", daemon=True
        )
        self._thread.start()

    def take(self) -> list[Any]:
        """The answers that have come since the last call."""
        taken = []
        while not self._answers.empty():
            taken.append(self._answers.get())
        return taken

    def end(self) -> None:
        """Forgets the question that is under way: what it is answered counts no more."""
        self._is_over.set()

    def close(self) -> None:
        """Ends the thread."""
        self.end()
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            end_connections(f":{urlsplit(self._lighthouse).port}")
            self._thread.join(RETRY_SECONDS)

    def _run(self, data: dict[str, Any], is_over: threading.Event) -> None:
        while not is_over.is_set():
            try:
                client = self._client = self._client or self._connect()
                answer = self._ask(client, data)
            except (RuntimeError, TimeoutError, ConnectionError) as error:
                self._client = None
                self._note_silence(str(error).split("\n", 1)[0])
                is_over.wait(RETRY_SECONDS)
                continue
            self._note_answer()
            if not is_over.is_set():
                self._answers.put(answer)
                is_over.set()

    def _note_silence(self, why: str) -> None:
        self._silent_since = self._silent_since or time.monotonic()
        if not self._has_said and time.monotonic() - self._silent_since > SILENT_SECONDS:
            self._has_said = True
            logger.warning(
                "no Lighthouse answers at %s (%s): training goes on without it; until it is back nobody can join, and "
                "after a failure the members wait for it",
                self._lighthouse,
                why,
            )

    def _note_answer(self) -> None:
        if self._has_said:
            logger.warning("the Lighthouse at %s answers again", self._lighthouse)
        self._silent_since, self._has_said = None, False
