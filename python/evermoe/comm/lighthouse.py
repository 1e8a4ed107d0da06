"""Client and server of torchft's Lighthouse, which decides which processes are alive. A job may have several."""

from __future__ import annotations

import errno
import ipaddress
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from evermoe.comm._torchft import coordination
from evermoe.config.membership import is_address, split_addresses

logger = logging.getLogger(__name__)

HEARTBEAT = timedelta(seconds=0.1)
"""Time between two heartbeats to the Lighthouse."""
ANSWER_SECONDS = 5.0
"""Time after which a request to one of several Lighthouses is repeated, or sent to another one if it is silent."""
CONNECT_LIMIT = timedelta(seconds=1)
"""Time in which one of several Lighthouses must accept a connection and answer a heartbeat."""
UNNAMED = "the Lighthouse has not named the members in time: it waits for each process whose heartbeats it hears"
"""Problem of a request without an answer."""
STAY_SECONDS = (1.0, 3.0)
"""Range of the random time that members without a majority spend at each Lighthouse, so that they meet at one."""
TOUR_SECONDS = 30.0
"""Time after which workers that wait for a new job check again whether it runs at another Lighthouse."""


def own_address(addresses: str) -> str | None:
    """Return `host:port` of the first of this machine's Lighthouses that is not running; None if all run.

    Args:
        addresses: see `split_addresses`.

    Raises:
        ValueError: none of the addresses is this machine's, or another program has its port.
    """
    runs = False
    for address in split_addresses(addresses):
        if not is_address(address):
            raise ValueError(f"lighthouse: expected http://host:port, got {address!r}")
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port or 0
        with suppress(socket.gaierror):
            family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(where)
                except OSError as error:
                    if error.errno == errno.EADDRNOTAVAIL:
                        continue
                    if error.errno != errno.EADDRINUSE:
                        raise ValueError(f"lighthouse: {address}: {error.strerror}") from None
                    if _answers(address, "evermoe-run"):
                        runs = True
                        continue
                    raise ValueError(f"lighthouse: another program listens at {address}") from None
            # A machine's own name may resolve to loopback on it, and to another address on other machines.
            listens = host if host == "localhost" or _is_number(host) else "0.0.0.0"
            return f"[{listens}]:{port}" if ":" in listens else f"{listens}:{port}"
    if not runs:
        raise ValueError(f"lighthouse: none of {addresses} is an address of this machine")
    return None


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Lighthouses:
    """The Lighthouses of a job. This member uses one at a time, for its requests and its heartbeat.

    Members use the first one that answers. Methods may be called from several threads.

    Args:
        addresses: see `split_addresses`.
        member: this member's id.
        host: name or address by which others reach this member.
        manager: address on which torchft's server for the heartbeat listens.
    """

    def __init__(self, addresses: str, member: str, host: str, manager: str) -> None:
        self.addresses: Sequence[str] = split_addresses(addresses)
        self._member, self._host, self._manager = member, host, manager
        self._lock = threading.RLock()
        self._at, self._until = 0, 0.0
        self._heartbeat: Any = None
        self._is_silenced = True
        self._client: Any = None
        self._answered: set[str] = set()
        self._toured = time.monotonic()
        self._coordination = coordination()

    @property
    def are_several(self) -> bool:
        """Whether there are several. If so, only a majority of the previous members continues."""
        return len(self.addresses) > 1

    @property
    def current(self) -> str:
        """Address of the Lighthouse in use."""
        return self.addresses[self._at]

    @property
    def silent(self) -> list[str]:
        """Addresses that have not answered since `forget_answered`, except the one in use."""
        return [each for each in self.addresses if each not in self._answered and each != self.current]

    def is_running(self) -> bool:
        """Return whether the Lighthouse in use answers."""
        return _answers(self.current, self._member)

    def forget_answered(self) -> None:
        """Forget which Lighthouses have answered."""
        self._answered.clear()

    def request_quorum(self, data: dict[str, Any], limit: float) -> Any:
        """Request a quorum and return torchft's answer: all requesting members, once all that are alive have requested.

        Args:
            data: this member's message to the others.
            limit: seconds that it may take.

        Raises:
            ConnectionError: no answer came; if the Lighthouse is silent, the next request goes to another one.
        """
        seconds = timedelta(seconds=min(limit, ANSWER_SECONDS) if self.are_several else limit)
        with self._lock:
            address, client, self._is_silenced = self.current, self._client, False
        try:
            if client is None:
                connect = CONNECT_LIMIT if self.are_several else seconds
                client = self._client = self._coordination.LighthouseClient(address, connect)
            self.start_heartbeat(seconds)
            answer = client.quorum(self._member, seconds, world_size=1, data=data)
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            problem = UNNAMED if isinstance(error, TimeoutError) else _first_line(str(error))
            self._client = None
            if self.are_several and address == self.current and not _answers(address, self._member):
                self.switch_to_next(str(error))
            raise ConnectionError(problem) from None
        self._answered.add(address)
        return answer

    def start_heartbeat(self, limit: timedelta) -> None:
        """Start the heartbeat, unless it runs, or was stopped after this member's latest request.

        Args:
            limit: time in which the Lighthouse must be reached.
        """
        with self._lock:
            if self._heartbeat is None and not self._is_silenced:
                self._heartbeat = self._coordination.ManagerServer(
                    self._member, self.current, self._host, self._manager, "", 1, HEARTBEAT, limit, 0
                )

    def connect_client(self, limit: timedelta) -> tuple[str, Any]:
        """Return the address of the Lighthouse in use, and a new client of it."""
        address = self.current
        return address, self._coordination.LighthouseClient(address, limit)

    def close_client(self) -> None:
        """Close the connection; the next request opens another one."""
        self._client = None

    def stop_heartbeat(self) -> None:
        """Stop the heartbeat until this member's next request."""
        with self._lock:
            self._is_silenced = True
            self._end_heartbeat()

    def _end_heartbeat(self) -> None:
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.shutdown()

    def switch_to_next(self, why: str) -> None:
        """Use the next Lighthouse from now on, as this one is silent.

        Args:
            why: reason, for the log.
        """
        before = self.current
        self._go_to_next()
        logger.warning("asking the Lighthouse at %s: %s is silent (%s)", self.current, before, _first_line(why))

    def _go_to_next(self) -> None:
        self._go((self._at + 1) % len(self.addresses))

    def try_another(self, why: str, *, is_established: bool) -> None:
        """Switch to another Lighthouse if the members that this member waits for may use it.

        A member without a majority switches after a while. A newcomer asks all others before it waits for a new job at
        the first, so that it finds a running one.

        Args:
            why: reason to wait; see `Wait` in `src/protocol/event.rs`.
            is_established: whether this member has state of the running job.
        """
        if not self.are_several:
            return
        if why == "minority" and time.monotonic() > self._until:
            self._go_to_next()
        if not is_established and why in ("members", "absent"):
            self._tour()

    def _tour(self) -> None:
        if time.monotonic() - self._toured > TOUR_SECONDS:
            self._toured = time.monotonic()
            self.forget_answered()
        self._go(self.addresses.index(self.silent[0]) if self.silent else 0)

    def return_to_earlier(self, is_over: Callable[[], bool]) -> None:
        """Switch back to an earlier Lighthouse if one answers, so that all members use the same.

        Args:
            is_over: returns whether another thread has taken over the requests, so that it is too late.
        """
        for number in range(self._at):
            if _answers(self.addresses[number], self._member) and not is_over():
                logger.info("the Lighthouse at %s answers again", self.addresses[number])
                self._go(number)
                return

    def _go(self, number: int) -> None:
        with self._lock:
            if number == self._at:
                return
            self._at, self._client = number, None
            self._until = time.monotonic() + random.uniform(*STAY_SECONDS)
            self._end_heartbeat()


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]


def _answers(address: str, member: str) -> bool:
    """Return whether a Lighthouse answers a single heartbeat of `member`."""
    try:
        client = coordination().LighthouseClient(address, CONNECT_LIMIT)
        client.heartbeat(member, CONNECT_LIMIT)
    except Exception:  # torchft raises many kinds
        return False
    return True


def start_local_lighthouse(*, heartbeat_timeout: float, join_timeout: float) -> tuple[Any, str]:
    """Start a Lighthouse that only this machine can reach; return it and its address."""
    server = start_lighthouse(heartbeat_timeout=heartbeat_timeout, join_timeout=join_timeout, bind="127.0.0.1:0")
    return server, f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"


def start_lighthouse(*, heartbeat_timeout: float, join_timeout: float, bind: str = "0.0.0.0:0") -> Any:
    """Start torchft's Lighthouse in this process. Members need its `.address()`; `.shutdown()` ends it.

    Args:
        heartbeat_timeout: seconds without a heartbeat after which a member counts as dead.
        join_timeout: seconds that a quorum waits for a member that sends heartbeats but no request (busy, or hung).
        bind: `host:port` to listen on; port 0 picks a free one.
    """
    return coordination().LighthouseServer(
        bind=bind,
        min_replicas=1,
        join_timeout_ms=round(join_timeout * 1000),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=round(heartbeat_timeout * 1000),
    )
