"""Probes of whether this member can reach the others, and their stores."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from evermoe import _native
from evermoe._native import ProbeServer, Secret, probe_all
from evermoe.comm.endpoint import Endpoint
from evermoe.comm.mesh import connect_timeout
from evermoe.comm.sealed_store import SealedStore

BACKLOG = 2048
"""Largest number of connections that wait to be accepted; as in torch."""
REACH_SECONDS = 1.0
"""Time that a member gets to answer a probe. Its probe server answers at once, even while the member computes."""
PROBE_SECONDS = 3.0
"""Time between two probes of silent members by a member that continues without them."""
RETRY_SECONDS = 0.1
"""Time between two probes by a member that has withdrawn."""
CUT_OFF_SECONDS = 30.0
"""Time for which a member counts as alive after the Lighthouse has named it although another member did not reach it.
Meanwhile it withdraws and returns to the Lighthouse several times, if the two still do not reach each other."""


class Reachability:
    """This member's probe server, and the results of its probes of other members.

    A probe server answers from its own thread (`src/reachability/`). A member that does not answer is stopped, its host
    has failed, or a partition separates the two, although the Lighthouse may hear from both.

    Args:
        member: this member's id.
        place: endpoint of this member.
        secret: the job's secret, if it has one. Members answer only probes that have it.
    """

    def __init__(self, member: str, place: Endpoint, secret: Secret | None = None) -> None:
        self._secret = secret
        self._server: ProbeServer | None = ProbeServer(member, place.address, secret)
        self.address = f"{place.host}:{self._server.port}"
        """Address of this member's probe server."""
        self.answers: dict[str, tuple[int, int]] = {}
        """Answers of the members that were probed last, by id: see `_native.probe_all`."""
        self._probed_at = 0.0
        """Time of the latest probe."""
        self.unreachable: dict[str, str] = {}
        """Members that did not answer, by id, with the addresses of their probe servers."""
        self.ended: set[str] = set()
        """Members whose hosts refuse the connection, because the process has ended."""
        self._cut_off: dict[str, float] = {}
        """Time at which the Lighthouse last named a member together with one that it cannot reach, by id."""

    def probe(self, members: Mapping[str, str]) -> list[str]:
        """Probe members, all at the same time.

        Args:
            members: addresses of their probe servers, by id.

        Returns:
            the ids of those that did not answer within `REACH_SECONDS`.
        """
        self._probed_at = time.monotonic()
        asked = list(members.items())
        answers, ended = probe_all(asked, round(1000 * REACH_SECONDS), self._secret)
        self.ended.difference_update(members)
        self.ended.update(ended)
        missing = {member: address for (member, address), answer in zip(asked, answers, strict=True) if answer is None}
        self.answers = {member: answer for member, answer in zip(members, answers, strict=True) if answer is not None}
        for member in members:
            self.unreachable.pop(member, None)
        self.unreachable.update(missing)
        return list(missing)

    def check_reachable(self, members: Mapping[str, str]) -> None:
        """Probe members, so that no member waits for silent ones.

        Raises:
            ConnectionError: some are silent.
        """
        silent = [f"{each} at {members[each]}" for each in self.probe(members)]
        if silent:
            raise ConnectionError(f"{', '.join(silent)} cannot be reached from here")

    def find_silent(self, members: Mapping[str, str]) -> list[str]:
        """Return the ids of members that do not answer a probe within `REACH_SECONDS`; keep no results.

        Args:
            members: addresses of their probe servers, by id.
        """
        answers, _ = probe_all(list(members.items()), round(1000 * REACH_SECONDS), self._secret)
        return [member for member, answer in zip(members, answers, strict=True) if answer is None]

    def find_waiting(self, members: Mapping[str, str]) -> list[str]:
        """Return the ids of members that answer and do not compute, as they wait for others; keep no results.

        Args:
            members: addresses of their probe servers, by id.
        """
        answers, _ = probe_all(list(members.items()), round(1000 * REACH_SECONDS), self._secret)
        return [each for each, answer in zip(members, answers, strict=True) if answer is not None and not answer[0]]

    def probe_again(self, pause: float = 0.0) -> list[str]:
        """Probe the unreachable members again, and return those that still do not answer.

        Args:
            pause: seconds after the latest probe within which no new one is sent.
        """
        if self.unreachable and time.monotonic() >= self._probed_at + pause:
            self.probe(dict(self.unreachable))
        return list(self.unreachable)

    def wait_until_reached(self, seconds: float) -> None:
        """Wait until all unreachable members answer, at most this number of seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(RETRY_SECONDS)
            if self.unreachable and not self.probe_again():
                return

    def probe_group(self, members: Mapping[str, str], silent: Container[str]) -> None:
        """Probe the members of a broken group, except those already known to be silent."""
        self.probe({each: address for each, address in members.items() if each not in silent})
        self.unreachable.update({each: address for each, address in members.items() if each in silent})

    def note_cut_off(self, unreachable: Mapping[str, Iterable[str]]) -> None:
        """Record members that are alive and cannot reach each other.

        Args:
            unreachable: by id of the members in the latest set, the members that each cannot reach.
        """
        for each, others in unreachable.items():
            for other in unreachable.keys() & others:
                self._cut_off[each] = self._cut_off[other] = time.monotonic()

    def is_cut_off(self, member: str) -> bool:
        """Return whether a member was recently at the Lighthouse while cut off from another member."""
        return time.monotonic() < self._cut_off.get(member, -math.inf) + CUT_OFF_SECONDS

    def retain_members(self, members: Container[str]) -> None:
        """Forget unreachable processes that are no longer members."""
        for member in [each for each in self.unreachable if each not in members]:
            del self.unreachable[member]

    def set_computes(self, epoch: int) -> None:
        """Set the answer to probes: the epoch for which this member computes; 0 while it waits."""
        if self._server is not None:
            self._server.set_computes(epoch)

    def set_status(self, *, gave_up: int = 0) -> None:
        """Answer probes that this member does not compute, and in which epoch it has waited in vain."""
        self.set_computes(0)
        if self._server is not None:
            self._server.set_gave_up(gave_up)

    def start_detector(self, members: Mapping[str, str], epoch: int, seconds: float) -> _native.FailureDetector:
        """Begin to probe the other members of a group, until one does not answer for this number of seconds."""
        return _native.FailureDetector(list(members.items()), epoch, round(1000 * seconds), self._secret)

    def close(self) -> None:
        """Close the probe server."""
        self._server = None


class Stores:
    """Stores of torch's rendezvous: this member's own, and one client for each other member's.

    A client costs a reverse look-up of its host's name, so it is kept until it fails.

    Args:
        place: endpoint of this member.
        limit: time that this member's own store waits for a key.
        secret: the job's secret, if it has one. Values that were stored without it are refused.
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
        self._meeting: str | None = None
        """Address of the store in which the block of `time_limit` waits."""

    def store_at(self, address: str) -> dist.Store:
        """Return the store at an address.

        Raises:
            RuntimeError: the store does not answer; also TimeoutError and ConnectionError.
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
    def time_limit(self, address: str, seconds: float) -> Iterator[None]:
        """Shut the connections to the store at an address if the block takes longer: all waits for it then fail.

        torch's own timeouts do not hold for a host that falls silent: at the end of one, its client notifies the store
        and waits for the answer without a limit.
        """
        timer = threading.Timer(seconds, self.end_connections_to, args=[address])
        timer.daemon = True
        timer.start()
        self._meeting = address
        try:
            yield
        except BaseException:
            if address != self.address:
                self._stores.pop(address, None)
            raise
        finally:
            self._meeting = None
            timer.cancel()

    def end_wait(self) -> bool:
        """End the waits of a block of `time_limit`, from another thread. Return whether there is one."""
        meeting = self._meeting
        if meeting is not None:
            self.end_connections_to(meeting)
        return meeting is not None

    def end_connections_to(self, address: str) -> None:
        """Shut all connections to another member's store: threads that wait for it get an error."""
        if address != self.address:
            end_connections(address)


def kinds_of_loss(addresses: Mapping[str, str], seconds: float) -> dict[str, str]:
    """Return the kind of each loss by member id: `process`, `hung` or `host`, as in `events.MemberLost.kind`.

    A host refuses a connection to a port whose process has ended. It accepts one for a process that is stopped. A host
    without power does not answer.

    Args:
        addresses: addresses of their probe servers, by id.
        seconds: time limit of all probes together.
    """
    found: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda each=each: found.update({each: _try(addresses[each], seconds)}), daemon=True)
        for each in addresses
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:  # a name look-up has no time limit
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
    """Return a socket that listens on a free port of an address, and the port. torch's store closes the socket."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=BACKLOG)
    port = listening.getsockname()[1]
    return listening.detach(), port


def end_connections(address: str) -> None:
    """Shut this process's connections to `host:port`: threads that wait for one get an error."""
    port = int(address.rsplit(":", 1)[1])
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and connection.getpeername()[1] == port and connection.getsockname()[1] != port:
                    connection.shutdown(socket.SHUT_RDWR)
