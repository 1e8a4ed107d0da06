"""Membership of a job: this member, and the groups built from the sets of the Lighthouse. Only `comm` uses torchft.

`evermoe.comm.member_requests` requests a set of members, which the protocol (`evermoe.session.protocol`) checks. Then
`MembershipManager.connect` builds the groups. They meet in the store of the first member, under a prefix of their own.
`evermoe.comm.reachability` finds out which members answer.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evermoe.comm.early_stores import EarlyStores
from evermoe.comm.endpoint import find_endpoint
from evermoe.comm.failure_detector import FailureDetector
from evermoe.comm.group import Group
from evermoe.comm.island import Island, check_options
from evermoe.comm.island_watch import IslandWatch
from evermoe.comm.lighthouse import Lighthouses
from evermoe.comm.member_groups import MemberGroups
from evermoe.comm.member_requests import MemberRequests
from evermoe.comm.mesh import connect_timeout
from evermoe.comm.messages import Identity, Messages, job_secret
from evermoe.comm.open_files import reserve_open_files
from evermoe.comm.plain_reason import plain_reason
from evermoe.comm.quarantine import find_hardware
from evermoe.comm.reachability import Reachability
from evermoe.comm.transport import Transport
from evermoe.config.membership import Membership, split_addresses
from evermoe.errors import PeerLost
from evermoe.process.native_calls import close_at_exit

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.1
"""Time between two attempts to agree."""


class MembershipManager:
    """This member of a job: its message to the others, and the groups that connect it with them.

    Args:
        options: time limits, and the role.
        lighthouse: addresses of the job's Lighthouses, separated by commas; one may run in this process.
        identity: options and layout that all members of the job share.
        node: name of this machine, whose memory fails as one.
        device: device of the tensors that `trainer_group` takes.
        rank_key: sort key of ranks; members with equal keys are sorted by id.
        side_device: device of the tensors that `side_group` takes; None: it is not needed.
        island: place of this process in its island, by which ranks are sorted, then; None: it has none.

    Raises:
        ValueError: members of islands ask one Lighthouse, and all of them train.
    """

    def __init__(
        self,
        options: Membership,
        *,
        lighthouse: str,
        identity: Identity,
        node: str,
        device: torch.device,
        rank_key: str = "",
        side_device: torch.device | None = None,
        island: Island | None = None,
    ) -> None:
        check_options(island, options, lighthouse)
        reserve_open_files(options.members or 1)
        self.options, self.id, self.node = options, f"{node}-{uuid.uuid4().hex[:8]}", node
        secret, place = job_secret(), find_endpoint(options.address, split_addresses(lighthouse))
        lighthouses, limit = Lighthouses(lighthouse, self.id, place.host, place.manager), self._hang_timeout
        common = {
            "lighthouses": "several" if lighthouses.are_several else "one",
            "island size": "none" if island is None else str(island.size),
        }
        identity = replace(identity, options={**identity.options, **common})
        self.messages = Messages(self.id, identity, lighthouse, secret, find_hardware(node, device))
        self.transport = Transport(place.host, place.address, secret, options.transport, place.cards)
        """Messages of background threads between all members, including replica nodes."""
        self.reach = Reachability(self.id, place, secret)
        """Probe server of this member, and probes of the others."""
        watch = IslandWatch.of(island, self.reach, options.heartbeat_timeout)
        self.groups = groups = MemberGroups(place, self.transport, limit, watch, device, side_device)
        self.established = False
        """Whether this member has state of the running job; set by its protocol."""
        self.generation = 0
        """Generation of the group; set by the protocol."""
        self.members: dict[str, Mapping[str, Any]] = {}
        """Reports of the group's members, by id, in the order of ranks."""
        self.num_trainers = 1
        """Number of members that train."""
        self.store: Any = None
        """Store in which further groups of the current members can meet; its prefix is unique to the epoch."""
        self.stores = EarlyStores(place, limit, secret, self.reach)
        """This member's store, and clients of the others' stores."""
        about = {
            "node": node,
            "domain": options.domain or "",
            "role": self.role,
            "rank_key": rank_key if island is None else island.rank_key,
            "island": None if island is None else asdict(island),
            "store": self.stores.address,
            "probe_address": self.reach.address,
            "transport": self.transport.address,
        }
        self.requests = MemberRequests(self.id, options, about, lighthouses, self.messages, self.reach, self.stores)
        self.failure_detector = FailureDetector(
            self.reach,
            (groups.trainers, groups.with_replicas, groups.position),
            heartbeat_timeout=options.heartbeat_timeout,
            hang_timeout=options.hang_timeout,
            on_silent=self._member_is_silent,
            on_left_out=self.requests.stop_heartbeat,
        )
        close_at_exit(self)

    @property
    def identity(self) -> Identity:
        """Options and layout that all members of the job share."""
        return self.messages.identity

    @property
    def role(self) -> str:
        """Role of this process: `train`, or `replica`."""
        return "train" if self.options.trains else "replica"

    @property
    def device(self) -> torch.device:
        """Device of the tensors that `trainer_group` takes."""
        return self.groups.device

    @property
    def island(self) -> Island | None:
        """Place of this process in its island; None without one."""
        return None if self.groups.watch is None else self.groups.watch.island

    @property
    def _hang_timeout(self) -> timedelta:
        return timedelta(seconds=self.options.hang_timeout)

    @property
    def nodes(self) -> list[str]:
        """Node of each rank, whose memory fails as one; several ranks may share a node. Replica nodes come last."""
        return [each["node"] for each in self.members.values()]

    @property
    def domains(self) -> list[str]:
        """Failure domains of each rank's node, from the largest to the smallest, with slashes; empty if unknown."""
        domain_of = {each["node"]: each["domain"] for each in self.members.values()}
        return [domain_of[node] for node in self.nodes]

    @property
    def everyone(self) -> Group:
        """Group of all members: trainers, with their ranks in `trainer_group`, then replica nodes."""
        return self.groups.everyone

    @property
    def trainer_group(self) -> Group:
        """Group of the members that train; on a replica node it has one member."""
        return self.groups.trainers

    @property
    def side_group(self) -> Group:
        """Second group of the trainers, for collectives in the background; in a pipeline that of a stage's ranks."""
        return self.groups.side

    def connect(self, epoch: int, members: list[str], num_trainers: int) -> None:
        """Connect the groups of an agreement.

        Args:
            epoch: unique name of the groups.
            members: ids of the latest set of `MemberRequests.request_members`, by rank.
            num_trainers: number of them that train.

        Raises:
            PeerLost: a member is lost or does not connect; request again.
            TooFewFiles: this process may not open enough connections.
        """
        self.failure_detector.end_watch()
        reserve_open_files(len(members))
        try:
            named = self.requests.named
            probed = {each: named[each]["probe_address"] for each in members if each != self.id}
            self.reach.check_reachable(probed)
            address = named[members[0]]["store"]
            with self.stores.time_limit(address, 2 * connect_timeout(len(members)).total_seconds()):
                self.failure_detector.begin_watch(epoch, probed, members.index(self.id))
                store = dist.PrefixStore(f"{epoch:016x}", self.stores.store_at(address))
                self.members = {member: named[member] for member in members}
                self.num_trainers = num_trainers
                self.messages.quarantines.choose_writers(members.index(self.id), len(members))
                places = [(member, each["probe_address"]) for member, each in self.members.items()]
                self.groups.rebuild(epoch, store, places, members.index(self.id), num_trainers)
                addresses = [named[member]["transport"] for member in members]
                limit = max(connect_timeout(len(members)), timedelta(seconds=self.options.heartbeat_timeout))
                self.transport.connect(epoch, members.index(self.id), addresses, self._hang_timeout, limit)
                self.store = dist.PrefixStore("others", store)
            if self.failure_detector.silent:
                raise ConnectionError(f"{self.failure_detector.silent[0]} fell silent while the groups were connected")
        except (RuntimeError, TimeoutError, ConnectionError, PeerLost) as error:
            problem = plain_reason(error)
            logger.info("connecting failed, agreeing again: %s", problem)
            self.requests.lighthouses.close_client()
        else:
            return
        self.trainer_group.drop(problem)
        time.sleep(RETRY_SECONDS)
        raise PeerLost(problem)

    def _member_is_silent(self, reason: str) -> None:
        """End what this member may wait for; called in the failure detector's thread."""
        if not self.stores.end_wait():
            self.trainer_group.drop(reason)

    def close(self) -> None:
        """Leave the job: close all sockets and stop the heartbeat."""
        self.groups.close()
        self.failure_detector.end_watch()
        self.trainer_group.drop("this member has left its job (to evaluate, use session.evaluation() in the loop)")
        self.requests.close()
        self.reach.close()
        self.transport.close()
