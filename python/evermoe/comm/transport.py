"""Messages between threads of members, in addition to collectives: over TCP or UCX, implemented in `src/transport/`."""

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
"""Connections that carry the messages from one member: networks limit the bandwidth of each."""
UCX_LIBRARY = "libucp.so.0"
"""Name of UCX's library, as installed in a system."""


class Transport:
    """Messages between the members of a group, which any thread may send and receive.

    Connections are opened when a message is first expected. A failure of a member fails the messages to and from it. A
    thread that waits for one of these drops this member's connections, and from then on every call raises `PeerLost`
    until the next group is connected. The GIL is released while bytes move.

    Args:
        host: name or address by which others reach this machine.
        address: numeric address on which this member listens; None: all addresses.
        secret: the job's secret, if it has one. Only members that have it may connect.
        carrier: protocol of long messages, the same on all members.
        cards: numeric addresses of further network cards of this machine. Connections take turns among all of them.

    Raises:
        ValueError: this machine has no suitable UCX.
    """

    def __init__(
        self,
        host: str,
        address: str | None = None,
        secret: _native.Secret | None = None,
        carrier: Carrier = "tcp",
        cards: Sequence[str] = (),
    ) -> None:
        ucx = find_ucx() if carrier == "ucx" else None
        self._port: _native.Port | None = _native.Port([] if address is None else [address, *cards], secret, ucx)
        ports = self._port.ports if address is not None else self._port.ports * (1 + len(cards))
        self.address = ",".join(f"{each}:{port}" for each, port in zip([host, *cards], ports, strict=True))
        """Addresses to which others connect, separated by commas."""
        self._links: _native.Links | None = None
        self._limit = timedelta(0)
        self.size = 1
        self.broken: str | None = None

    def connect(
        self, group: int, rank: int, addresses: Sequence[str], limit: timedelta, connect_timeout: timedelta
    ) -> None:
        """Drop the current group, and begin a new one.

        Args:
            group: unique name of the group, the same on all members.
            rank: this member's rank.
            addresses: addresses of all members' transports, by rank.
            limit: time limit of a message, unless `Transfer.wait` gets another one.
            connect_timeout: time limit of a connection.
        """
        self.drop("the next group begins")
        if self._port is None:
            raise PeerLost("this member has left its job")
        self.size, self._limit = len(addresses), limit
        milliseconds = round(connect_timeout.total_seconds() * 1000)
        self._links = _native.Links(self._port, group, rank, list(addresses), STREAMS, milliseconds)
        self.broken = None

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Transfer:
        """Begin to receive into a contiguous tensor on the CPU, which may be larger than the message.

        Raises:
            PeerLost: the connections were dropped.
        """
        links = self._open("receive")
        return Transfer(self, "receive", links.receive(_bytes(tensor), source, tag))

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Transfer:
        """Begin to send a contiguous tensor on the CPU. Messages with one tag between two members keep their order.

        A message counts as sent when the operating system has it. It is lost if this member drops its connections
        before it has arrived, so the members must agree on what has arrived before that.

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
        """Time limit of a message in seconds, unless `Transfer.wait` gets another one."""
        return self._limit.total_seconds()

    def drop(self, reason: str) -> None:
        """Close this member's connections, so that peers that wait for it fail at once. Idempotent."""
        self.broken = self.broken or reason
        if self._links is not None:
            self._links.end(self.broken)

    def close(self) -> None:
        """Close the connections, and accept no new ones."""
        self.drop("this member has left its job")
        self._port = None


class Transfer:
    """A message in flight between two members. The tensor is in use until the message ends or this object is freed."""

    def __init__(self, transport: Transport, name: str, transfer: _native.Transfer) -> None:
        self._transport, self._name, self._transfer = transport, name, transfer

    @property
    def has_ended(self) -> bool:
        """Whether the tensor was sent or has arrived by now. `wait` raises if that failed."""
        return self._transfer.wait(0) is None

    @property
    def seconds(self) -> float | None:
        """Seconds in which the bytes were moving, without the wait for the other member to begin.

        None if they still are, or if the message failed. Of a received message: from the arrival of its header to that
        of its last byte.
        """
        return self._transfer.seconds()

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait until the tensor was sent or has arrived, at most for `limit`; None: the transport's limit.

        Raises:
            PeerLost: the other member is lost or silent, or this member has dropped its connections.
        """
        seconds = self._transport.limit_seconds if limit is None else limit.total_seconds()
        failure = self._transfer.wait(round(seconds * 1000))
        if failure is not None:
            failure = self._transport.broken or failure
            self._transport.drop(failure)
            raise PeerLost(f"{self._name} among {count(self._transport.size, 'member')} failed: {failure}")


class Channel:
    """Messages with one tag among the members of the current group, never those of a later group.

    For threads that outlive a group. A message that fails does not drop the connections.

    Args:
        transport: this member's transport.
        tag: tag of the messages.

    Raises:
        PeerLost: the connections were dropped.
    """

    def __init__(self, transport: Transport, tag: int) -> None:
        self._transport, self._tag = transport, tag
        self._links = transport._open("a channel")

    def send(self, tensor: torch.Tensor, destination: int, limit: timedelta) -> None:
        """Send a contiguous tensor on the CPU, as `Transport.send` does, and wait until it is sent.

        Raises:
            PeerLost: the other member is lost, or the group has changed.
        """
        self._wait("send", self._links.send(_bytes(tensor), destination, self._tag), limit)

    def receive(self, tensor: torch.Tensor, source: int, limit: timedelta) -> None:
        """Receive into a contiguous tensor on the CPU, as `Transport.receive` does, and wait until it has arrived.

        Raises:
            PeerLost: the other member is lost, or the group has changed.
        """
        self._wait("receive", self._links.receive(_bytes(tensor), source, self._tag), limit)

    def _wait(self, name: str, transfer: _native.Transfer, limit: timedelta) -> None:
        failure = transfer.wait(round(limit.total_seconds() * 1000))
        if failure is not None:
            raise PeerLost(f"{name} among {count(self._transport.size, 'member')} failed: {failure}")


def find_ucx() -> list[str]:
    """Return paths at which to look for UCX: EVERMOE_UCX alone if set; else the system's, then the package's.

    The system's library comes first, as it may support RDMA.
    """
    named = os.environ.get("EVERMOE_UCX")
    if named:
        return [named]
    package = importlib.util.find_spec("libucx")
    folders = [] if package is None else list(package.submodule_search_locations or ())
    return [UCX_LIBRARY, *(str(Path(folder, "lib", UCX_LIBRARY)) for folder in folders)]


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's memory as an array of bytes that keeps the tensor alive."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()
