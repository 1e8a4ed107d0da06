"""Work that another thread does, and its result."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Generic, TypeVar

import torch

from evermoe.errors import PeerLost
from evermoe.native_calls import native_call

T = TypeVar("T")


class Task(Generic[T]):
    """Work for a courier's thread. `result` is there once `wait` has returned, unless a peer was `lost`."""

    def __init__(self, work: Callable[[], T], after: torch.cuda.Event | None = None) -> None:
        self._work, self._after = work, after
        self._over = threading.Event()
        self.result: T | None = None
        self.lost: str | None = None
        """Why it was not done: another member is gone, or the group was dropped."""
        self.error: BaseException | None = None
        """What else went wrong; `wait` raises it."""

    def run(self) -> None:
        """In the courier's thread."""
        try:
            if self._after is not None:
                torch.cuda.current_stream().wait_event(self._after)
            with native_call():
                self.result = self._work()
        except PeerLost as lost:
            self.lost = str(lost)
        except BaseException as error:  # raised again in the thread that waits
            self.error = error
        finally:
            del self._work
            self._over.set()

    def cancel(self, why: str) -> None:
        """It was never run, and will not be: `lost` says why."""
        self.lost = why
        del self._work
        self._over.set()

    def is_over_within(self, seconds: float) -> bool:
        """Whether it is over by then."""
        return self._over.wait(seconds)

    def wait(self) -> bool:
        """Waits until it is over; returns whether it was done.

        Raises:
            Exception: an error that is no lost peer: full memory, for example.
        """
        self._over.wait()
        if self.error is not None:
            raise self.error
        return self.lost is None


def run_beside(task: Task[T], name: str, devices: Iterable[torch.device]) -> None:
    """Runs a task in a thread of its own: see `prepared_beside`."""
    prepared_beside(task, name, devices)()


def prepared_beside(task: Task[T], name: str, devices: Iterable[torch.device]) -> Callable[[], None]:
    """What runs a task in a thread of its own, when it is called.

    Args:
        name: of the thread.
        devices: what it reads from a GPU of these is what the caller's stream will have written by now.
    """
    device = next((device for device in devices if device.type == "cuda"), None)
    stream = None if device is None else torch.cuda.Stream(device)
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))

    def run() -> None:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            task.run()

    return threading.Thread(target=run, name=name, daemon=True).start


class Worker:
    """A thread that does one thing after the other. To give it something to do, nobody waits until it runs.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._parts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, part: Callable[[], None]) -> None:
        """Does `part`, which raises nothing, after what came before."""
        self._parts.put(part)

    def close(self) -> None:
        """Ends the thread after what it has to do; waits for nothing."""
        self._parts.put(None)

    def _run(self) -> None:
        while (part := self._parts.get()) is not None:
            with native_call():
                part()
            del part
