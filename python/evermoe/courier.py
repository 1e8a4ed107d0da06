"""Transfers beside training: threads that send and receive for the copies while the network is idle.

A courier never stops the training thread. It begins a message only in a window, between two collectives of the training
thread, unless that says `hurry`; it learns of a lost peer as a result (`Errand.lost`), not as an exception over there.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from evermoe.elastic import Group, Transfer
from evermoe.errors import PeerLost

T = TypeVar("T")
IN_FLIGHT = 2
"""Messages that are under way at a time: while one travels, the next is made ready."""
KEPT_TRANSFERS = 4096
"""Latest transfers that are remembered for traces."""


class Parcel(NamedTuple):
    """A message between two members."""

    data: Tensor
    """uint8, contiguous, on the CPU."""
    peer: int
    tag: int
    """Messages of one tag between two members keep their order."""
    window: int | None = None
    """The window of the step, by `Pacer.expect`, before which it is not sent; None for any."""


class Sent(NamedTuple):
    """A message that was sent. Times are of `time.monotonic_ns`."""

    start: int
    end: int
    nbytes: int
    peer: int
    window: int | None
    """In which window it was begun; None outside of all, as the training thread waited for it."""


class Pacer:
    """Knows when the network is idle, from what the training thread's group tells of its collectives.

    Windows open when a collective ends and close when the next one begins, early or late as the step may be. After
    `expect` it also knows their numbers and how long they last, and lets nobody begin what would not end in time.
    """

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._is_busy = False
        self._is_hurried = False
        self._seen: dict[str, int] = {}
        self._places: Mapping[tuple[str | None, int], tuple[int, float]] = {}
        self._window: int | None = None
        self._reached = -1
        self._closes = float("inf")

    def attach(self, group: Group) -> None:
        """Follows the collectives of a group."""
        group.on_begin, group.on_end = self._begins, self._ends

    def expect(self, places: Mapping[tuple[str | None, int], tuple[int, float]]) -> None:
        """Which windows a step has: (collective, how often it has ended in the step) → (number, seconds)."""
        with self._change:
            self._places = dict(places)

    def begin_step(self) -> None:
        """A step begins, and with it the window that follows no collective, if there is one."""
        with self._change:
            self._seen, self._reached, self._is_hurried = {}, -1, False
            self._open((None, 0))
            self._change.notify_all()

    def hurry(self) -> None:
        """The training thread waits: everything may be sent until the next step begins."""
        with self._change:
            self._is_hurried = True
            self._change.notify_all()

    def _begins(self, name: str) -> None:
        with self._change:
            self._is_busy = True

    def _ends(self, name: str) -> None:
        with self._change:
            self._is_busy = False
            occurrence = self._seen.get(name, 0)
            self._seen[name] = occurrence + 1
            self._open((name, occurrence))
            self._change.notify_all()

    def _open(self, place: tuple[str | None, int]) -> None:
        self._window, seconds = self._places.get(place, (None, 0.0))
        if self._window is not None:
            self._reached = max(self._reached, self._window)
            self._closes = time.monotonic() + seconds

    def wait(self, window: int | None, seconds: float) -> int | None:
        """Until a message of so many seconds may begin; returns the number of the window that is open.

        `window`: the one that it was planned for; it may also go later.
        """
        with self._change:
            self._change.wait_for(lambda: self._may_begin(window, seconds))
            return None if self._is_hurried else self._window

    def _may_begin(self, window: int | None, seconds: float) -> bool:
        if self._is_hurried:
            return True
        if self._is_busy:
            return False
        if not self._places:
            return True
        in_time = self._window is not None and time.monotonic() + seconds <= self._closes
        return in_time and (window is None or self._reached >= window)


class Errand(Generic[T]):
    """Something that a courier does. `result` is there once `wait` has returned, unless a peer was `lost`."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._over = threading.Event()
        self.result: T | None = None
        self.lost: str | None = None
        """Why it was not done: another member is gone, or the group was dropped."""
        self.error: BaseException | None = None
        """What else went wrong; `wait` raises it."""

    def run(self) -> None:
        """In the courier's thread."""
        try:
            self.result = self._work()
        except PeerLost as lost:
            self.lost = str(lost)
        except BaseException as error:  # raised again in the thread that waits
            self.error = error
        finally:
            del self._work
            self._over.set()

    def is_over(self) -> bool:
        """Without waiting."""
        return self._over.is_set()

    def wait(self) -> bool:
        """Until it is over; whether it was done.

        Raises:
            Exception: an error that is no lost peer: full memory, for example.
        """
        self._over.wait()
        if self.error is not None:
            raise self.error
        return self.lost is None


class Courier:
    """A thread that runs errands one after the other, and the messages that they send and receive.

    Args:
        group: of all members, for this and other threads alone.
        pacer: None for one that never waits for a window.
        name: of the thread.
        link: seconds of any message, and bytes a second: how long a message takes.
    """

    def __init__(self, group: Group, pacer: Pacer | None, name: str, link: tuple[float, float] = (0.0, 1e9)) -> None:
        self._group, self._pacer, self.link = group, pacer, link
        self.sent: deque[Sent] = deque(maxlen=KEPT_TRANSFERS)
        """The latest messages."""
        self._errands: queue.SimpleQueue[Errand[object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def go(self, work: Callable[[], T]) -> Errand[T]:
        """Runs `work` in the thread, after the errands before it."""
        errand = Errand(work)
        self._errands.put(errand)  # type: ignore[arg-type]
        return errand

    def receive(self, parcel: Parcel) -> Transfer:
        """Begins to receive; for errands.

        Raises:
            PeerLost: the group is dropped.
        """
        return self._group.receive(parcel.data, parcel.peer, parcel.tag)

    def send(self, parcels: Iterable[Parcel]) -> int:
        """Sends messages, each when its window is open; for errands. Returns the bytes once all are sent.

        Raises:
            PeerLost: a peer is gone, or the group was dropped.
        """
        under_way: deque[tuple[Transfer, Parcel, int, int | None]] = deque()
        total = 0
        for parcel in parcels:
            if len(under_way) == IN_FLIGHT:
                self._arrived(*under_way.popleft())
            window = None
            if self._pacer is not None:
                window = self._pacer.wait(parcel.window, self.link[0] + parcel.data.nbytes / self.link[1])
            start = time.monotonic_ns()
            under_way.append((self._group.send(parcel.data, parcel.peer, parcel.tag), parcel, start, window))
            total += parcel.data.nbytes
        while under_way:
            self._arrived(*under_way.popleft())
        return total

    def close(self) -> None:
        """Ends the thread after the errand that it is at."""
        self._errands.put(None)
        self._thread.join()

    def _arrived(self, transfer: Transfer, parcel: Parcel, start: int, window: int | None) -> None:
        transfer.wait()
        self.sent.append(Sent(start, time.monotonic_ns(), parcel.data.nbytes, parcel.peer, window))

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            errand.run()
