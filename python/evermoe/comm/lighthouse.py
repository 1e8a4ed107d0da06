"""torchft's Lighthouse, which decides who is alive: started from here, and asked; a job may have several."""

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

from evermoe.comm._torchft import torchft
from evermoe.config.membership import is_address, split_addresses

logger = logging.getLogger(__name__)

HEARTBEAT = timedelta(seconds=0.1)
"""How often a member tells the Lighthouse that it lives."""
ANSWER_SECONDS = 5.0
"""Time after which one of several Lighthouses is asked again, or another one if it is silent."""
CONNECT_LIMIT = timedelta(seconds=1)
"""Time in which one of several Lighthouses must accept a connection, and answer a heartbeat."""
UNNAMED = "the Lighthouse has not named the members in time: it waits for each process whose heartbeats it hears"
"""Problem of a question without an answer."""
STAY_SECONDS = (1.0, 3.0)
"""Members that look for a majority stay at a Lighthouse for so long, drawn at random, so that they meet."""
TOUR_SECONDS = 30.0
"""Time after which those that wait for a new job to begin look again whether it runs at another Lighthouse."""


def own_address(addresses: str) -> str | None:
    """Where to start the first Lighthouse that is this machine's and does not run: `host:port`; None if all run.

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
                    if _is_there(address, "evermoe-run"):
                        runs = True
                        continue
                    raise ValueError(f"lighthouse: another program listens at {address}") from None
            # A machine's own name may mean loopback there, and another address on the other machines.
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
    """The Lighthouses of a job, one of which is asked at a time; this member's heart beats there.

    Members ask the first that answers. Its methods may be called from several threads.

    Args:
        addresses: see `split_addresses`.
        member: this member's id.
        host: name or address by which others reach this member.
        manager: address on which the heart listens.
    """

    def __init__(self, addresses: str, member: str, host: str, manager: str) -> None:
        self.addresses: Sequence[str] = split_addresses(addresses)
        self._member, self._host, self._manager = member, host, manager
        self._lock = threading.RLock()
        self._at, self._until = 0, 0.0
        self._heart: Any = None
        self._is_still = True
        self._client: Any = None
        self._answered: set[str] = set()
        self._toured = time.monotonic()
        self._coordination = torchft().coordination

    @property
    def are_several(self) -> bool:
        """Whether there are several: only a majority of the last members goes on then."""
        return len(self.addresses) > 1

    @property
    def current(self) -> str:
        """Address of the Lighthouse that is asked now."""
        return self.addresses[self._at]

    @property
    def silent(self) -> list[str]:
        """Addresses that have not answered since `begin`, but for the one that is asked now."""
        return [each for each in self.addresses if each not in self._answered and each != self.current]

    def runs(self) -> bool:
        """Whether the Lighthouse that is asked now answers."""
        return _is_there(self.current, self._member)

    def begin(self) -> None:
        """Forgets who has answered."""
        self._answered.clear()

    def ask(self, data: dict[str, Any], limit: float) -> Any:
        """torchft's answer: the set of those that ask, once all that are alive do.

        Args:
            data: what this member tells them.
            limit: seconds that it may take.

        Raises:
            ConnectionError: there is none; the next question goes to another Lighthouse if this one is silent.
        """
        seconds = timedelta(seconds=min(limit, ANSWER_SECONDS) if self.are_several else limit)
        with self._lock:
            address, client, self._is_still = self.current, self._client, False
        try:
            if client is None:
                connect = CONNECT_LIMIT if self.are_several else seconds
                client = self._client = self._coordination.LighthouseClient(address, connect)
            self.beat(seconds)
            answer = client.quorum(self._member, seconds, world_size=1, data=data)
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            problem = UNNAMED if isinstance(error, TimeoutError) else _first_line(str(error))
            self._client = None
            if self.are_several and address == self.current and not _is_there(address, self._member):
                self.move_on(str(error))
            raise ConnectionError(problem) from None
        self._answered.add(address)
        return answer

    def beat(self, limit: timedelta) -> None:
        """Lets the heart beat, unless it does, or was stopped since this member has asked.

        Args:
            limit: time in which the Lighthouse must be reached.
        """
        with self._lock:
            if self._heart is None and not self._is_still:
                self._heart = self._coordination.ManagerServer(
                    self._member, self.current, self._host, self._manager, "", 1, HEARTBEAT, limit, 0
                )

    def connect(self, limit: timedelta) -> tuple[str, Any]:
        """Address of the Lighthouse that is asked now, and a new client of it."""
        address = self.current
        return address, self._coordination.LighthouseClient(address, limit)

    def hang_up(self) -> None:
        """Ends the connection; the next question makes another one."""
        self._client = None

    def stop_heart(self) -> None:
        """The Lighthouse hears of this member no more, until it asks."""
        with self._lock:
            self._is_still = True
            self._end_heart()

    def _end_heart(self) -> None:
        heart, self._heart = self._heart, None
        if heart is not None:
            heart.shutdown()

    def move_on(self, why: str) -> None:
        """From now on the next Lighthouse is asked: this one is silent.

        Args:
            why: for the log.
        """
        before = self.current
        self._go_to_next()
        logger.warning("asking the Lighthouse at %s: %s is silent (%s)", self.current, before, _first_line(why))

    def _go_to_next(self) -> None:
        self._go((self._at + 1) % len(self.addresses))

    def look_elsewhere(self, why: str, *, is_established: bool) -> None:
        """Asks another Lighthouse if this member waits for what may be there.

        Who looks for a majority moves on after a while. A newcomer asks all others before it waits for a new job at the
        first: members of one that runs are heard.

        Args:
            why: it waits: see `Wait` in `src/protocol/event.rs`.
            is_established: whether it has state of the running job.
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
            self.begin()
        self._go(self.addresses.index(self.silent[0]) if self.silent else 0)

    def go_back(self, is_over: Callable[[], bool]) -> None:
        """Asks an earlier Lighthouse again if one answers, so that all members ask the same.

        Args:
            is_over: whether it is too late for that: another thread asks.
        """
        for number in range(self._at):
            if _is_there(self.addresses[number], self._member) and not is_over():
                logger.info("the Lighthouse at %s answers again", self.addresses[number])
                self._go(number)
                return

    def _go(self, number: int) -> None:
        with self._lock:
            if number == self._at:
                return
            self._at, self._client = number, None
            self._until = time.monotonic() + random.uniform(*STAY_SECONDS)
            self._end_heart()


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]


def _is_there(address: str, member: str) -> bool:
    """Whether a Lighthouse answers; a member's heart beats there once then."""
    try:
        client = torchft().coordination.LighthouseClient(address, CONNECT_LIMIT)
        client.heartbeat(member, CONNECT_LIMIT)
    except Exception:  # torchft's are of many kinds
        return False
    return True


def start_local_lighthouse(*, heartbeat_timeout: float, join_timeout: float) -> tuple[Any, str]:
    """A Lighthouse that only this machine can reach, and its address."""
    server = start_lighthouse(heartbeat_timeout=heartbeat_timeout, join_timeout=join_timeout, bind="127.0.0.1:0")
    return server, f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"


def start_lighthouse(*, heartbeat_timeout: float, join_timeout: float, bind: str = "0.0.0.0:0") -> Any:
    """Starts torchft's Lighthouse inside this process; `.address()` is what members need, `.shutdown()` ends it.

    Args:
        heartbeat_timeout: seconds without a heartbeat after which a member counts as dead.
        join_timeout: seconds that a quorum waits for a member that beats but does not ask (busy, or hung).
        bind: `host:port` to listen on; port 0 picks a free one.
    """
    return torchft().coordination.LighthouseServer(
        bind=bind,
        min_replicas=1,
        join_timeout_ms=round(join_timeout * 1000),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=round(heartbeat_timeout * 1000),
    )
