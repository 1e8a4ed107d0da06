"""Brings each rank the units that it lacks: from its own memory, or from other ranks."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evermoe.comm import transport
from evermoe.comm.courier import PROGRESS_CHECKS, UNLIMITED
from evermoe.comm.group import Group
from evermoe.comm.tags import FETCH
from evermoe.comm.task import Task
from evermoe.errors import PeerLost

SENDING_BYTES = 256 << 20
"""Bytes that are read and not yet sent, at most; a larger unit is alone."""
MESSAGE_BYTES = 64 << 20
"""Bytes of a message, at most."""


class Transfer(NamedTuple):
    """A unit that one rank gets from another, or from its own memory."""

    unit: str
    source: int
    destination: int
    kind: str
    """Kind of the copy at the source."""


class Fetch:
    """Moves units between the memories of a group's ranks.

    Args:
        group: all members, and their transport.
        sizes: bytes of each unit.
        read: copies the bytes of a transfer whose source is this rank.
    """

    def __init__(self, group: Group, sizes: Mapping[str, int], read: Callable[[Transfer, Tensor], None]) -> None:
        self._group, self._sizes, self._read = group, sizes, read
        self._moved = 0
        """Messages that were sent or have come."""

    def local(self, transfers: Sequence[Transfer]) -> dict[str, Tensor]:
        """The units that this rank has in its own memory, read."""
        return {
            transfer.unit: self._bytes_of(transfer)
            for transfer in transfers
            if transfer.source == transfer.destination == self._group.rank
        }

    def remote(self, transfers: Sequence[Transfer]) -> dict[str, Tensor]:
        """The units that this rank gets from others; collective. It sends others theirs while these arrive.

        However long it takes, all ranks wait for each other, as long as anything moves anywhere.

        Args:
            transfers: the same, in the same order, on all ranks.

        Raises:
            PeerLost: another member is gone, or nothing has moved for as long as a collective waits; the group is
                dropped.
        """
        rank, links = self._group.rank, self._group.transport
        away = [each for each in transfers if each.source != each.destination]
        origins = origins_of(away)
        away.sort(key=lambda each: origins[each] != each.source)  # messages between two ranks keep their order
        incoming = {
            t.unit: (t, torch.empty(self._sizes[t.unit], dtype=torch.uint8)) for t in away if t.destination == rank
        }
        outgoing = in_turn([each for each in away if each.source == rank == origins[each]])
        passed_on = [each for each in away if each.source == rank != origins[each]]
        if links is None or not away:
            return {}

        def move() -> None:
            arriving = {
                unit: [links.receive(part, transfer.source, FETCH) for part in data.split(MESSAGE_BYTES)]
                for unit, (transfer, data) in incoming.items()
            }
            self._send(outgoing, links)
            passing = []
            for transfer in passed_on:
                for message in arriving.pop(transfer.unit, ()):
                    self._wait(message)
                parts = incoming[transfer.unit][1].split(MESSAGE_BYTES)
                passing += [links.send(part, transfer.destination, FETCH) for part in parts]
            for message in (*passing, *(message for each in arriving.values() for message in each)):
                self._wait(message)

        self._complete(Task(move))
        return {unit: data for unit, (_, data) in incoming.items()}

    def _complete(self, task: Task[None]) -> None:
        """Runs a task in a thread, until those of all ranks are over. All ranks hear how far the others are."""
        thread = threading.Thread(target=task.run, name="evermoe-fetch", daemon=True)
        thread.start()
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
                failure = task.lost or "a member cannot send what it has promised"
            elif not busy:
                break
            elif now != moved:
                moved, since = now, time.monotonic()
            elif time.monotonic() - since >= limit:
                self._group.timed_out = True
                failure = "fetching has stopped: a peer is silent"
        if failure:
            self._group.drop(failure)  # which ends what the thread waits for
        thread.join()
        if task.error is not None:
            raise task.error
        if failure:
            raise PeerLost(failure)

    def _send(self, outgoing: Sequence[Transfer], links: transport.Transport) -> None:
        under_way: deque[tuple[transport.Transfer, int]] = deque()
        nbytes = 0
        for transfer in outgoing:
            while under_way and nbytes + self._sizes[transfer.unit] > SENDING_BYTES:
                message, sent = under_way.popleft()
                self._wait(message)
                nbytes -= sent
            for part in self._bytes_of(transfer).split(MESSAGE_BYTES):
                under_way.append((links.send(part, transfer.destination, FETCH), part.nbytes))
                nbytes += part.nbytes
        for message, _ in under_way:
            self._wait(message)

    def _wait(self, message: transport.Transfer) -> None:
        message.wait(UNLIMITED)
        self._moved += 1

    def _bytes_of(self, transfer: Transfer) -> Tensor:
        data = torch.zeros(self._sizes[transfer.unit], dtype=torch.uint8)
        self._read(transfer, data)
        return data


def origins_of(transfers: Sequence[Transfer]) -> dict[Transfer, int]:
    """For each transfer the rank that has the unit: its source, or where that one gets what it passes on.

    >>> first, second = Transfer("a", 0, 1, "active"), Transfer("a", 1, 2, "active")
    >>> origins_of([first, second])[second]
    0
    """
    from_elsewhere = {(each.unit, each.destination): each.source for each in transfers}
    return {each: from_elsewhere.get((each.unit, each.source), each.source) for each in transfers}


def in_turn(outgoing: Sequence[Transfer]) -> list[Transfer]:
    """The transfers of one source, so that no destination waits for all that the others get.

    Example, of the destinations 1, 1, 1, 2, 3, 3: 1, 2, 3, 1, 3, 1.
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
