"""Endpoints: the addresses by which others reach a member, and those on which it listens."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class Endpoint(NamedTuple):
    """Address by which others reach a member, and the address on which it listens."""

    host: str
    """Name or address by which others reach this machine."""
    address: str | None
    """Numeric address on which this member listens; None: all addresses."""
    cards: tuple[str, ...] = ()
    """Numeric addresses of further network cards, for the messages of copies and recoveries."""

    @property
    def manager(self) -> str:
        """Address for torchft's server, with any free port."""
        if self.address is None:
            return "0.0.0.0:0"
        return f"[{self.address}]:0" if ":" in self.address else f"{self.address}:0"


def find_endpoint(given: str | None, lighthouses: Iterable[str]) -> Endpoint:
    """Return the endpoint at a given address, else at loopback if all Lighthouses are local, else at all addresses.

    If the given address does not belong to this machine, as behind network address translation, the member listens on
    all addresses. If this host's name does not resolve, others get the address of its route to the first Lighthouse.

    Args:
        given: name or address by which others reach this process, and after commas those of further network cards;
            None: find one.
        lighthouses: addresses of the Lighthouses.

    Raises:
        ValueError: the name of a further card is none of this machine.
    """
    hosts = [urlsplit(lighthouse).hostname or "" for lighthouse in lighthouses]
    if given is not None:
        given, *further = (each.strip() for each in given.split(","))
        away = [host for host in hosts if _is_loopback(given) and _is_elsewhere(host)]
        if away:
            logger.warning(
                "address (EVERMOE_ADDRESS) is %r, by which no other host reaches it, and the Lighthouse is on "
                "%s: for members on other hosts set it to a name or an address of this host in their network",
                given,
                away[0],
            )
        return Endpoint(given, _own_address(given), tuple(map(_card, further)))
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
    """Return this host's address on its route to the first host that resolves; a loopback address if none does."""
    for host in hosts:
        with suppress(OSError):
            family, kind, _, _, where = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(where)  # sends nothing
                return str(probe.getsockname()[0])
    return LOOPBACK


def _is_elsewhere(host: str) -> bool:
    """Return whether a name resolves to another host."""
    return _resolves(host) and not _is_loopback(host) and _own_address(host) is None


def _is_loopback(host: str) -> bool:
    """Return whether a name is literally loopback. A host's own name may resolve to loopback on that host alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _own_address(host: str) -> str | None:
    """Return the address of this machine to which a name resolves; None if it resolves to none."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
    logger.info("%s is no address of this machine: listening on all addresses", host)
    return None


def _card(host: str) -> str:
    found = _own_address(host)
    if found is None:
        raise ValueError(
            "address (EVERMOE_ADDRESS): expected an address of a network card of this machine after a comma, got "
            f"{host!r}"
        )
    return found


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
