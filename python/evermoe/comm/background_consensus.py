"""Decisions of all members beside training: what each says goes to rank 0, and what that decides goes to all."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from evermoe.comm.group import Group
from evermoe.comm.transport import Channel
from evermoe.errors import PeerLost

UNLIMITED = timedelta(days=7)
"""Members may take long until they have something to say. That one is gone, its group notices."""
_LENGTH_BYTES = 8


class BackgroundConsensus:
    """One decision among the members of a group, whatever group they are in when it is made.

    Any thread may decide. All members make their councils of one tag in the same order, and decide in that order.

    Args:
        group: the members now.
        tag: of the messages.

    Raises:
        PeerLost: the group was dropped.
    """

    def __init__(self, group: Group, tag: int) -> None:
        self.rank, self.size = group.rank, group.size
        self._channel: Channel | None = None
        if group.size > 1:
            assert group.transport is not None
            self._channel = Channel(group.transport, tag)

    def decide(self, mine: object, conclude: Callable[[list[Any]], object]) -> Any:
        """What `conclude` makes on rank 0 of what each member says, by rank; all as JSON returns it.

        Raises:
            PeerLost: a member cannot be heard any more. If that is known before rank 0 concludes, nothing is decided;
                else others may know the decision.
        """
        said = json.dumps(mine)
        if self.rank:
            self._tell(0, said)
            decided = self._hear(0)
        else:
            decided = self._decide(said, conclude)
        if not decided:
            raise PeerLost("not all members can be heard any more")
        return json.loads(decided)

    def _decide(self, mine: str, conclude: Callable[[list[Any]], object]) -> str:
        """On rank 0; nothing if it is no decision."""
        try:
            said = [mine, *map(self._hear, range(1, self.size))]
        except PeerLost:
            decided = ""
        else:
            decided = json.dumps(conclude([json.loads(text) for text in said]))
        for peer in range(1, self.size):
            with suppress(PeerLost):  # the group notices it, too
                self._tell(peer, decided)
        return decided

    def _tell(self, peer: int, text: str) -> None:
        assert self._channel is not None
        data = bytearray(text.encode())
        length = bytearray(len(data).to_bytes(_LENGTH_BYTES, "little"))
        for part in (length, data) if data else (length,):
            self._channel.send(torch.frombuffer(part, dtype=torch.uint8), peer, UNLIMITED)

    def _hear(self, peer: int) -> str:
        assert self._channel is not None
        length = torch.empty(_LENGTH_BYTES, dtype=torch.uint8)
        self._channel.receive(length, peer, UNLIMITED)
        data = torch.empty(int.from_bytes(length.numpy().tobytes(), "little"), dtype=torch.uint8)
        if len(data):
            self._channel.receive(data, peer, UNLIMITED)
        return data.numpy().tobytes().decode()
