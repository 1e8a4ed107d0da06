"""Content of a version's messages where holders make some bundles themselves, and ask for the state if that fails."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch

from evermoe.comm.courier import Message
from evermoe.comm.pacer import ANY_TIME
from evermoe.copies.snapshot.bundles import BundleArena
from evermoe.copies.snapshot.round import STATES, Contents, SnapshotRound
from evermoe.copies.snapshot.segments import Segment, even


class AskedStates(Contents):
    """Sends the states that holders ask for once all messages have arrived.

    Args:
        made: numbers of the bundles that holders make; the same on all ranks.
    """

    def __init__(self, made: Collection[int]) -> None:
        self._made = made
        self.asked: list[BundleArena] = []
        """Bundles whose state this rank needs."""

    def finish(self, sent: SnapshotRound) -> bool:
        """Ask the primaries for the state of these bundles, and send the state of those that others ask for."""
        courier, asked = sent.courier, {kept.number for kept in self.asked}
        going = self._by_peer((peer, kept) for kept in sent.own for peer in kept.bundle.holders[1:])
        answers = {peer: torch.zeros(len(some), dtype=torch.uint8) for peer, some in going.items()}
        coming = [courier.begin_receive(Message(data, peer, _tag(going[peer][0]))) for peer, data in answers.items()]
        states = [
            courier.begin_receive(message)
            for kept in self.asked
            for message in _state_messages(sent, kept, kept.bundle.holders[0])
        ]
        came = self._by_peer((kept.bundle.holders[0], kept) for kept in sent.peers)
        courier.send_messages(
            Message(
                torch.tensor([kept.number in asked for kept in some], dtype=torch.uint8), peer, _tag(some[0]), ANY_TIME
            )
            for peer, some in came.items()
        )
        for transfer in coming:
            courier.wait_received(transfer)
        needed = [
            (kept, peer)
            for peer, some in going.items()
            for kept, is_needed in zip(some, answers[peer].tolist(), strict=True)
            if is_needed
        ]
        messages = (message for kept, peer in needed for message in _state_messages(sent, kept, peer))
        sent.send_more(messages, sum(kept.arena.payload_bytes for kept, _ in needed))
        for transfer in states:
            courier.wait_received(transfer)
        return all([sent.commit(kept) for kept in self.asked])

    def _by_peer(self, pairs: Iterable[tuple[int, BundleArena]]) -> dict[int, list[BundleArena]]:
        """Bundles that holders make, to or from each peer, in the order of their numbers, which both ends know."""
        found: dict[int, list[BundleArena]] = {}
        for peer, kept in sorted(pairs, key=lambda each: each[1].number):
            if kept.number in self._made:
                found.setdefault(peer, []).append(kept)
        return found


def _state_messages(sent: SnapshotRound, kept: BundleArena, peer: int) -> Iterator[Message]:
    data = STATES.data(sent, kept)
    for each in even(kept.number, kept.arena, peer, (), sent.store.chunk_bytes):
        yield Message(data[each.offset : each.offset + each.nbytes], peer, each.tag)


def _tag(kept: BundleArena) -> int:
    return Segment(kept.number, 0, 0, 0, 0).tag
