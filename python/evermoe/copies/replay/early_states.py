"""Full states that replicas need before they can follow a step, sent while the step computes.

    step n   begins ─ [announcements ─ states, in windows] ─ backward ─ [states take effect ─ gradients of n] ─ VOTE

A state takes effect only once the gradients arrive: until then a replica keeps what it had. So a member that is lost in
the middle of a step leaves no state that is torn, or newer than those of others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from evermoe._native import RECORD_HEADER_BYTES, digest
from evermoe.comm.courier import Courier, Message
from evermoe.comm.pacer import ANY_TIME
from evermoe.comm.tags import REPLAY_STATES
from evermoe.comm.transport import Transfer
from evermoe.copies.replay.part import part_name, parts_of
from evermoe.copies.replay.sender import GradientSender
from evermoe.copies.replay.source import Source
from evermoe.copies.snapshot.link import message_bytes
from evermoe.errors import PeerLost
from evermoe.state.catalog import UnitCatalog

MESSAGES_A_WINDOW = 4
"""Messages that fit into the longest window, so that shorter windows have room for some, too."""
MIN_BYTES = 4096
"""If a message of this size does not fit into its part of the longest window, windows are too short for states."""


class Cut(NamedTuple):
    """Sizes into which states are divided."""

    message_bytes: int
    """Maximum bytes of a message."""
    room: float
    """Bytes that the windows of a step have time for; the rest is sent concurrently with compute."""


def cut_for(windows: Sequence[float], alpha: float, beta: float, max_bytes: int) -> Cut:
    """Choose the size of messages so that they fit into windows.

        >>> cut_for([0.4, 0.1], alpha=0.0, beta=1e6, max_bytes=1 << 20)  # messages of 0.1 s: four, then one
        Cut(message_bytes=100000, room=500000)
        >>> cut_for([], alpha=0.0, beta=1e6, max_bytes=1 << 20)
        Cut(message_bytes=1048576, room=inf)

    Args:
        windows: seconds of each window of a step; empty if they are unknown.
        alpha: minimum seconds of a message.
        beta: bytes per second.
        max_bytes: maximum bytes of a message.
    """
    if not windows:
        return Cut(max_bytes, math.inf)
    fitting = int((max(windows) / MESSAGES_A_WINDOW - alpha) * beta)
    if fitting < MIN_BYTES:
        return Cut(max_bytes, 0)
    nbytes = min(fitting, max_bytes)
    seconds = max(alpha + nbytes / beta, 1e-9)
    return Cut(nbytes, nbytes * sum(math.floor(window / seconds + 1e-9) for window in windows))


class EarlyStates:
    """The states that this member sends and receives as steps begin.

    Args:
        catalog: all units.
        holders: ranks that keep each unit which this member sends, in the order of the plan.
        primaries: the rank that sends each unit which this member keeps, in the order of the plan.
        sender: knows which units replicas cannot follow.
        optimizer: its state is sent, too.
        message_bytes: maximum bytes of a message; None: by the speed of the link (`copies/snapshot/link.py`).
    """

    def __init__(
        self,
        catalog: UnitCatalog,
        holders: Mapping[str, Sequence[int]],
        primaries: Mapping[str, int],
        sender: GradientSender,
        optimizer: torch.optim.Optimizer,
        message_bytes: int | None = None,
    ) -> None:
        self._holders, self._sender, self._optimizer = holders, sender, optimizer
        self._message_bytes = message_bytes
        self._names = {
            unit: [part_name(unit, specs[0].name) for specs in parts_of(catalog.by_name[unit])]
            for unit in (*holders, *primaries)
        }
        """Record names of each unit's parameters."""
        self._incoming: dict[int, int] = {}
        """Maximum number of records from each peer."""
        for unit, peer in primaries.items():
            self._incoming[peer] = self._incoming.get(peer, 0) + len(self._names[unit])
        self._arrived: list[Tensor] = []

    def exchange_states(self, courier: Courier, step: int, selected: Collection[str] | None) -> None:
        """Send the states that replicas lack, and receive those of other members. Runs in a courier's thread.

        Nothing may write the state meanwhile. `take_records` yields the received records once all have arrived.

        Args:
            courier: sends and receives in its windows.
            step: number of the next step.
            selected: units that take part in it; None for all.

        Raises:
            PeerLost: another member is gone, or its announcement is damaged.
        """
        self._arrived = []
        sizes = {peer: 8 * (2 + records) for peer, records in self._incoming.items()}
        announced = {peer: torch.empty(size, dtype=torch.uint8) for peer, size in sizes.items()}
        announcing = {
            peer: courier.begin_receive(Message(data, peer, REPLAY_STATES)) for peer, data in announced.items()
        }
        lacking = self._lacking(selected)
        nbytes = {name: self._record_bytes(source) for name, source in lacking.items()}
        max_bytes = self._message_bytes or message_bytes(courier.link.beta)
        cut = cut_for(courier.windows, *courier.link, max_bytes=max_bytes)
        courier.send_at_once(
            Message(_announcement(cut, [nbytes.get(name, 0) for name in names]), peer, REPLAY_STATES)
            for peer, names in self._by_peer().items()
        )
        coming: list[tuple[Tensor, list[Transfer]]] = []
        for peer, transfer in announcing.items():
            courier.wait_received(transfer)
            coming += _receive(courier, peer, announced[peer])
        courier.send_messages(
            self._messages(step, lacking, sum(self._travelling(nbytes)) - cut.room, cut.message_bytes)
        )
        for _, transfers in coming:
            for transfer in transfers:
                courier.wait_received(transfer)
        self._arrived = [record for record, _ in coming]

    def take_records(self) -> Iterator[Tensor]:
        """Yield the records that have arrived, each once."""
        while self._arrived:
            yield self._arrived.pop(0)

    def _lacking(self, selected: Collection[str] | None) -> dict[str, Source]:
        """Return the sources that replicas cannot follow without a full state, by record name."""
        self._sender.reread()
        return {
            source.record_name: source
            for unit in self._holders
            if selected is None or unit in selected
            for source in self._sender.lacking(unit)
        }

    def _record_bytes(self, source: Source) -> int:
        return RECORD_HEADER_BYTES + sum(spec.nbytes for spec in source.specs(self._optimizer))

    def _by_peer(self) -> dict[int, list[str]]:
        """Return the names of all records that each peer may receive, in order."""
        found: dict[int, list[str]] = {}
        for unit, peers in self._holders.items():
            for peer in peers:
                found.setdefault(peer, []).extend(self._names[unit])
        return found

    def _travelling(self, sizes: Mapping[str, int]) -> Iterator[int]:
        """Yield the bytes of each record, once for each peer that keeps it."""
        for unit, peers in self._holders.items():
            yield from (len(peers) * sizes.get(name, 0) for name in self._names[unit])

    def _messages(
        self, step: int, lacking: Mapping[str, Source], background_bytes: float, max_bytes: int
    ) -> Iterator[Message]:
        """Yield the states in pieces, read just before they are sent; first those that windows have no time for."""
        for unit, peers in self._holders.items():
            for source in (lacking[name] for name in self._names[unit] if peers and name in lacking):
                record = torch.from_numpy(source.full_state(self._optimizer, step - 1))
                for peer in peers:
                    for piece in record.split(max_bytes):
                        when = ANY_TIME if background_bytes > 0 else None
                        yield Message(piece, peer, REPLAY_STATES, when, for_vote=True)
                        background_bytes -= len(piece)


def _receive(courier: Courier, peer: int, announced: Tensor) -> Iterator[tuple[Tensor, list[Transfer]]]:
    """Begin to receive the states that a peer has announced."""
    check, message_bytes, *sizes = announced.view(torch.int64).tolist()
    if check != _check(announced):
        raise PeerLost(f"member {peer}'s announcement of states does not match its checksum; members agree again")
    for record in (torch.empty(size, dtype=torch.uint8) for size in sizes if size):
        pieces = record.split(message_bytes)
        yield record, [courier.begin_receive(Message(piece, peer, REPLAY_STATES)) for piece in pieces]


def _announcement(cut: Cut, sizes: Sequence[int]) -> Tensor:
    """Encode an announcement: a checksum of the rest, the bytes of a message, and those of each record (0: none)."""
    data = torch.tensor([0, cut.message_bytes, *sizes], dtype=torch.int64)
    data[0] = _check(data.view(torch.uint8))
    return data.view(torch.uint8)


def _check(announced: Tensor) -> int:
    return int(np.array(digest(announced[8:].numpy()), np.uint64).view(np.int64))
