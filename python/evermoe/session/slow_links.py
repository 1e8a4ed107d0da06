"""Names members whose network is slower than that of the others, which wait for them in each exchange of tokens.

After a vote, while the network is idle, each host sends a short message to another one, and measures the time in which
the one for it arrives. The next votes carry these times, so that all members compare the same numbers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from evermoe.comm.membership import MembershipManager
from evermoe.comm.tags import PROBE
from evermoe.comm.transport import Transfer
from evermoe.errors import PeerLost
from evermoe.events import SlowMember
from evermoe.events.base_event import Listener
from evermoe.planning.slow_hosts import DISTANCES, MIN_FACTOR, MIN_HOSTS, ROUNDS, Round, find_slow_hosts

logger = logging.getLogger(__name__)

PART = "network"
"""`SlowMember.part` of a member with a slow network."""
MESSAGE_BYTES = 1 << 18
STEADY = 16
"""Steps after a recovery before the first message: copies that are made again have the network to themselves."""
INTERVAL = 2
"""Steps between the starts of two rounds of messages, at least."""


class _UnderWay(NamedTuple):
    """This member's part of a round of messages whose times are not known to all members yet."""

    source: int
    """The host from which a message arrives."""
    arriving: Transfer
    leaving: Transfer


class SlowLinks:
    """Measures the network between hosts, and names members with a slow one: in the log, and as `SlowMember`.

    The first member of each node sends and receives. Among fewer than three nodes nothing is measured.

    Args:
        membership: the members.
        emit: of the session.
    """

    def __init__(self, membership: MembershipManager, emit: Listener) -> None:
        self._membership, self._emit = membership, emit
        self._hosts: list[int] = []
        """Rank of the first member of each node; empty if nothing is measured."""
        self._group: object = None
        """The store of the connected members: another one for each set of connections."""
        self._round: _UnderWay | bool = False
        """The round under way; True on a member that takes no part in it, False if there is none."""
        self._rounds: deque[Round] = deque(maxlen=ROUNDS)
        self._steps = self._begun = 0
        self._data = torch.zeros(2, MESSAGE_BYTES, dtype=torch.uint8)
        self._slow: set[str] = set()
        """Ids of members with a slow network."""

    def restart(self) -> None:
        """Judge only the rounds that follow: a recovery has ended."""
        self._rounds.clear()
        self._steps = 0
        self._slow &= self._membership.members.keys()
        if self._group is self._membership.store:
            return  # and a round under way continues
        self._group, self._round, self._begun = self._membership.store, False, 0
        nodes = self._membership.nodes
        self._hosts = sorted({node: rank for rank, node in reversed([*enumerate(nodes)])}.values())
        if len(self._hosts) < MIN_HOSTS:
            self._hosts = []

    @property
    def own_part(self) -> str:
        """`network` if that of this member is slow; otherwise empty."""
        return PART if self._membership.id in self._slow else ""

    def numbers(self) -> list[float]:
        """Return seconds by the host that has sent the message: of the one that has arrived here, and else zeros."""
        found = [0.0] * len(self._hosts)
        if isinstance(self._round, _UnderWay) and self._round.leaving.seconds is not None:
            found[self._round.source] = self._round.arriving.seconds or 0.0
        return found  # none before its own message is sent: to drop that one on the way would end all connections

    def take_step(self, step: int, attached: Sequence[float]) -> Sequence[float]:
        """Add a step whose sums are the last numbers that the vote had `attached`; return the numbers before them."""
        own = len(attached) - len(self._hosts)
        if self._hosts:
            self._steps += 1
            if self._round and min(attached[own:]) > 0:
                self._rounds.append(Round(self._distance, attached[own:]))
                self._round = False
                self._look(step)
            if not self._round and self._steps >= STEADY and self._steps % INTERVAL == 0:
                self._begun += 1
                self._round = self._begin_round()
        return attached[:own]

    @property
    def _distance(self) -> int:
        return DISTANCES[self._begun % len(DISTANCES)]

    def _begin_round(self) -> _UnderWay | bool:
        rank, hosts, distance = self._membership.everyone.rank, self._hosts, self._distance
        if rank not in hosts:
            return True
        own, transport = hosts.index(rank), self._membership.transport
        source, target = (own - distance) % len(hosts), (own + distance) % len(hosts)
        with suppress(PeerLost):  # the members will recover
            arriving = transport.receive(self._data[0], hosts[source], PROBE)
            return _UnderWay(source, arriving, transport.send(self._data[1], hosts[target], PROBE))
        return True

    def _look(self, step: int) -> None:
        ids = list(self._membership.members)
        still = {ids[self._hosts[found.rank]] for found in find_slow_hosts(self._rounds, (1 + MIN_FACTOR) / 2)}
        if len(self._rounds) == ROUNDS:
            self._slow &= still
        for found in find_slow_hosts(self._rounds):
            rank = self._hosts[found.rank]
            member, node = ids[rank], self._membership.nodes[rank]
            if member in self._slow:
                continue
            self._slow.add(member)
            self._emit(SlowMember(step, member, node, rank, PART, found.seconds, found.usual, found.factor))
            if self._membership.everyone.rank in (rank, 1 if rank == 0 else 0):
                logger.warning(
                    "%s on %s (rank %d) has a slow network: a message of %d KiB takes %.3g s to or from it and %.3g s "
                    "among the others (%.2f times, in most of %d rounds)",
                    member,
                    node,
                    rank,
                    MESSAGE_BYTES >> 10,
                    found.seconds,
                    found.usual,
                    found.factor,
                    ROUNDS,
                )
