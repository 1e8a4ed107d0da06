"""Copies one version of all bundles to the memories of their holders."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from evermoe.comm.courier import Courier, Message, Sent
from evermoe.comm.task import Task
from evermoe.comm.transport import Transfer
from evermoe.copies.snapshot.bundles import BundleArena
from evermoe.copies.snapshot.captures import Captures
from evermoe.copies.snapshot.segments import Segment, Segments
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.errors import CaptureCancelled, CorruptCopy
from evermoe.events import ChunkSent, SnapshotReceived
from evermoe.events.base_event import Listener
from evermoe.state.stored import NO_COPIES, KeptCopies
from evermoe.state.version import step_of

Arriving = dict[int, deque[Transfer]]
"""Messages still to arrive, in order, by number of a bundle that is not visible yet."""
UNDER_WAY = ("waiting", "copying")
"""States of a `Capture` that is not over."""
RESERVED_AT_ONCE = 64 << 20
"""Bytes of an arena that are reserved between two checks: tens of milliseconds."""


class Contents:
    """Content of a round's messages: the state of each bundle, as its arena has it."""

    def even_segments(self, sent: SnapshotRound, copies: KeptCopies) -> Segments:
        """Return messages for the bundles of a round, where none are planned; omit units that the holders have."""
        return sent.store.even_segments(copies)

    def data(self, sent: SnapshotRound, kept: BundleArena) -> Tensor:
        """Return the bytes of a bundle that are sent; its segments are parts of them."""
        return torch.from_numpy(kept.arena.buffer(kept.index))

    def make_ready(self, segment: Segment, wait: Callable[[int | None], object]) -> None:
        """Complete the content of this member's message before it is sent.

        Args:
            segment: the message.
            wait: waits until the bundle is captured up to this end; to its own end for None.
        """
        wait(segment.offset + segment.nbytes if segment.offset else None)

    def accept(self, sent: SnapshotRound, kept: BundleArena) -> bool:
        """Make a bundle visible all of whose messages have arrived. Return whether it matches its digests."""
        return sent.commit(kept)

    def finish(self, sent: SnapshotRound) -> bool:
        """Exchange what is missing once all messages have arrived. Return whether all bundles are complete now."""
        return True


STATES = Contents()


class SnapshotRound:
    """One version on its way to the memories of all holders, in the thread of a courier.

    A bundle becomes visible once it is complete, and the previous version stays until then. Bundles are captured and
    sent in the order of the plan. Each becomes visible at its holder independently, even while the holder sends others.
    The order within a bundle does not matter: it becomes visible at once, with the digests, which are sent last.

    Args:
        store: the arenas.
        version: of the current state.
        courier: sends and receives.
        bundles: numbers of the bundles to copy; None for all.
        copies: units that members already have: holders copy these from their own memory.
        stays: numbers of the bundles that only their primaries capture, for themselves.
        contents: what is sent of each bundle.
        emit: called with `ChunkSent` and `SnapshotReceived` events, in the courier's thread; see `evermoe.Session`.
    """

    def __init__(
        self,
        store: SnapshotStore,
        version: int,
        courier: Courier,
        bundles: Collection[int] | None = None,
        emit: Listener = lambda event: None,
        copies: KeptCopies = NO_COPIES,
        stays: Collection[int] = (),
        contents: Contents = STATES,
    ) -> None:
        self.version, self.store, self.courier, self.emit = version, store, courier, emit
        self._contents = contents
        self._sent_bytes = 0
        every = {kept.number for kept in (*store.own, *store.peers)}
        scheduled = every if bundles is None else bundles
        self.own = [kept for kept in store.own if kept.number in scheduled]
        """Bundles of the version that this member captures."""
        self.captures = Captures(store, self.own, version)
        travels = [kept.number for kept in (*store.own, *store.peers) if kept.number not in stays]
        travels = [number for number in travels if number in scheduled]
        self.peers = [kept for kept in store.peers if kept.number in travels]
        """Bundles of the version that it receives."""
        self._copies = copies
        # Plans are for steps: the first copies of a protection plan omit units that holders have.
        segments = (None if copies else store.segments) or contents.even_segments(self, copies)
        self._segments = Segments(*([segment for segment in both if segment.bundle in travels] for both in segments))
        self._first_step = 0
        self._total_bytes = sum(segment.nbytes for segment in self._segments.sends)
        self.problem = ""
        """Why the version will not be complete though no member is lost: this host has too little memory."""
        self.task: Task[bool]
        """Set by `start`; its result: whether all copies that arrived match their digests."""

    def start(self) -> SnapshotRound:
        """Begin to capture the current state, and continue in the courier's thread.

        If optimizer state is still on its way to this member (see `LateState`), the round begins once that has arrived.
        """
        self._first_step = self.courier.step
        # Values that the script puts in a parameter's place meanwhile, as `EMA.applied` does, must not be read.
        state, tensors = self.store.state, self.store.prepare(self.own)
        if not state.late.missing:
            self.captures.begin_captures(tensors)

        def run() -> bool:
            try:
                if not self.captures.have_begun:
                    state.late.wait(state.late.missing)
                    self.captures.begin_captures(tensors)
                return self._run()
            finally:
                self.captures.end_waits()

        self.task = self.courier.submit(run)
        return self

    @property
    def complete_steps(self) -> dict[int, int]:
        """Steps taken in this member's own copied bundles, by number; empty until all are captured and sent."""
        is_complete = self.task.is_over_within(0) and self.task.result
        return {kept.number: step_of(self.version) for kept in self.own} if is_complete else {}

    def _run(self) -> bool:
        try:
            return self._reserve() and self._exchange()
        except CaptureCancelled as cancelled:
            self.problem = str(cancelled)
            return False
        finally:
            self.captures.release_tensors()

    def _reserve(self) -> bool:
        """Reserve the memory of arenas that have none yet, as captures do; return whether it was available."""
        try:
            for kept, capture in (*((each, None) for each in self.peers), *self.captures):
                # Only the buffer of this version: the other one is reserved with the next version.
                while (capture is None or capture.state in UNDER_WAY) and not kept.arena.reserve(RESERVED_AT_ONCE):
                    self.courier.progress += 1
        except OSError as error:
            self.problem = str(error)
        return not self.problem

    def _exchange(self) -> bool:
        self.captures.read_rest(self.courier)
        for kept in self.peers:
            kept.index = kept.arena.begin(self.version)
        arriving: Arriving = {kept.number: deque() for kept in self.peers}
        for segment, message in zip(
            self._segments.receives, self._messages(self._segments.receives, self.peers), strict=True
        ):
            arriving[segment.bundle].append(self.courier.begin_receive(message))
        for kept in self.peers:
            self._copy_here(kept)
        are_complete: list[bool] = []

        def on_sent(sent: Sent) -> None:
            self._note_sent(sent)
            are_complete.extend(self._publish(arriving, waits=False))

        self.courier.send_messages(self._captured(), on_sent)
        for _, capture in self.captures:
            if capture is not None:
                capture.wait()
        are_complete.extend(self._publish(arriving, waits=True))
        return self._contents.finish(self) and all(are_complete)

    def _publish(self, arriving: Arriving, *, waits: bool) -> Iterator[bool]:
        """Make arrived bundles of peers visible, or all if it `waits`; yield whether each is complete."""
        for kept in self.peers:
            transfers = arriving.get(kept.number)
            while transfers and (waits or transfers[0].has_ended):
                self.courier.wait_received(transfers.popleft())
            if transfers is not None and not transfers:
                del arriving[kept.number]
                yield self._contents.accept(self, kept)

    def _copy_here(self, kept: BundleArena) -> None:
        """Copy what this member already has; bytes that are no longer readable fail their digest check."""
        data = torch.from_numpy(kept.arena.buffer(kept.index))
        for name, offset, nbytes in kept.arena.units():
            if name in self._copies.here:
                self._copies.read(name, data[offset : offset + nbytes])
                self.courier.progress += 1

    def _note_sent(self, sent: Sent) -> None:
        self._sent_bytes += sent.nbytes
        self.emit(ChunkSent(step_of(self.version), self._sent_bytes, self._total_bytes, sent.when))

    def _captured(self) -> Iterator[Message]:
        """Yield the messages, each part as soon as it is captured; the digests when its entire bundle is."""
        captures = {kept.number: capture for kept, capture in self.captures}
        for segment, message in zip(self._segments.sends, self._messages(self._segments.sends, self.own), strict=True):
            capture = captures[segment.bundle]
            self._contents.make_ready(segment, (lambda end: None) if capture is None else capture.wait)
            yield message

    def _messages(self, segments: Sequence[Segment], arenas: Sequence[BundleArena]) -> Iterator[Message]:
        buffers = {kept.number: self._contents.data(self, kept) for kept in arenas}
        for segment in segments:
            data = buffers[segment.bundle][segment.offset : segment.offset + segment.nbytes]
            step = None if segment.step is None else self._first_step + segment.step
            yield Message(data, segment.peer, segment.tag, segment.window, step)

    def send_more(self, messages: Iterable[Message], nbytes: int) -> None:
        """Send messages that are not among the segments, of this number of bytes."""
        self._total_bytes += nbytes
        self.courier.send_messages(messages, self._note_sent)

    def commit(self, kept: BundleArena) -> bool:
        """Make a received bundle visible. Return False if its state does not match its digests."""
        try:
            kept.arena.commit_received(kept.index)
        except CorruptCopy:
            return False
        finally:
            self.courier.progress += 1
        self.emit(SnapshotReceived(step_of(self.version), len(kept.bundle.units)))
        return True
