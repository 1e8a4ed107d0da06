"""Decisions of all members in the background: rank 0 gathers the reports and broadcasts its decision."""

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
"""No limit: a member may take long to report, and its group detects that a member is lost."""
_LENGTH_BYTES = 8


class BackgroundConsensus:
    """Decisions of the members of a group, made outside the training thread.

    They never mix with those of a later group.

    Any thread may call it. All members must create the objects of one tag in the same order, and decide in that order.

    Args:
        group: the current members.
        tag: tag of the messages.

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
        """Gather `mine` of each member on rank 0 and return the decision of `conclude` for all of them; collective.

        All values pass through JSON.

        Args:
            mine: this member's report.
            conclude: returns the decision from the reports, by rank; called on rank 0 alone.

        Raises:
            PeerLost: a member no longer answers. If rank 0 notices this before it concludes, nothing is decided;
                otherwise other members may already know the decision.
        """
        report = json.dumps(mine)
        if self.rank:
            self._send(0, report)
            decided = self._receive(0)
        else:
            decided = self._decide(report, conclude)
        if not decided:
            raise PeerLost("a member no longer answers")
        return json.loads(decided)

    def _decide(self, mine: str, conclude: Callable[[list[Any]], object]) -> str:
        """Conclude on rank 0 and send the decision to all; return an empty text if a member is lost."""
        try:
            reports = [mine, *map(self._receive, range(1, self.size))]
        except PeerLost:
            decided = ""
        else:
            decided = json.dumps(conclude([json.loads(text) for text in reports]))
        for peer in range(1, self.size):
            with suppress(PeerLost):  # the group detects it as well
                self._send(peer, decided)
        return decided

    def _send(self, peer: int, text: str) -> None:
        assert self._channel is not None
        data = bytearray(text.encode())
        length = bytearray(len(data).to_bytes(_LENGTH_BYTES, "little"))
        for part in (length, data) if data else (length,):
            self._channel.send(torch.frombuffer(part, dtype=torch.uint8), peer, UNLIMITED)

    def _receive(self, peer: int) -> str:
        assert self._channel is not None
        length = torch.empty(_LENGTH_BYTES, dtype=torch.uint8)
        self._channel.receive(length, peer, UNLIMITED)
        data = torch.empty(int.from_bytes(length.numpy().tobytes(), "little"), dtype=torch.uint8)
        if len(data):
            self._channel.receive(data, peer, UNLIMITED)
        return data.numpy().tobytes().decode()
