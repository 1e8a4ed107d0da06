"""Transfers beside training: threads that send and receive for the copies while the network is idle.

A courier never stops the training thread. It begins a message only in a window, between two collectives of the training
thread, unless that says `hurry`; it learns of a lost peer as a result (`Errand.lost`), not as an exception over there.
What it reads from a GPU it reads on a stream of its own, after what the training thread had launched when it was told.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from evermoe.errors import PeerLost
from evermoe.group import Group, Transfer
from evermoe.planning.schedule import Link

T = TypeVar("T")
Listener = Callable[[str, dict[str, Any]], None]
"""Is told the name and fields of each event of a session."""
IN_FLIGHT = 2
"""Messages that are under way at a time: while one travels, the next is made ready."""
KEPT_TRANSFERS = 4096
"""Latest transfers that are remembered for traces."""
LOOKS = 16
"""At what an errand does, in the time that a silent peer is waited for."""
UNLIMITED = timedelta(days=7)
"""What is received may come much later: its sender waits for windows. `Courier.wait` notices silent peers."""


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
    """A message that was sent. Times are of `time.perf_counter_ns`."""

    start: int
    end: int
    nbytes: int
    peer: int
    window: int | None
    """In which window it was begun; None outside of all, as the training thread waited for it."""


class TimedStep(NamedTuple):
    """A step as the pacer saw it. Times are of `time.perf_counter_ns`."""

    start: int
    end: int
    busy: list[tuple[str, int, int]]
    """Name, start and end of what the training thread kept the network busy with, one after the other."""


class Opening(NamedTuple):
    """When a message may begin."""

    window: int | None
    """Number of the window that is open; None if the training thread is in a hurry."""
    at: int
    """Now: no collective had begun yet."""


class _UnderWay(NamedTuple):
    """A message whose end is not known yet."""

    transfer: Transfer
    parcel: Parcel
    opening: Opening
    on_sent: Callable[[int], None]


def _ignore(nbytes: int) -> None:
    pass


class Pacer:
    """Knows when the network is idle, from what the training thread's group tells of its collectives.

    Windows open when a collective ends and close when the next one begins, early or late as the step may be. After
    `expect` it also knows their numbers and how long they last, and lets nobody begin what would not end in time.

    A step lasts from one `begin_step` to the next: from when a version of the state is there to the next one.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self._change = threading.Condition()
        self._is_busy = False
        self._busy_since = 0
        self._began = 0
        self._is_hurried = False
        self._seen: dict[str, int] = {}
        self._places: Mapping[tuple[str | None, int], tuple[int, float]] = {}
        self._window: int | None = None
        self._reached = -1
        self._closes = 0.0
        self._wanted = 0
        self._recorded: list[TimedStep] = []
        self._step: tuple[int, list[tuple[str, int, int]]] | None = None

    def attach(self, group: Group) -> None:
        """Follows the collectives of a group."""
        group.on_begin, group.on_end = self._begins, self._ends

    def expect(self, places: Mapping[tuple[str | None, int], tuple[int, float]]) -> None:
        """Which windows a step has: (collective, how often it has ended in the step) → (number, seconds)."""
        with self._change:
            self._places = dict(places)
            self._window = None
            self._change.notify_all()

    # ---- the training thread

    def begin_step(self) -> None:
        """A step begins, and with it the window that follows no collective, if there is one."""
        with self._change:
            now = self._began = self._now()
            self._record_step(now)
            self._seen, self._reached, self._is_hurried = {}, -1, False
            self._open((None, 0), now)
            self._change.notify_all()

    def begin_forward(self) -> None:
        """Collectives since the step's beginning, of an evaluation for example, are none of an ordinary step's."""
        with self._change:
            if self._seen:
                self._seen, self._reached = {}, -1
                self._open((None, 0), self._now())
                self._change.notify_all()

    def hurry(self) -> None:
        """The training thread waits: everything may be sent until the next step begins."""
        with self._change:
            self._is_hurried = True
            self._change.notify_all()

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """The training thread keeps the network busy, or waits for it; like a collective of this name."""
        self._begins(name)
        try:
            yield
        finally:
            self._ends(name)

    def transfer_begins(self) -> None:
        """Something is sent from here, earlier perhaps than planned: the window that is open closes.

        For transfers that run side by side, such as those of a pipeline, in place of an attached group.
        """
        with self._change:
            self._window = None

    def transfer_ends(self, name: str, at: int) -> None:
        """Such a transfer is over since `at`, of `time.perf_counter_ns`; the window after it opened then, if any.

        A thread may be late to say so: what was over before the step began is none of this step's.
        """
        with self._change:
            if at >= self._began:
                self._ends(name, at)

    def _begins(self, name: str) -> None:
        with self._change:
            self._is_busy, self._busy_since = True, self._now()

    def _ends(self, name: str, at: int | None = None) -> None:
        with self._change:
            now = self._now() if at is None else at
            self._is_busy = False
            occurrence = self._seen.get(name, 0)
            self._seen[name] = occurrence + 1
            if self._step is not None:
                self._step[1].append((name, self._busy_since, now))
            self._open((name, occurrence), now)
            self._change.notify_all()

    def _open(self, place: tuple[str | None, int], now: int) -> None:
        self._window, seconds = self._places.get(place, (None, 0.0))
        if self._window is not None:
            self._reached = max(self._reached, self._window)
            self._closes = now + seconds * 1e9

    # ---- profiles

    def record(self, steps: int) -> None:
        """Records so many steps, from the next one on; 0 to stop. What was recorded before is forgotten."""
        with self._change:
            self._wanted, self._recorded, self._step = steps, [], None

    def recorded(self) -> list[TimedStep]:
        """The steps recorded so far that are over."""
        with self._change:
            return list(self._recorded)

    def _record_step(self, now: int) -> None:
        if self._step is not None:
            self._recorded.append(TimedStep(self._step[0], now, self._step[1]))
        self._step = (now, []) if len(self._recorded) < self._wanted else None

    # ---- the couriers' threads

    def wait(self, window: int | None, seconds: float) -> Opening:
        """Until a message of so many seconds may begin.

        `window`: the one that it was planned for; it may also go later.
        """
        with self._change:
            while not self._may_begin(window, seconds, now := self._now()):
                self._change.wait()
            return Opening(None if self._is_hurried else self._window, now)

    def may_begin(self, window: int | None, seconds: float) -> bool:
        """Whether `wait` would return at once."""
        with self._change:
            return self._may_begin(window, seconds, self._now())

    def _may_begin(self, window: int | None, seconds: float, now: int) -> bool:
        if self._is_hurried:
            return True
        if self._is_busy:
            return False
        if not self._places:
            return True
        in_time = self._window is not None and now + seconds * 1e9 <= self._closes
        return in_time and (window is None or self._reached >= window)


class Errand(Generic[T]):
    """Something that a courier does. `result` is there once `wait` has returned, unless a peer was `lost`."""

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
            self.result = self._work()
        except PeerLost as lost:
            self.lost = str(lost)
        except BaseException as error:  # raised again in the thread that waits
            self.error = error
        finally:
            del self._work
            self._over.set()

    def is_over_within(self, seconds: float) -> bool:
        """Whether it is over by then."""
        return self._over.wait(seconds)

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
        device: that errands read from.
        link: how long a message takes.
    """

    def __init__(
        self,
        group: Group,
        pacer: Pacer | None,
        name: str,
        *,
        device: torch.device | None = None,
        link: Link = Link(0.0, 1e9),  # noqa: B008
    ) -> None:
        self._group, self._pacer, self.link = group, pacer, link
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self.sent: deque[Sent] = deque(maxlen=KEPT_TRANSFERS)
        """The latest messages."""
        self.progress = 0
        """Grows with everything that is done for errands: as long as it does, nobody is silent."""
        self._errands: queue.SimpleQueue[Errand[object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def go(self, work: Callable[[], T]) -> Errand[T]:
        """Runs `work` in the thread, after the errands before it.

        What it reads from a GPU is what the caller's stream will have written by then.
        """
        after = None
        if self._stream is not None:
            after = torch.cuda.current_stream(self._stream.device).record_event()
        errand = Errand(work, after)
        self._errands.put(errand)  # type: ignore[arg-type]
        return errand

    def receive(self, parcel: Parcel) -> Transfer:
        """Begins to receive; for errands.

        Raises:
            PeerLost: the group is dropped.
        """
        return self._group.receive(parcel.data, parcel.peer, parcel.tag)

    def arrived(self, transfer: Transfer) -> None:
        """Waits for what was begun to receive, however long its sender waits for a window; for errands.

        Raises:
            PeerLost: the other member is gone, or the group was dropped.
        """
        transfer.wait(UNLIMITED)
        self.progress += 1

    def send(self, parcels: Iterable[Parcel], on_sent: Callable[[int], None] = _ignore) -> int:
        """Sends messages, each when its window is open; for errands. Returns the bytes once all are sent.

        `on_sent` is told the bytes of each message that is sent.

        Raises:
            PeerLost: a peer is gone, or the group was dropped.
        """
        under_way: deque[_UnderWay] = deque()
        total = 0
        for parcel in parcels:
            if len(under_way) == IN_FLIGHT:
                self._note_sent(under_way.popleft())
            before = sum(self.seconds(each.parcel.data.nbytes) for each in under_way)
            opening = self._wait_for_window(parcel, before, under_way)
            transfer = self._group.send(parcel.data, parcel.peer, parcel.tag)
            under_way.append(_UnderWay(transfer, parcel, opening, on_sent))
            total += parcel.data.nbytes
        while under_way:
            self._note_sent(under_way.popleft())
        return total

    def seconds(self, nbytes: int) -> float:
        """How long a message takes."""
        return self.link.alpha + nbytes / self.link.beta

    def wait(self, errand: Errand[T], group: Group) -> bool:
        """As `Errand.wait`, for the training thread, which has hurried.

        Drops the training thread's group if nothing moves for as long as a collective waits for a silent peer; hardly
        later, as members that wait for the same peer in a collective then agree, and go on without who comes too late.
        """
        moved, since = self.progress, time.monotonic()
        while not self._group.broken and not errand.is_over_within(self._group.limit_seconds / LOOKS):
            if self.progress != moved:
                moved, since = self.progress, time.monotonic()
            elif time.monotonic() - since >= self._group.limit_seconds:
                group.drop("copies have stopped: a peer is silent")
        return errand.wait()

    def _wait_for_window(self, parcel: Parcel, before: float, under_way: deque[_UnderWay]) -> Opening:
        if self._pacer is None:
            return Opening(None, time.perf_counter_ns())
        seconds = self.seconds(parcel.data.nbytes)
        if not self._pacer.may_begin(parcel.window, before + seconds):
            while under_way:  # what is under way is noted now, not when the next window opens
                self._note_sent(under_way.popleft())
            before = 0.0
        return self._pacer.wait(parcel.window, before + seconds)

    def close(self) -> None:
        """Ends the thread after the errand that it is at."""
        self._errands.put(None)
        self._thread.join()

    def _note_sent(self, each: _UnderWay) -> None:
        each.transfer.wait()
        self.progress += 1
        end, nbytes = time.perf_counter_ns(), each.parcel.data.nbytes
        self.sent.append(Sent(each.opening.at, end, nbytes, each.parcel.peer, each.opening.window))
        each.on_sent(nbytes)

    def _run(self) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            while (errand := self._errands.get()) is not None:
                errand.run()
