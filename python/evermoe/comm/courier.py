"""Transfers concurrent with training: threads that send and receive for the copies while the network is idle.

A courier never stops the training thread. It begins a message only in a window, between two collectives of the training
thread, unless the training thread calls `Pacer.hurry`. A lost peer is a result (`Task.lost`), not an exception in the
training thread. A courier reads from a GPU on a stream of its own, after the work that the training thread had launched
when it submitted the task.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from evermoe.comm.group import Group
from evermoe.comm.pacer import AT_ONCE, Opening, Pacer, When
from evermoe.comm.task import T, Task
from evermoe.comm.transport import Transfer, Transport
from evermoe.planning.schedule import Link

IN_FLIGHT = 2
"""Messages in flight at a time: while one travels, the next is prepared."""
KEPT_TRANSFERS = 4096
"""Number of latest transfers kept for traces."""
PROGRESS_CHECKS = 16
"""Progress checks per hang timeout."""
UNLIMITED = timedelta(days=7)
"""No limit: the other end may wait for windows or optimizer state. `Courier.wait_for_task` detects silent peers."""


class Message(NamedTuple):
    """A message between two members."""

    data: Tensor
    """uint8, contiguous, on the CPU."""
    peer: int
    tag: int
    """Messages of one tag between two members keep their order."""
    window: int | None = None
    """Window (see `Pacer.expect_windows`) before which it is not sent; None: any window; or `ANY_TIME`, `AT_ONCE`."""
    step: int | None = None
    """The window's step, as numbered by `Pacer.step`; None: the current step."""
    for_vote: bool = False
    """Whether the vote of the current step waits for it."""


class Sent(NamedTuple):
    """A message that was sent. Times are of `time.perf_counter_ns`."""

    start: int
    end: int
    nbytes: int
    peer: int
    window: int | None
    """The window in which it began; None if it began outside all windows."""
    when: When = "background"


class _UnderWay(NamedTuple):
    """A message that is still being sent."""

    transfer: Transfer
    message: Message
    opening: Opening
    on_sent: Callable[[Sent], None]


def _ignore(sent: Sent) -> None:
    pass


class Courier:
    """A thread that runs tasks one after the other, and the messages that they send and receive.

    Args:
        transport: carries the messages.
        pacer: knows the windows; None: messages wait for no window.
        name: name of the thread.
        device: device that tasks read from.
        link: cost model of a message.
    """

    def __init__(
        self,
        transport: Transport,
        pacer: Pacer | None,
        name: str,
        *,
        device: torch.device | None = None,
        link: Link = Link(0.0, 1e9),  # noqa: B008
    ) -> None:
        self._transport, self._pacer, self.link = transport, pacer, link
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self.in_flight = IN_FLIGHT
        """Messages in flight at a time."""
        self.sent: deque[Sent] = deque(maxlen=KEPT_TRANSFERS)
        """The latest messages."""
        self.sent_bytes = 0
        """Bytes of all messages so far."""
        self.progress = 0
        """Count of completed transfers of tasks: while it grows, no peer is silent."""
        self._tasks: queue.SimpleQueue[Task[object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def step(self) -> int:
        """Number of the current step: see `Pacer.step`."""
        return 0 if self._pacer is None else self._pacer.step

    @property
    def windows(self) -> list[float]:
        """Durations in seconds of the windows of a step; empty while they are not known."""
        return [] if self._pacer is None else [seconds for _, seconds in self._pacer.windows.places.values()]

    def submit(self, work: Callable[[], T]) -> Task[T]:
        """Run `work` in the thread, after the tasks before it.

        It sees on a GPU all writes that the caller's stream has already launched.
        """
        after = None
        if self._stream is not None:
            after = torch.cuda.current_stream(self._stream.device).record_event()
        task = Task(work, after)
        self._tasks.put(task)  # type: ignore[arg-type]
        return task

    def begin_receive(self, message: Message) -> Transfer:
        """Begin to receive a message; called by tasks.

        Raises:
            PeerLost: the connections were dropped.
        """
        return self._transport.receive(message.data, message.peer, message.tag)

    def wait_received(self, transfer: Transfer) -> None:
        """Wait without a time limit until a message arrives, as its sender may wait for a window; called by tasks.

        Raises:
            PeerLost: the other member is gone, or the connections were dropped.
        """
        transfer.wait(UNLIMITED)
        self.progress += 1

    def send_messages(self, messages: Iterable[Message], on_sent: Callable[[Sent], None] = _ignore) -> int:
        """Send messages, each when its window is open, and return their bytes once all are sent; called by tasks.

        Args:
            messages: the messages, in order.
            on_sent: called with each message that was sent.

        Raises:
            PeerLost: a peer is gone, or the connections were dropped.
        """
        under_way: deque[_UnderWay] = deque()
        total = 0
        for message in messages:
            if len(under_way) == self.in_flight:
                self._note_sent(under_way.popleft())
            before = sum(self.message_seconds(each.message.data.nbytes) for each in under_way)
            opening = self._wait_for_window(message, before, under_way)
            transfer = self._transport.send(message.data, message.peer, message.tag)
            under_way.append(_UnderWay(transfer, message, opening, on_sent))
            total += message.data.nbytes
        while under_way:
            self._note_sent(under_way.popleft())
        return total

    def send_at_once(self, messages: Iterable[Message]) -> None:
        """Send messages that peers need first, without a window and without timing the link; called by tasks.

        Raises:
            PeerLost: a peer is gone, or the connections were dropped.
        """
        listed = list(messages)
        for transfer in [self._transport.send(each.data, each.peer, each.tag) for each in listed]:
            transfer.wait(UNLIMITED)
            self.progress += 1
        self.sent_bytes += sum(each.data.nbytes for each in listed)

    def message_seconds(self, nbytes: int) -> float:
        """Return the seconds that a message of `nbytes` takes."""
        return self.link.alpha + nbytes / self.link.beta

    def wait_for_task(self, task: Task[T], group: Group) -> bool:
        """Wait in the training thread until a task is over, like `Task.wait`; call `Pacer.hurry` first.

        If no transfer completes for as long as a collective waits for a silent peer, the training thread's group is
        dropped. The two limits must be about equal: members that wait for the same peer in a collective time out then,
        and continue without a member that is later.
        """
        has_succeeded = False
        group.on_wait(True)
        try:
            moved, since = self.progress, time.monotonic()
            while not self._transport.broken and not task.is_over_within(
                self._transport.limit_seconds / PROGRESS_CHECKS
            ):
                if self.progress != moved:
                    moved, since = self.progress, time.monotonic()
                elif time.monotonic() - since >= self._transport.limit_seconds:
                    group.timed_out = True
                    group.drop("copies have stopped: a peer is silent")
            has_succeeded = task.wait()
            return has_succeeded
        finally:
            group.on_wait(False, has_succeeded)

    def _wait_for_window(self, message: Message, before: float, under_way: deque[_UnderWay]) -> Opening:
        if self._pacer is None or message.window == AT_ONCE:
            return Opening("background", None, time.perf_counter_ns())
        seconds, for_vote = self.message_seconds(message.data.nbytes), message.for_vote
        if not self._pacer.may_begin(message.window, before + seconds, message.step, for_vote=for_vote):
            while under_way:  # messages in flight are recorded now, not when the next window opens
                self._note_sent(under_way.popleft())
            before = 0.0
        return self._pacer.wait_for_window(message.window, before + seconds, message.step, for_vote=for_vote)

    def close(self) -> None:
        """End the thread after the current task."""
        self._tasks.put(None)
        self._thread.join()

    def _note_sent(self, each: _UnderWay) -> None:
        each.transfer.wait(UNLIMITED)  # its receiver may wait for optimizer state first
        self.progress += 1
        end, nbytes = time.perf_counter_ns(), each.message.data.nbytes
        self.sent_bytes += nbytes
        when, window, start = each.opening
        sent = Sent(start, end, nbytes, each.message.peer, window, when)
        self.sent.append(sent)
        each.on_sent(sent)

    def _run(self) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            while (task := self._tasks.get()) is not None:
                task.run()
