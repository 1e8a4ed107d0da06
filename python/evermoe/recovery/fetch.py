"""Fetches the units that each rank lacks, from its own memory or from other ranks."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from evermoe._native import digest
from evermoe.comm import transport
from evermoe.comm.courier import PROGRESS_CHECKS, UNLIMITED
from evermoe.comm.group import Group
from evermoe.comm.tags import FETCH
from evermoe.comm.task import Task
from evermoe.errors import PeerLost
from evermoe.profile.memory import in_huge_pages

SENDING_BYTES = 256 << 20
"""Maximum number of bytes that are read and not yet sent; a larger unit is sent alone."""
MESSAGE_BYTES = 64 << 20
"""Maximum size of a message."""
DIGEST_THREADS = 4
"""Maximum number of threads that compute digests of units while other units arrive."""


class Transfer(NamedTuple):
    """A unit that one rank receives from another, or reads from its own memory."""

    unit: str
    source: int
    destination: int
    kind: str
    """Kind of the copy at the source."""


class Fetch:
    """Moves units between the memories of a group's ranks.

    Args:
        group: all members, and their transport.
        nbytes: returns the bytes of a transfer.
        read: writes the bytes of a transfer whose source is this rank to a tensor.
        lend: returns these bytes without a copy, uint8 `[nbytes]`, if nothing writes to them during the fetch; None if
            they must be read.
    """

    def __init__(
        self,
        group: Group,
        nbytes: Callable[[Transfer], int],
        read: Callable[[Transfer, Tensor], None],
        lend: Callable[[Transfer], Tensor | None] = lambda transfer: None,
    ) -> None:
        self._group, self._nbytes, self._read, self._lend = group, nbytes, read, lend
        self._moved = 0
        """Number of messages that were sent or have arrived."""
        self._pool = ThreadPoolExecutor(DIGEST_THREADS, "evermoe-digest")
        self._digests: dict[str, Future[int]] = {}

    def local(self, transfers: Sequence[Transfer]) -> dict[str, Tensor]:
        """Return the units that this rank has in its own memory, read or lent."""
        found = {
            transfer.unit: self._bytes_of(transfer)
            for transfer in transfers
            if transfer.source == transfer.destination == self._group.rank
        }
        for unit, data in found.items():
            self._begin_digest(unit, data)
        return found

    def digests(self) -> dict[str, int]:
        """Return the digest of each fetched unit. They are computed while other units arrive."""
        self._pool.shutdown()
        return {unit: found.result() for unit, found in self._digests.items()}

    def remote(self, transfers: Sequence[Transfer], meanwhile: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
        """Receive this rank's units from other ranks, and send theirs at the same time; collective.

        All ranks wait for each other for as long as data moves on any of them, even beyond the timeout.

        Args:
            transfers: the same, in the same order, on all ranks.
            meanwhile: called in this thread while another one moves the data.

        Raises:
            PeerLost: another member is lost, or nothing has moved for the timeout of a collective; the group is
                dropped.
        """
        if self._group.transport is None or all(each.source == each.destination for each in transfers):
            meanwhile()
            return {}
        incoming, move = self._movement(transfers, self._begin_digest)
        task = Task(move)
        threading.Thread(target=task.run, name="evermoe-fetch", daemon=True).start()
        try:
            meanwhile()
        except BaseException as error:
            self._group.drop(f"a member cannot read what it has: {error}")
            task.is_over_within(threading.TIMEOUT_MAX)  # its own error is a consequence
            raise
        self.complete(task)
        return incoming

    def as_task(self, transfers: Sequence[Transfer], arrived: Callable[[str, Tensor], None]) -> Task[None]:
        """Return `remote` as a task for a background thread, for which `complete` waits; not collective.

        Args:
            transfers: the same, in the same order, on all ranks.
            arrived: called with each unit that this rank receives.
        """
        _, move = self._movement(transfers, arrived)
        return Task(move)

    def _movement(
        self, transfers: Sequence[Transfer], arrived: Callable[[str, Tensor], None]
    ) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Return buffers for the units that this rank receives, and the function that receives and sends units."""
        rank, links = self._group.rank, self._group.transport
        away = [each for each in transfers if each.source != each.destination]
        origins = origins_of(away)
        away.sort(key=lambda each: origins[each] != each.source)  # messages between two ranks keep their order
        incoming = {t.unit: (t, self._empty(t)) for t in away if t.destination == rank}
        outgoing = in_turn([each for each in away if each.source == rank == origins[each]])
        passed_on = [each for each in away if each.source == rank != origins[each]]

        def move() -> None:
            assert links is not None
            arriving = {
                unit: [links.receive(part, transfer.source, FETCH) for part in data.split(MESSAGE_BYTES)]
                for unit, (transfer, data) in incoming.items()
            }
            self._send(outgoing, links)
            passing = []
            for transfer in passed_on:
                data = incoming[transfer.unit][1]
                if transfer.unit in arriving:
                    for message in arriving.pop(transfer.unit):
                        self._wait(message)
                    arrived(transfer.unit, data)
                parts = data.split(MESSAGE_BYTES)
                passing += [links.send(part, transfer.destination, FETCH) for part in parts]
            for unit in list(arriving):
                for message in arriving.pop(unit):
                    self._wait(message)
                arrived(unit, incoming.pop(unit)[1])
            for message in passing:
                self._wait(message)

        return {unit: data for unit, (_, data) in incoming.items()}, move

    def complete(self, task: Task[None]) -> None:
        """Wait for the tasks of all ranks, which run in threads, and exchange their progress; collective.

        Raises:
            PeerLost: as for `remote`.
        """
        limit = self._group.limit_seconds
        moved, since, failure = -1, time.monotonic(), ""
        while not failure:
            is_over = task.is_over_within(limit / PROGRESS_CHECKS)
            failed = task.error is not None or task.lost is not None
            progress = torch.tensor([int(not is_over), int(failed), self._moved])
            try:
                busy, failures, now = self._group.all_reduce(progress).tolist()
            except PeerLost as lost:
                failure = str(lost)
                break
            if failures:
                failure = task.lost or "a member cannot send a unit that it has offered"
            elif not busy:
                break
            elif now != moved:
                moved, since = now, time.monotonic()
            elif time.monotonic() - since >= limit:
                self._group.timed_out = True
                failure = "fetching has stopped: a peer is silent"
        if failure:
            self._group.drop(failure)  # ends the task's waits
        task.wait()
        if failure:
            raise PeerLost(failure)

    def _send(self, outgoing: Sequence[Transfer], links: transport.Transport) -> None:
        under_way: deque[tuple[transport.Transfer, int]] = deque()
        nbytes = 0
        for transfer in outgoing:
            while under_way and nbytes + self._nbytes(transfer) > SENDING_BYTES:
                message, sent = under_way.popleft()
                self._wait(message)
                nbytes -= sent
            for part in self._bytes_of(transfer).split(MESSAGE_BYTES):
                under_way.append((links.send(part, transfer.destination, FETCH), part.nbytes))
                nbytes += part.nbytes
        for message, _ in under_way:
            self._wait(message)

    def _begin_digest(self, unit: str, data: Tensor) -> None:
        self._digests[unit] = self._pool.submit(digest, data.numpy())

    def _wait(self, message: transport.Transfer) -> None:
        message.wait(UNLIMITED)
        self._moved += 1

    def _bytes_of(self, transfer: Transfer) -> Tensor:
        data = self._lend(transfer)
        if data is None or len(data) != self._nbytes(transfer):
            data = self._empty(transfer)
            self._read(transfer, data)
        return data

    def _empty(self, transfer: Transfer) -> Tensor:
        return in_huge_pages(torch.empty(self._nbytes(transfer), dtype=torch.uint8))


def origins_of(transfers: Sequence[Transfer]) -> dict[Transfer, int]:
    """Return the rank that has the unit of each transfer: its source, or the source's own source if that passes it on.

    >>> first, second = Transfer("a", 0, 1, "active"), Transfer("a", 1, 2, "active")
    >>> origins_of([first, second])[second]
    0
    """
    from_elsewhere = {(each.unit, each.destination): each.source for each in transfers}
    return {each: from_elsewhere.get((each.unit, each.source), each.source) for each in transfers}


def in_turn(outgoing: Sequence[Transfer]) -> list[Transfer]:
    """Return the transfers of one source in round-robin order of destinations, so that none waits for all others.

    Example: destinations 1, 1, 1, 2, 3, 3 become 1, 2, 3, 1, 3, 1.
    """
    queues = defaultdict[int, deque[Transfer]](deque)
    for transfer in outgoing:
        queues[transfer.destination].append(transfer)

    def turns() -> Iterator[Transfer]:
        while queues:
            for destination in list(queues):
                yield queues[destination].popleft()
                if not queues[destination]:
                    del queues[destination]

    return list(turns())
