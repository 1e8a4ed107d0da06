"""Messages between the threads of members, beside their collectives: over TCP or UCX, by `src/transport/`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

from evermoe import _native
from evermoe.config.membership import Carrier
from evermoe.errors import PeerLost
from evermoe.options import count

STREAMS = 4
"""Connections on which messages come from one member: networks limit what one of them may carry."""


UCX_LIBRARY = "libucp.so.0"
"""Name of UCX's library in a system that has it."""

"""What carries the bytes of long messages."""


class Transport:
    """Messages between the members of a group, which any thread may send and receive.

    Connections are made when a message is first expected. A failure of one member fails the messages between the two;
    who waits for one then drops this member's connections, and from then on every call raises `PeerLost` until the
    next group is connected. Nothing here holds Python's lock while bytes move.

    Args:
        host: name or address by which others reach this machine.
        address: numeric address on which this member listens; None for all.
        secret: the job's, if it has one: only members that have it may connect.
        carrier: of long messages, the same on all members.

    Raises:
        ValueError: there is no UCX here that fits.
    """

    def __init__(
        self,
        host: str,
        address: str | None = None,
        secret: _native.Secret | None = None,
        carrier: Carrier = "tcp",
    ) -> None:
        ucx = find_ucx() if carrier == "ucx" else None
        self._port: _native.Port | None = _native.Port(address, secret, ucx)
        self.address = f"{host}:{self._port.port}"
        """Where others connect to."""
        self._links: _native.Links | None = None
        self._limit = timedelta(0)
        self.size = 1
        self.broken: str | None = None

    def connect(
        self, group: int, rank: int, addresses: Sequence[str], limit: timedelta, connect_timeout: timedelta
    ) -> None:
        """Begins a new group.

        Args:
            group: names it, alike on all members; no other one has this name.
            rank: this member's.
            addresses: of all members' transports, by rank.
            limit: how long a message takes at most, unless who waits for it says more.
            connect_timeout: how long a connection takes at most.
        """
        self.drop("the next group begins")
        if self._port is None:
            raise PeerLost("this member has left its job")
        self.size, self._limit = len(addresses), limit
        milliseconds = round(connect_timeout.total_seconds() * 1000)
        self._links = _native.Links(self._port, group, rank, list(addresses), STREAMS, milliseconds)
        self.broken = None

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Transfer:
        """Begins to receive into a contiguous tensor on the CPU, which may be larger than what comes.

        Raises:
            PeerLost: the connections were dropped.
        """
        links = self._open("receive")
        return Transfer(self, "receive", links.receive(_bytes(tensor), source, tag))

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Transfer:
        """Begins to send a contiguous tensor on the CPU; messages of one tag between two members keep their order.

        It is sent when the system has it: the other side may not have it yet, and never gets it if this member drops
        its connections then. Agree on what has arrived before you do.

        Raises:
            PeerLost: the connections were dropped.
        """
        links = self._open("send")
        return Transfer(self, "send", links.send(_bytes(tensor), destination, tag))

    def _open(self, name: str) -> _native.Links:
        links = self._links
        if self.broken is not None or links is None:
            raise PeerLost(f"{name} among {count(self.size, 'member')} failed: {self.broken or 'there is no group'}")
        return links

    @property
    def limit_seconds(self) -> float:
        """How long a message takes at most, unless who waits for it says more."""
        return self._limit.total_seconds()

    def drop(self, reason: str) -> None:
        """Ends this member's connections, so that peers that wait for it fail at once. Idempotent."""
        self.broken = self.broken or reason
        if self._links is not None:
            self._links.end(self.broken)

    def close(self) -> None:
        """Ends the connections, and takes no new ones."""
        self.drop("this member has left its job")
        self._port = None


class Transfer:
    """A message between two members that is under way; the tensor is in use until it is over or forgotten."""

    def __init__(self, transport: Transport, name: str, transfer: _native.Transfer) -> None:
        self._transport, self._name, self._transfer = transport, name, transfer

    @property
    def has_ended(self) -> bool:
        """Whether the tensor was sent or has arrived, now; where that has failed, `wait` says so."""
        return self._transfer.wait(0) is None

    def wait(self, limit: timedelta | None = None) -> None:
        """Waits until the tensor was sent or has arrived, as long as the transport's limit unless `limit` says more.

        Raises:
            PeerLost: the other member is gone or silent, or the connections were dropped here.
        """
        seconds = self._transport.limit_seconds if limit is None else limit.total_seconds()
        failure = self._transfer.wait(round(seconds * 1000))
        if failure is not None:
            failure = self._transport.broken or failure
            self._transport.drop(failure)
            raise PeerLost(f"{self._name} among {count(self._transport.size, 'member')} failed: {failure}")


class Channel:
    """Messages of one tag among the members of the group that is connected now: of no other one that comes later.

    For threads that outlive a group. A message that fails drops nothing.

    Args:
        transport: of this member.
        tag: of the messages.

    Raises:
        PeerLost: the connections were dropped.
    """

    def __init__(self, transport: Transport, tag: int) -> None:
        self._transport, self._tag = transport, tag
        self._links = transport._open("a channel")

    def send(self, tensor: torch.Tensor, destination: int, limit: timedelta) -> None:
        """Sends a contiguous tensor on the CPU, as `Transport.send` does, and waits for that.

        Raises:
            PeerLost: the other member is gone, or the group is another one.
        """
        self._wait("send", self._links.send(_bytes(tensor), destination, self._tag), limit)

    def receive(self, tensor: torch.Tensor, source: int, limit: timedelta) -> None:
        """Receives into a contiguous tensor on the CPU, as `Transport.receive` does, and waits for that.

        Raises:
            PeerLost: the other member is gone, or the group is another one.
        """
        self._wait("receive", self._links.receive(_bytes(tensor), source, self._tag), limit)

    def _wait(self, name: str, transfer: _native.Transfer, limit: timedelta) -> None:
        failure = transfer.wait(round(limit.total_seconds() * 1000))
        if failure is not None:
            raise PeerLost(f"{name} among {count(self._transport.size, 'member')} failed: {failure}")


def find_ucx() -> list[str]:
    """Where UCX may be: at EVERMOE_UCX alone if it is set; else the system's, which may have RDMA; or the package's."""
    named = os.environ.get("EVERMOE_UCX")
    if named:
        return [named]
    package = importlib.util.find_spec("libucx")
    folders = [] if package is None else list(package.submodule_search_locations or ())
    return [UCX_LIBRARY, *(str(Path(folder, "lib", UCX_LIBRARY)) for folder in folders)]


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's own bytes, as an array that keeps it alive."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()
