"""Work that runs in another thread, and its result."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Generic, TypeVar

import torch

from evermoe.errors import PeerLost
from evermoe.process.native_calls import native_call

T = TypeVar("T")


class Task(Generic[T]):
    """Work for a courier's thread. `result` is set once `wait` has returned, unless a peer was `lost`."""

    def __init__(self, work: Callable[[], T], after: torch.cuda.Event | None = None) -> None:
        self._work, self._after = work, after
        self._over = threading.Event()
        self.result: T | None = None
        self.lost: str | None = None
        """Reason why the work was not done: another member is lost, or the group was dropped."""
        self.error: BaseException | None = None
        """Any other error; `wait` raises it."""

    def run(self) -> None:
        """Do the work; called in the courier's thread."""
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
        """Cancel work that has not run; `why` becomes `lost`."""
        self.lost = why
        del self._work
        self._over.set()

    def is_over_within(self, seconds: float) -> bool:
        """Wait at most this number of seconds; return whether the work is over."""
        return self._over.wait(seconds)

    def wait(self) -> bool:
        """Wait until the work is over; return whether it was done.

        Raises:
            Exception: an error other than a lost peer, such as full memory.
        """
        self._over.wait()
        if self.error is not None:
            raise self.error
        return self.lost is None


def run_in_thread(task: Task[T], name: str, devices: Iterable[torch.device]) -> None:
    """Run a task in a new thread: see `prepare_thread`."""
    prepare_thread(task, name, devices)()


def prepare_thread(task: Task[T], name: str, devices: Iterable[torch.device]) -> Callable[[], None]:
    """Return a function that runs a task in a new thread.

    Args:
        task: the task.
        name: name of the thread.
        devices: devices that the task reads. On a GPU it sees all writes that the caller's stream has launched by now.
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
    """A thread that calls functions one after the other. `submit` does not wait for it.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._parts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, part: Callable[[], None]) -> None:
        """Call `part`, which must not raise, after the parts before it."""
        self._parts.put(part)

    def close(self) -> None:
        """End the thread after the submitted parts, without waiting for it."""
        self._parts.put(None)

    def _run(self) -> None:
        while (part := self._parts.get()) is not None:
            with native_call():
                part()
            del part
