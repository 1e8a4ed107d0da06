"""Membership of a job: the sets that the Lighthouse names, and the groups built from them. Only `comm` uses torchft.

Every member sends heartbeats to torchft's Lighthouse from a native thread and requests a set of members; all get the
same answer. The protocol (`evermoe.session.protocol`) checks it, and `MembershipManager.connect` builds the groups.
They meet in the store of the first member, under a prefix of their own. `evermoe.comm.reachability` finds out which
members answer.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evermoe.comm.early_stores import EarlyStores
from evermoe.comm.ended_members import EndedMembers
from evermoe.comm.endpoint import find_endpoint
from evermoe.comm.failure_detector import FailureDetector
from evermoe.comm.gathering import not_admitted_error
from evermoe.comm.gloo import connect_timeout
from evermoe.comm.group import Group
from evermoe.comm.inquiry import Inquiry
from evermoe.comm.island import Island, check_options
from evermoe.comm.island_watch import IslandWatch
from evermoe.comm.lighthouse import Lighthouses
from evermoe.comm.member_groups import MemberGroups
from evermoe.comm.messages import Identity, Messages, job_secret, participant
from evermoe.comm.open_files import reserve_open_files
from evermoe.comm.plain_reason import plain_reason
from evermoe.comm.quarantine import find_hardware
from evermoe.comm.reachability import PROBE_SECONDS, Reachability
from evermoe.comm.transport import Transport
from evermoe.config.membership import Membership, split_addresses
from evermoe.errors import JoinTimeout, PeerLost
from evermoe.process.native_calls import close_at_exit

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.1
"""Time between two attempts to agree."""
END_SECONDS = 5.0
"""Time in which the Lighthouse must report the end of the job to spares."""
RETURN_SECONDS = 1.0
"""Time that healthy members get to reach a Lighthouse that was restarted."""


class MembershipManager:
    """Requests the members of the job from the Lighthouse, and connects their groups.

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

    _meeting: str | None = None
    """Address of the store in which groups are being connected."""
    _deadline: float | None = None
    """Time by which the current agreement must be reached."""

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
        self.id, self.node, self.device, self.island = f"{node}-{uuid.uuid4().hex[:8]}", node, device, island
        self.rank_key = rank_key if island is None else island.rank_key
        secret, place = job_secret(), find_endpoint(options.address, split_addresses(lighthouse))
        interface = place.address or (place.host if options.address else None)
        self.lighthouses = Lighthouses(lighthouse, self.id, place.host, place.manager)
        common = {
            "lighthouses": "several" if self.lighthouses.are_several else "one",
            "island size": "none" if island is None else str(island.size),
        }
        self.identity = identity = replace(identity, options={**identity.options, **common})
        self.messages = Messages(self.id, identity, lighthouse, secret, find_hardware(node, device))
        self.role, self.is_spare = "train" if options.trains else "replica", options.role == "spare"
        self.allows_solo_resume = options.allow_solo_resume
        self._members, self._domain = options.members or 1, options.domain or ""
        self._hang_timeout = timedelta(seconds=options.hang_timeout)
        self.transport = Transport(place.host, place.address, secret, options.transport, place.cards)
        """Messages of background threads between all members, including replica nodes."""
        self._inquiry, self.reach = Inquiry(self.lighthouses, self.id), Reachability(self.id, place, secret)
        """Probe server of this member, and probes of the others."""
        watch = IslandWatch.of(island, self.reach, options.heartbeat_timeout)
        self.groups = groups = MemberGroups(interface, self.transport, self._hang_timeout, watch, device, side_device)
        self.trainer_group = groups.trainers
        """Group of the members that train; on a replica node it has one member."""
        self.side_group = groups.side
        """Second group of the trainers, for collectives in the background; in a pipeline that of a stage's ranks."""
        self.steps = 0
        """Steps after which the script ends the job; 0 for no limit."""
        self.established = False
        """Whether this member has state of the running job; set by its protocol."""
        self.generation = 0
        """Generation of the group; set by the protocol."""
        self.members: dict[str, Mapping[str, Any]] = {}
        """Reports of the group's members, by id, in the order of ranks."""
        self.nodes: list[str] = []
        """Node of each rank, whose memory fails as one; several ranks may share a node. Replica nodes come last."""
        self.num_trainers = 1
        """Number of members that train."""
        self.store: Any = None
        """Store in which further groups of the current members can meet; its prefix is unique to the epoch."""
        self._heartbeat_timeout, self._quorum_timeout = options.heartbeat_timeout, options.quorum_timeout
        self._patience, self._is_expected, self._came = 0.0, False, time.monotonic()
        self._answered: float | None = None
        """Time of the Lighthouse's first answer in this agreement."""
        self.named: dict[str, dict[str, Any]] = {}
        """Reports of the members in the latest set of the Lighthouse, by id."""
        self._ended = EndedMembers(self.id, self.messages, self.reach, reports=not self.allows_solo_resume)
        self.stores = EarlyStores(place, self._hang_timeout, secret, self.reach)
        """This member's store, and clients of the others' stores."""
        self.failure_detector = FailureDetector(
            self.reach,
            (groups.trainers, groups.with_replicas, groups.position),
            heartbeat_timeout=options.heartbeat_timeout,
            hang_timeout=options.hang_timeout,
            on_silent=self._member_is_silent,
            on_left_out=self._stop_heartbeat,
        )
        close_at_exit(self)

    @property
    def domains(self) -> list[str]:
        """Failure domains of each rank's node, from the largest to the smallest, with slashes; empty if unknown."""
        domain_of = {each["node"]: each["domain"] for each in self.members.values()}
        return [domain_of[node] for node in self.nodes]

    @property
    def everyone(self) -> Group:
        """Group of all members: trainers, with their ranks in `trainer_group`, then replica nodes."""
        return self.groups.everyone

    def begin_agreement(self) -> None:
        """Start the time limit of an agreement, unless one is in progress."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._quorum_timeout
            self._patience, self._answered = 0.0, None
            self.messages.gathering.begin_agreement(0 if self.established else self._members)
            self.lighthouses.forget_answered()

    def end_agreement(self) -> None:
        """End the time limit: the members have agreed."""
        self._deadline, self._is_expected = None, False

    def expect_members(self, *, as_spare: bool) -> None:
        """Restart the time limit, as the members know of this one but still train; a spare waits without a limit."""
        self._deadline = None
        if not self._is_expected:
            self._is_expected = True
            spare = f"this worker is a spare: it waits until one of the {self._members} that train is missing"
            logger.warning(spare if as_spare else "the job's members train, and admit this one between two steps")

    def is_out_of_time(self) -> bool:
        """Return whether the agreement has taken longer than `quorum_timeout`."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def timeout_error(self, problem: str) -> JoinTimeout:
        """Return the error of an agreement that took too long."""
        seconds, used = round(self._quorum_timeout), self.lighthouses
        if self._is_expected:
            return not_admitted_error(seconds)
        return self.messages.gathering.timeout_error(problem, seconds, used.current, lighthouse_runs=used.is_running())

    def inquire(self, standing: dict[str, Any]) -> None:
        """Request the members in the background, now and from time to time; `take_answers` returns the answers.

        Args:
            standing: this member's state for the others, from the protocol.
        """
        self._inquiry.begin_asking(self._message(standing, RETURN_SECONDS, waits=False), len(self.nodes))

    def take_answers(self) -> list[dict[str, Any]]:
        """Return the answers to `inquire` since the last call: fields of `Overheard` in `src/protocol/event.rs`."""
        found = []
        for quorum in self._inquiry.take_answers():
            asked = self.messages.read_members(quorum.participants, is_established=True)
            self.stores.connect_new({each.id: each.data for each in asked if each.data["standing"]["is_spare"]})
            if self.messages.names_this_member(asked):
                named = [participant(member.id, member.data) for member in asked]
                is_refused = bool(self.messages.problem(asked))
                found.append({"id": quorum.quorum_id, "participants": named, "is_refused": is_refused})
        return found

    def request_members(self, standing: dict[str, Any], *, is_intact: bool) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of the set that the Lighthouse names, and the protocol's view of each member of this job.

        Args:
            standing: this member's state for the others, from the protocol.
            is_intact: whether the group stays as it is if no answer comes within `heartbeat_timeout`.

        Raises:
            ConnectionError: no Lighthouse answers, or its answer is inconsistent; request again.
            ValueError: the Lighthouse serves another job, or the job has another model or other options.
        """
        self.reach.probe_again(PROBE_SECONDS)
        self._inquiry.stop_asking()  # a background request would replace this one
        if is_intact:
            # A missing member may only be slow to reconnect to a restarted Lighthouse: newcomers wait for it.
            seconds, self._patience, self._answered = self._heartbeat_timeout, RETURN_SECONDS, None
        else:
            assert self._deadline is not None
            seconds = min(self._deadline - time.monotonic(), max(30.0, 2 * self._hang_timeout.total_seconds()))
        try:
            # A newcomer is patient until it knows whether the job runs at another Lighthouse.
            patience = RETURN_SECONDS if self.lighthouses.silent and not self.established else self._patience
            if self.is_spare and not self.established:  # gives the members of a new job time to join
                patience = max(patience, self._came + self._hang_timeout.total_seconds() - time.monotonic())
            message = self._message(standing, patience, waits=True)
            with self._ended.reporting_ended(self.lighthouses.current, list(self.members)):
                quorum = self.lighthouses.request_quorum(message, max(0.1, seconds))
            self._inquiry.supersede(quorum, is_intact=is_intact)
        except ConnectionError:
            # The Lighthouse may return without memory, and reach other members a little later.
            self._patience, self._answered = RETURN_SECONDS, None
            raise
        asked = self.messages.read_members(
            quorum.participants, is_established=self.established, steps=self.steps, needed=self._members
        )
        self._ended.check_set(quorum.quorum_id, asked, self.members)
        self._answered = self._answered or time.monotonic()
        self._patience = min(self._patience, max(0.0, self._answered + RETURN_SECONDS - time.monotonic()))
        self.named = {member.id: member.data for member in asked}
        self.messages.gathering.note_members(self.named)
        self.reach.note_cut_off({each.id: each.data["unreachable"] for each in asked if each.data["waits"]})
        self.reach.retain_members(self.named)
        return quorum.quorum_id, [participant(member.id, member.data) for member in asked]

    def _message(self, standing: dict[str, Any], patience: float, *, waits: bool) -> dict[str, Any]:
        message = {
            "standing": standing,
            "waits": waits,
            "patience": patience,
            "node": self.node,
            "domain": self._domain,
            "role": self.role,
            "steps": self.steps,
            "rank_key": self.rank_key,
            "island": None if self.island is None else asdict(self.island),
            "store": self.stores.address,
            "probe_address": self.reach.address,
            "transport": self.transport.address,
            "unreachable": sorted(self.reach.unreachable),
        }
        return self.messages.write_message(message)

    def announce_end(self, standing: dict[str, Any]) -> None:
        """Try to notify spares that the job is over, by one more request to the Lighthouse."""
        self._inquiry.stop_asking()
        with suppress(ConnectionError):
            self.lighthouses.request_quorum(self._message(standing, 0.0, waits=False), END_SECONDS)

    def connect(self, epoch: int, members: list[str], num_trainers: int) -> None:
        """Connect the groups of an agreement.

        Args:
            epoch: unique name of the groups.
            members: ids of the latest set of `request_members`, by rank.
            num_trainers: number of them that train.

        Raises:
            PeerLost: a member is lost or does not connect; request again.
            TooFewFiles: this process may not open enough connections.
        """
        self.failure_detector.end_watch()
        reserve_open_files(len(members))
        try:
            probed = {each: self.named[each]["probe_address"] for each in members if each != self.id}
            self.reach.check_reachable(probed)
            self._meeting = address = self.named[members[0]]["store"]
            self.failure_detector.begin_watch(epoch, probed, members.index(self.id))
            with self.stores.time_limit(address, 2 * connect_timeout(len(members)).total_seconds()):
                store = dist.PrefixStore(f"{epoch:016x}", self.stores.store_at(address))
                self.members = {member: self.named[member] for member in members}
                self.nodes = [each["node"] for each in self.members.values()]
                self.num_trainers = num_trainers
                self.messages.quarantines.choose_writers(members.index(self.id), len(members))
                places = [(member, each["probe_address"]) for member, each in self.members.items()]
                self.groups.rebuild(epoch, store, places, members.index(self.id), num_trainers)
                addresses = [self.named[member]["transport"] for member in members]
                limit = max(connect_timeout(len(members)), timedelta(seconds=self._heartbeat_timeout))
                self.transport.connect(epoch, members.index(self.id), addresses, self._hang_timeout, limit)
                self.store = dist.PrefixStore("others", store)
            self._meeting = None
            if self.failure_detector.silent:
                raise ConnectionError(f"{self.failure_detector.silent[0]} fell silent while the groups were connected")
        except (RuntimeError, TimeoutError, ConnectionError, PeerLost) as error:
            problem = plain_reason(error)
            logger.info("connecting failed, agreeing again: %s", problem)
            self._meeting = None
            self.lighthouses.close_client()
        else:
            return
        self.trainer_group.drop(problem)
        time.sleep(RETRY_SECONDS)
        raise PeerLost(problem)

    def _member_is_silent(self, reason: str) -> None:
        """End what this member may wait for; called in the failure detector's thread."""
        meeting = self._meeting
        if meeting is None:
            self.trainer_group.drop(reason)
        else:
            self.stores.end_connections_to(meeting)

    def close(self) -> None:
        """Leave the job: close all sockets and stop the heartbeat."""
        self.groups.close()
        self.failure_detector.end_watch()
        self.trainer_group.drop("this member has left its job (to evaluate, use session.evaluation() in the loop)")
        self._stop_heartbeat()
        self._inquiry.close()
        self.reach.close()
        self.transport.close()

    def _stop_heartbeat(self) -> None:
        self._inquiry.stop_asking()
        self.lighthouses.stop_heartbeat()

    def withdraw(self, seconds: float) -> None:
        """Stop the heartbeat until all silent members answer again, at most for this number of seconds."""
        silent = (f"{member} at {address}" for member, address in sorted(self.reach.unreachable.items()))
        why = ", ".join(silent) or "this member, as others report"
        logger.warning("the members continue without this one until it reaches them: no answer from %s", why)
        self.lighthouses.close_client()
        self._stop_heartbeat()
        self.reach.wait_until_reached(seconds)
