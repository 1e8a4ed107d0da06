"""Full states that replicas need before they can follow a step: those of before it, sent while it computes.

    step n   begins ─ [which come ─ the states, in windows] ─ backward ─ [they count ─ gradients of n] ─ VOTE

What has come counts only when the gradients come: until then replicas have what they had. So a member that is lost in
the middle of a step leaves no state behind that is torn, or newer than others have.
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
from evermoe.errors import PeerLost
from evermoe.replay.part import part_name, parts_of
from evermoe.replay.sender import GradientSender
from evermoe.replay.source import Source
from evermoe.state.catalog import UnitCatalog

MESSAGE_BYTES = 4 << 20
"""Bytes of a state that travel at once, at most, where nothing else is said."""
MESSAGES_A_WINDOW = 4
"""Messages that have room in the longest window: so shorter ones have room for some, too."""
MIN_BYTES = 4096
"""Where not even so much of a window's part has time, windows are too short for states."""


class Cut(NamedTuple):
    """How states are divided."""

    message_bytes: int
    """Bytes of a message at most."""
    room: float
    """Bytes that the windows of a step have time for; what is more goes beside compute."""


def cut_for(windows: Sequence[float], alpha: float, beta: float, most_bytes: int) -> Cut:
    """Messages that fit into windows.

        >>> cut_for([0.4, 0.1], alpha=0.0, beta=1e6, most_bytes=1 << 20)  # four and one of 0.1 s
        Cut(message_bytes=100000, room=500000)
        >>> cut_for([], alpha=0.0, beta=1e6, most_bytes=1 << 20)
        Cut(message_bytes=1048576, room=inf)

    Args:
        windows: seconds of each in a step; none where they are not known.
        alpha: seconds that a message takes at least.
        beta: bytes per second.
        most_bytes: of a message.
    """
    if not windows:
        return Cut(most_bytes, math.inf)
    fitting = int((max(windows) / MESSAGES_A_WINDOW - alpha) * beta)
    if fitting < MIN_BYTES:
        return Cut(most_bytes, 0)
    nbytes = min(fitting, most_bytes)
    seconds = max(alpha + nbytes / beta, 1e-9)
    return Cut(nbytes, nbytes * sum(math.floor(window / seconds + 1e-9) for window in windows))


class EarlyStates:
    """The states that this member sends and gets as steps begin.

    Args:
        catalog: all units.
        holders: ranks that keep each unit which this member sends, in the order of the plan.
        primaries: the rank that sends each unit which this member keeps, likewise.
        sender: knows which replicas cannot follow.
        optimizer: whose state is sent, too.
        message_bytes: of a message, at most.
    """

    def __init__(
        self,
        catalog: UnitCatalog,
        holders: Mapping[str, Sequence[int]],
        primaries: Mapping[str, int],
        sender: GradientSender,
        optimizer: torch.optim.Optimizer,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        self._holders, self._sender, self._optimizer = holders, sender, optimizer
        self._message_bytes = message_bytes
        self._names = {
            unit: [part_name(unit, specs[0].name) for specs in parts_of(catalog.by_name[unit])]
            for unit in (*holders, *primaries)
        }
        """Of each unit's parameters, as records have them."""
        self._incoming: dict[int, int] = {}
        """By peer, the number of records that it may send."""
        for unit, peer in primaries.items():
            self._incoming[peer] = self._incoming.get(peer, 0) + len(self._names[unit])
        self._arrived: list[Tensor] = []

    def exchange(self, courier: Courier, step: int, selected: Collection[str] | None) -> None:
        """Sends the states that replicas lack, and gets those of others; in a thread of the courier.

        Nothing may write the state meanwhile. `take` has what came once all of it is here.

        Args:
            courier: whose connections, and windows, are used.
            step: number of the next step.
            selected: units that take part in it; None for all.

        Raises:
            PeerLost: another member is gone, or what it says that comes is damaged.
        """
        self._arrived = []
        told = {peer: torch.empty(8 * (2 + records), dtype=torch.uint8) for peer, records in self._incoming.items()}
        telling = {peer: courier.begin_receive(Message(data, peer, REPLAY_STATES)) for peer, data in told.items()}
        lacking = self._lacking(selected)
        sizes = {name: self._record_bytes(source) for name, source in lacking.items()}
        cut = cut_for(courier.windows, *courier.link, most_bytes=self._message_bytes)
        courier.send_at_once(
            Message(_announcement(cut, [sizes.get(name, 0) for name in names]), peer, REPLAY_STATES)
            for peer, names in self._by_peer().items()
        )
        coming: list[tuple[Tensor, list[Transfer]]] = []
        for peer, transfer in telling.items():
            courier.wait_received(transfer)
            coming += _receive(courier, peer, told[peer])
        courier.send_messages(self._messages(step, lacking, sum(self._travelling(sizes)) - cut.room, cut.message_bytes))
        for _, transfers in coming:
            for transfer in transfers:
                courier.wait_received(transfer)
        self._arrived = [record for record, _ in coming]

    def take(self) -> Iterator[Tensor]:
        """The records that have come, each once."""
        while self._arrived:
            yield self._arrived.pop(0)

    def _lacking(self, selected: Collection[str] | None) -> dict[str, Source]:
        """What replicas cannot follow without its full state, by the name of its record."""
        self._sender.look()
        return {
            source.record_name: source
            for unit in self._holders
            if selected is None or unit in selected
            for source in self._sender.lacking(unit)
        }

    def _record_bytes(self, source: Source) -> int:
        return RECORD_HEADER_BYTES + sum(spec.nbytes for spec in source.specs(self._optimizer))

    def _by_peer(self) -> dict[int, list[str]]:
        """Names of all records that a peer may get, in the order in which it gets them."""
        found: dict[int, list[str]] = {}
        for unit, peers in self._holders.items():
            for peer in peers:
                found.setdefault(peer, []).extend(self._names[unit])
        return found

    def _travelling(self, sizes: Mapping[str, int]) -> Iterator[int]:
        """Bytes of each record for each peer."""
        for unit, peers in self._holders.items():
            yield from (len(peers) * sizes.get(name, 0) for name in self._names[unit])

    def _messages(
        self, step: int, lacking: Mapping[str, Source], beside_bytes: float, most_bytes: int
    ) -> Iterator[Message]:
        """The states in pieces, each read when its turn comes; first those that windows have no time for."""
        for unit, peers in self._holders.items():
            for source in (lacking[name] for name in self._names[unit] if peers and name in lacking):
                record = torch.from_numpy(source.full_state(self._optimizer, step - 1))
                for peer in peers:
                    for piece in record.split(most_bytes):
                        yield Message(piece, peer, REPLAY_STATES, ANY_TIME if beside_bytes > 0 else None, for_vote=True)
                        beside_bytes -= len(piece)


def _receive(courier: Courier, peer: int, told: Tensor) -> Iterator[tuple[Tensor, list[Transfer]]]:
    """Begins to receive what a peer has told of."""
    check, message_bytes, *sizes = told.view(torch.int64).tolist()
    if check != _check(told):
        raise PeerLost(f"what member {peer} says of states that come does not match its checksum: agree anew")
    for record in (torch.empty(size, dtype=torch.uint8) for size in sizes if size):
        pieces = record.split(message_bytes)
        yield record, [courier.begin_receive(Message(piece, peer, REPLAY_STATES)) for piece in pieces]


def _announcement(cut: Cut, sizes: Sequence[int]) -> Tensor:
    """What a peer is told: a checksum of the rest, the bytes of a message, and of each record; 0: it does not come."""
    told = torch.tensor([0, cut.message_bytes, *sizes], dtype=torch.int64)
    told[0] = _check(told.view(torch.uint8))
    return told.view(torch.uint8)


def _check(told: Tensor) -> int:
    return int(np.array(digest(told[8:].numpy()), np.uint64).view(np.int64))
