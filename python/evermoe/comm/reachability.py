"""Where members listen, which of them this one can reach, and the stores of those that it no longer can."""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import urlsplit

import torch.distributed as dist

from evermoe import _native
from evermoe._native import ProbeServer, Secret, probe_all
from evermoe.comm.group import connect_timeout
from evermoe.comm.sealed_store import SealedStore

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
BACKLOG = 2048
"""Connections that wait to be accepted, as torch has it."""
REACH_SECONDS = 1.0
"""Time that a member gets to answer a probe: its probe server answers at once, also while it computes."""
LOOK_SECONDS = 3.0
"""Time between two looks whether silent members answer, of one that goes on without them."""
RETRY_SECONDS = 0.1
"""Time between two questions of a member to those that continue without it."""
CUT_OFF_SECONDS = 30.0
"""Time for which a member counts as alive that the Lighthouse has named and another one did not reach. It withdraws and
comes back to the Lighthouse several times meanwhile, if the two still do not reach each other."""


class Endpoint(NamedTuple):
    """Where a member is reached, and where it listens."""

    host: str
    """Name or address by which others reach this machine."""
    address: str | None
    """Numeric address on which this member listens; None for all."""

    @property
    def manager(self) -> str:
        """Address for torchft's server, with any port."""
        if self.address is None:
            return "0.0.0.0:0"
        return f"[{self.address}]:0" if ":" in self.address else f"{self.address}:0"


def find_endpoint(given: str | None, lighthouses: Iterable[str]) -> Endpoint:
    """The address that a member was given, else loopback if all Lighthouses are there, else all addresses.

    An address that is none of this machine's, as behind a translation of addresses, says nothing about where to listen.
    Where this host's name does not resolve, others get its address on the way to the first Lighthouse.

    Args:
        given: name or address by which others reach this process.
        lighthouses: addresses of the Lighthouses.
    """
    hosts = [urlsplit(lighthouse).hostname or "" for lighthouse in lighthouses]
    if given is not None:
        away = [host for host in hosts if _is_loopback(given) and _is_elsewhere(host)]
        if away:
            logger.warning(
                "address (EVERMOE_ADDRESS) is %r, by which no other host reaches it, and the Lighthouse is on "
                "%s: for members on other hosts set it to a name or an address of this host in their network",
                given,
                away[0],
            )
        return Endpoint(given, _own_address(given))
    if all(map(_is_loopback, hosts)):
        return Endpoint(LOOPBACK, LOOPBACK)
    name = socket.gethostname()
    if _resolves(name):
        return Endpoint(name, None)
    found = _address_towards(hosts)
    logger.warning(
        "this host's name, %r, does not resolve: the other members get the address %s of this process. If they cannot "
        "reach it by that, set EVERMOE_ADDRESS",
        name,
        found,
    )
    return Endpoint(found, None)


def _address_towards(hosts: Iterable[str]) -> str:
    """This host's address on the way to the first of some hosts that resolves; a loopback address if there is none."""
    for host in hosts:
        with suppress(OSError):
            family, kind, _, _, where = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(where)  # sends nothing
                return str(probe.getsockname()[0])
    return LOOPBACK


def _is_elsewhere(host: str) -> bool:
    """Whether a host is known not to be this one."""
    return _resolves(host) and not _is_loopback(host) and _own_address(host) is None


def _is_loopback(host: str) -> bool:
    """Only if it says so: a host's own name may mean loopback on that host alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _own_address(host: str) -> str | None:
    """The address of this machine that a name stands for; None if it stands for none."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
    logger.info("%s is no address of this machine: listening on all", host)
    return None


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


class Reachability:
    """This member's probe server, and what it has learned from those of the others.

    A probe server answers from its own thread (`src/reachability/`). A member that does not answer is stopped, its host
    is gone, or a partition separates the two, though the Lighthouse may hear from both.

    Args:
        member: this member's id.
        place: where it listens.
        secret: the job's, if it has one: only members that have it get an answer, and give one.
    """

    def __init__(self, member: str, place: Endpoint, secret: Secret | None = None) -> None:
        self._secret = secret
        self._server: ProbeServer | None = ProbeServer(member, place.address, secret)
        self.address = f"{place.host}:{self._server.port}"
        """Address that others probe."""
        self.said: dict[str, tuple[int, int]] = {}
        """By id, what those answered that were asked last: see `_native.probe_all`."""
        self._asked = 0.0
        """When members were asked."""
        self.unreachable: dict[str, str] = {}
        """Members that did not answer, by id, with the addresses of their probe servers."""
        self.ended: set[str] = set()
        """Members whose hosts refuse a connection to them, as they do where the process has ended."""
        self._cut_off: dict[str, float] = {}
        """When members were named at the Lighthouse with others that they cannot reach, by id."""

    def probe(self, members: Mapping[str, str]) -> list[str]:
        """Asks members for an answer, all at once.

        Args:
            members: addresses of their probe servers, by id.

        Returns:
            The ids of those that did not answer within `REACH_SECONDS`.
        """
        self._asked = time.monotonic()
        asked = list(members.items())
        answers, ended = probe_all(asked, round(1000 * REACH_SECONDS), self._secret)
        self.ended.difference_update(members)
        self.ended.update(ended)
        missing = {member: address for (member, address), said in zip(asked, answers, strict=True) if said is None}
        self.said = {member: said for member, said in zip(members, answers, strict=True) if said is not None}
        for member in members:
            self.unreachable.pop(member, None)
        self.unreachable.update(missing)
        return list(missing)

    def check(self, members: Mapping[str, str]) -> None:
        """Asks members for an answer, so that nobody waits for the silent ones.

        Raises:
            ConnectionError: some are silent.
        """
        silent = [f"{each} at {members[each]}" for each in self.probe(members)]
        if silent:
            raise ConnectionError(f"{', '.join(silent)} cannot be reached from here")

    def silent(self, members: Mapping[str, str]) -> list[str]:
        """The ids of members that do not answer within `REACH_SECONDS`, of addresses by id; nothing is remembered."""
        answers, _ = probe_all(list(members.items()), round(1000 * REACH_SECONDS), self._secret)
        return [member for member, said in zip(members, answers, strict=True) if said is None]

    def waiting(self, members: Mapping[str, str]) -> list[str]:
        """The ids of members that answer and do not compute: they wait for others. Nothing is remembered.

        Args:
            members: addresses of their probe servers, by id.
        """
        answers, _ = probe_all(list(members.items()), round(1000 * REACH_SECONDS), self._secret)
        return [each for each, said in zip(members, answers, strict=True) if said is not None and not said[0]]

    def look_again(self, pause: float = 0.0) -> list[str]:
        """The members that still do not answer, of those that did not before.

        Args:
            pause: seconds since they were asked, before which they are not asked again.
        """
        if self.unreachable and time.monotonic() >= self._asked + pause:
            self.probe(dict(self.unreachable))
        return list(self.unreachable)

    def wait_until_reached(self, seconds: float) -> None:
        """Waits until all members answer that did not before, at most this number of seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(RETRY_SECONDS)
            if self.unreachable and not self.look_again():
                return

    def look_around(self, members: Mapping[str, str], silent: Container[str]) -> None:
        """Finds out which members of a group that has broken answer, of which some are known not to."""
        self.probe({each: address for each, address in members.items() if each not in silent})
        self.unreachable.update({each: address for each, address in members.items() if each in silent})

    def note_cut(self, told: Mapping[str, Iterable[str]]) -> None:
        """Notes which members live and cannot reach each other.

        Args:
            told: by id, the members that each of those does not reach which have just asked the Lighthouse.
        """
        for each, others in told.items():
            for other in told.keys() & others:
                self._cut_off[each] = self._cut_off[other] = time.monotonic()

    def is_cut_off(self, member: str) -> bool:
        """Whether a member has lately asked the Lighthouse, and another one did not reach it, or not it the other."""
        return time.monotonic() < self._cut_off.get(member, -math.inf) + CUT_OFF_SECONDS

    def forget_all_but(self, members: Container[str]) -> None:
        """Forgets those that are no members any more."""
        for member in [each for each in self.unreachable if each not in members]:
            del self.unreachable[member]

    def say(self, *, computes: int = 0, gave_up: int = 0) -> None:
        """Tells those that ask for which group this member computes, or in which it has waited in vain."""
        if self._server is not None:
            self._server.set_computes(computes)
            self._server.set_gave_up(gave_up)

    def watch(self, members: Mapping[str, str], epoch: int, seconds: float) -> _native.FailureDetector:
        """Begins to ask the other members of a group, until one does not answer for so long."""
        return _native.FailureDetector(list(members.items()), epoch, round(1000 * seconds), self._secret)

    def close(self) -> None:
        """Closes the probe server."""
        self._server = None


class Stores:
    """Stores of torch's rendezvous: this member's own, and one client for each of the others'.

    A client costs a reverse look-up of its host's name, so it is kept until it fails.

    Args:
        place: where this member's own store listens.
        limit: how long this member's own store waits for a key.
        secret: the job's, if it has one: values that were stored without it are refused.
    """

    def __init__(self, place: Endpoint, limit: timedelta, secret: Secret | None = None) -> None:
        self._secret = secret
        listening, port = (None, 0) if place.address is None else _listen(place.address)
        own = dist.TCPStore(
            place.host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listening
        )
        self.address = f"{own.host}:{own.port}"
        """Address of this member's own store."""
        self._stores = {self.address: self._sealed(own)}

    def get(self, address: str) -> dist.Store:
        """The store at an address.

        Raises:
            RuntimeError: nothing answers there; also TimeoutError and ConnectionError.
        """
        if address not in self._stores:
            host, port = address.rsplit(":", 1)
            self._stores[address] = self._sealed(
                dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=connect_timeout(1))
            )
        return self._stores[address]

    def _sealed(self, store: dist.Store) -> dist.Store:
        return store if self._secret is None else SealedStore(store, self._secret)

    @contextmanager
    def within(self, address: str, seconds: float) -> Iterator[None]:
        """Ends all use of the store at an address after so many seconds: what waits for its host then fails.

        torch's own limits do not hold for a host that falls silent: at the end of one its client tells the store, and
        waits for the answer without limit.
        """
        timer = threading.Timer(seconds, self.end, args=[address])
        timer.daemon = True
        timer.start()
        try:
            yield
        except BaseException:
            if address != self.address:
                self._stores.pop(address, None)
            raise
        finally:
            timer.cancel()

    def end(self, address: str) -> None:
        """Ends all use of another member's store: who waits for it gets an error."""
        if address != self.address:
            end_connections(address)


def what_is_left(addresses: Mapping[str, str], seconds: float) -> dict[str, str]:
    """What is left of members that are lost, by id: `process`, `hung` or `host`, as of `events.MemberLost.kind`.

    A host refuses a connection to a port of a process that has ended; a process that is stopped is connected to all the
    same, as its host does that for it; of a host without power nothing comes.

    Args:
        addresses: addresses of their probe servers, by id.
        seconds: that they get to answer, all at once.
    """
    found: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda each=each: found.update({each: _try(addresses[each], seconds)}), daemon=True)
        for each in addresses
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:  # the look-up of a name has no limit of its own
        thread.join(max(0.0, end - time.monotonic()))
    return {each: found.get(each, "host") for each in addresses}


def _try(address: str, seconds: float) -> str:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return "process"
    except OSError:
        return "host"
    return "hung"


def _listen(address: str) -> tuple[int, int]:
    """A socket that listens on a free port of an address, for torch's store to close; and the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=BACKLOG)
    port = listening.getsockname()[1]
    return listening.detach(), port


def end_connections(address: str) -> None:
    """Shuts this process's connections to `host:port`; who waits for one gets an error."""
    port = int(address.rsplit(":", 1)[1])
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and connection.getpeername()[1] == port and connection.getsockname()[1] != port:
                    connection.shutdown(socket.SHUT_RDWR)
