"""Who is alive: what the Lighthouse says, and the groups that follow from it. Only `comm` knows torchft.

torchft's Lighthouse names the members: every member beats from a native thread and asks for a set; the answer is the
same for all. The protocol (`evermoe.train.protocol`) judges it, and `MembershipManager.connect` builds the groups.
Groups meet in the store of the first member, under a prefix of their own; `evermoe.comm.reachability` finds out
who answers.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evermoe.comm.early_stores import EarlyStores
from evermoe.comm.ended_members import EndedMembers
from evermoe.comm.failure_detector import FailureDetector
from evermoe.comm.gathering import not_taken_in
from evermoe.comm.group import Group, connect_timeout
from evermoe.comm.inquiry import Inquiry
from evermoe.comm.lighthouse import Lighthouses
from evermoe.comm.messages import Identity, Messages, job_secret, participant
from evermoe.comm.open_files import reserve_open_files
from evermoe.comm.plain_reason import plain_reason
from evermoe.comm.reachability import LOOK_SECONDS, Reachability, find_endpoint
from evermoe.comm.transport import Transport
from evermoe.config.membership import Membership, split_addresses
from evermoe.errors import JoinTimeout, PeerLost
from evermoe.native_calls import close_at_exit

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.1
"""Time between two attempts to agree."""
END_SECONDS = 5.0
"""Time in which the Lighthouse must pass on to spares that the job is over."""
RETURN_SECONDS = 1.0
"""Time that members which nothing is wrong with get to reach a Lighthouse that has just come back."""


class MembershipManager:
    """Asks the Lighthouse which members take part, and connects their groups.

    Args:
        options: limits, and the role.
        lighthouse: address of the job's Lighthouse, also of one that this process has started; several with commas.
        identity: what all members of the job share.
        node: the machine whose memory dies as one.
        device: device of the tensors that `trainer_group` takes.
        rank_key: ranks follow the order of these, then of the members' ids.
        has_side_group: whether those that train need `side_group`.
    """

    _meeting: str | None = None
    """Address of the store in which groups are being connected."""
    _deadline: float | None = None
    """Until when the agreement that is under way must be reached."""

    def __init__(
        self,
        options: Membership,
        *,
        lighthouse: str,
        identity: Identity,
        node: str,
        device: torch.device,
        rank_key: str = "",
        has_side_group: bool = False,
    ) -> None:
        reserve_open_files(options.members or 1)
        self.id, self.node, self.rank_key = f"{node}-{uuid.uuid4().hex[:8]}", node, rank_key
        secret, place = job_secret(), find_endpoint(options.address, split_addresses(lighthouse))
        self.lighthouses = Lighthouses(lighthouse, self.id, place.host, place.manager)
        common = {**identity.options, "lighthouses": "several" if self.lighthouses.are_several else "one"}
        self.identity = identity = replace(identity, options=common)
        self.messages = Messages(self.id, identity, lighthouse, secret)
        self.role, self.is_spare = "train" if options.trains else "replica", options.role == "spare"
        self.allows_solo_resume = options.allow_solo_resume
        self._members, self._domain = options.members or 1, options.domain or ""
        interface = place.address or options.address
        self.trainer_group = Group(interface)
        """Group of the members that train; on a replica node it has one member."""
        self.transport = Transport(place.host, place.address, secret, options.transport)
        """Messages between all members, replica nodes included, of background threads."""
        self._with_replicas = Group(interface)
        self.side_group, self._has_side_group = Group(interface), has_side_group
        """Second group of the trainers, for exchanges on the CPU; in a pipeline of a stage's ranks; or of one."""
        _link([self.trainer_group, self._with_replicas, self.side_group], self.transport)
        self.steps = 0
        """Steps after which the script ends the job; 0 where no script does."""
        self.established = False
        """Whether this member has state of the running job, as its protocol says."""
        self.generation = 0
        """Generation of the group, as the protocol says."""
        self.members: dict[str, Mapping[str, Any]] = {}
        """Reports of the group's members, by id, in the order of ranks."""
        self.nodes: list[str] = []
        """Per rank, the machine whose memory dies with it; several members may share one. Replica nodes come last."""
        self.num_trainers = 1
        """Number of members that train."""
        self.store: Any = None
        """Store of the current members, where further groups can meet, under a prefix that no other epoch uses."""
        self.device = device
        """Device of the tensors that `trainer_group` takes."""
        self._heartbeat_timeout, self._quorum_timeout = options.heartbeat_timeout, options.quorum_timeout
        self._hang_timeout = timedelta(seconds=options.hang_timeout)
        self._patience, self._is_expected, self._came = 0.0, False, time.monotonic()
        self._answered: float | None = None
        """When the Lighthouse answered first in this agreement."""
        self.named: dict[str, dict[str, Any]] = {}
        """Reports of the members in the latest set of the Lighthouse, by id."""
        self._inquiry, self.reach = Inquiry(self.lighthouses, self.id), Reachability(self.id, place, secret)
        """Other members that this one can reach."""
        self._ended = EndedMembers(self.id, self.messages, self.reach, speaks=not self.allows_solo_resume)
        self.stores = EarlyStores(place, self._hang_timeout, secret, self.reach)
        """Where groups meet, and connections to those of others."""
        self.watch = FailureDetector(
            self.reach,
            (self.trainer_group, self._with_replicas),
            heartbeat_timeout=options.heartbeat_timeout,
            hang_timeout=options.hang_timeout,
            on_silent=self._member_is_silent,
            on_left_out=self._stop_heart,
        )
        """Watches the other members of the group."""
        close_at_exit(self)

    @property
    def domains(self) -> list[str]:
        """Per rank, what fails with its node, from the largest to the smallest, with slashes; empty where unknown."""
        domain_of = {each["node"]: each["domain"] for each in self.members.values()}
        return [domain_of[node] for node in self.nodes]

    @property
    def everyone(self) -> Group:
        """Group of all members: those that train, with their ranks of `trainer_group`, then replica nodes."""
        return self.trainer_group if self.num_trainers == len(self.nodes) or not self.nodes else self._with_replicas

    # ---- an agreement

    def begin_agreement(self) -> None:
        """Starts the time limit of an agreement, unless one is under way."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._quorum_timeout
            self._patience, self._answered = 0.0, None
            self.messages.gathering.begin(0 if self.established else self._members)
            self.lighthouses.begin()

    def end_agreement(self) -> None:
        """The members have agreed."""
        self._deadline, self._is_expected = None, False

    def expect_members(self, *, as_spare: bool) -> None:
        """The members train and have heard of this one: it waits for them, for as long again; as a spare, always."""
        self._deadline = None
        if not self._is_expected:
            self._is_expected = True
            spare = f"this worker is a spare: it waits until one of the {self._members} that train is missing"
            logger.warning(spare if as_spare else "the job's members train, and take this one in between two steps")

    def is_out_of_time(self) -> bool:
        """Whether the agreement has taken longer than `quorum_timeout`."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def timeout(self, problem: str) -> JoinTimeout:
        """The error of an agreement that took too long."""
        seconds, address = round(self._quorum_timeout), self.lighthouses.current
        if self._is_expected:
            return not_taken_in(seconds)
        return self.messages.gathering.timeout(problem, seconds, address, lighthouse_runs=self.lighthouses.runs())

    def inquire(self, standing: dict[str, Any]) -> None:
        """Asks the Lighthouse beside training, now and from time to time; `overheard` has the answers that have come.

        Args:
            standing: what this member tells the others, as the protocol has it.
        """
        self._inquiry.begin(self._message(standing, RETURN_SECONDS, waits=False), len(self.nodes))

    def overheard(self) -> list[tuple[int, list[dict[str, Any]]]]:
        """What the Lighthouse has answered to `inquire` since the last call, as `ask` returns it."""
        heard = []
        for quorum in self._inquiry.take():
            asked = self.messages.read(quorum.participants, is_established=True)
            self.stores.connect({each.id: each.data for each in asked if each.data["standing"]["is_spare"]})
            if self.messages.names(asked):
                asked = [] if self.messages.problem(asked) else asked
                heard.append((quorum.quorum_id, [participant(member.id, member.data) for member in asked]))
        return heard

    def ask(self, standing: dict[str, Any], *, is_intact: bool) -> tuple[int, list[dict[str, Any]]]:
        """The set that the Lighthouse names: its number, and what the protocol knows of each member of this job.

        Args:
            standing: what this member tells the others, as the protocol has it.
            is_intact: whether the group stays as it is if no answer comes within `heartbeat_timeout`.

        Raises:
            ConnectionError: no Lighthouse answers, or not with what can be believed; ask again.
            ValueError: the Lighthouse serves another job, or the job trains another model or with other options.
        """
        self.reach.look_again(LOOK_SECONDS)
        self._inquiry.end()  # it would take the place of what is asked now
        if is_intact:
            # A missing member may only be slow to reconnect to a restarted Lighthouse: newcomers wait for it.
            seconds, self._patience, self._answered = self._heartbeat_timeout, RETURN_SECONDS, None
        else:
            assert self._deadline is not None
            seconds = min(self._deadline - time.monotonic(), max(30.0, 2 * self._hang_timeout.total_seconds()))
        try:
            # A newcomer is patient as long as it does not know whether the job runs at another Lighthouse.
            patience = RETURN_SECONDS if self.lighthouses.silent and not self.established else self._patience
            if self.is_spare and not self.established:  # those that are to begin a new job get time to come
                patience = max(patience, self._came + self._hang_timeout.total_seconds() - time.monotonic())
            with self._ended.speaking(self.lighthouses.current, list(self.members)):
                quorum = self.lighthouses.ask(self._message(standing, patience, waits=True), max(0.1, seconds))
            self._inquiry.give_way(quorum, is_intact=is_intact)
        except ConnectionError:
            # The Lighthouse may come back without any memory, and to others a little later.
            self._patience, self._answered = RETURN_SECONDS, None
            raise
        asked = self.messages.read(
            quorum.participants, is_established=self.established, steps=self.steps, needed=self._members
        )
        self._ended.check(quorum.quorum_id, asked, self.members)
        self._answered = self._answered or time.monotonic()
        self._patience = min(self._patience, max(0.0, self._answered + RETURN_SECONDS - time.monotonic()))
        self.named = {member.id: member.data for member in asked}
        self.messages.gathering.meet(self.named)
        self.reach.note_cut({each.id: each.data["unreachable"] for each in asked if each.data["waits"]})
        self.reach.forget_all_but(self.named)
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
            "store": self.stores.address,
            "probe_address": self.reach.address,
            "transport": self.transport.address,
            "unreachable": sorted(self.reach.unreachable),
        }
        return self.messages.write(message)

    def tell_end(self, standing: dict[str, Any]) -> None:
        """Tells spares that ask the Lighthouse, too, that the job is over; tries for a while."""
        self._inquiry.end()
        with suppress(ConnectionError):
            self.lighthouses.ask(self._message(standing, 0.0, waits=False), END_SECONDS)

    def connect(self, epoch: int, members: list[str], num_trainers: int) -> None:
        """Connects the groups of an agreement.

        Args:
            epoch: names the groups; no other agreement has this name.
            members: ids by rank, of the set that `ask` returned last.
            num_trainers: how many of them train.

        Raises:
            PeerLost: a member is gone or does not come; ask again.
            TooFewFiles: this process may not open as many connections.
        """
        self.watch.end()
        reserve_open_files(len(members))
        try:
            probed = {each: self.named[each]["probe_address"] for each in members if each != self.id}
            self.reach.check(probed)
            self._meeting = address = self.named[members[0]]["store"]
            self.watch.begin(epoch, probed, members.index(self.id))
            with self.stores.within(address, 2 * connect_timeout(len(members)).total_seconds()):
                store = dist.PrefixStore(f"{epoch:016x}", self.stores.get(address))
                self.members = {member: self.named[member] for member in members}
                self.nodes = [each["node"] for each in self.members.values()]
                self.num_trainers = num_trainers
                self._rebuild(store, members.index(self.id), len(members))
                addresses = [self.named[member]["transport"] for member in members]
                limit = max(connect_timeout(len(members)), timedelta(seconds=self._heartbeat_timeout))
                self.transport.connect(epoch, members.index(self.id), addresses, self._hang_timeout, limit)
                self.store = dist.PrefixStore("others", store)
            self._meeting = None
            if self.watch.silent:
                raise ConnectionError(f"{self.watch.silent[0]} fell silent while the groups were connected")
        except (RuntimeError, TimeoutError, ConnectionError, PeerLost) as error:
            problem = plain_reason(error)
            logger.info("connecting failed, agreeing again: %s", problem)
            self._meeting = None
            self.lighthouses.hang_up()
        else:
            return
        self.trainer_group.drop(problem)
        time.sleep(RETRY_SECONDS)
        raise PeerLost(problem)

    def _member_is_silent(self, reason: str) -> None:
        """In the watch's thread: ends what this member may wait for."""
        meeting = self._meeting
        if meeting is None:
            self.trainer_group.drop(reason)
        else:
            self.stores.end(meeting)

    def _rebuild(self, store: Any, rank: int, size: int) -> None:
        self.trainer_group.drop("the group is being rebuilt")
        cpu, limit = torch.device("cpu"), self._hang_timeout
        if size > self.num_trainers:
            self._with_replicas.rebuild(dist.PrefixStore("everyone", store), rank, size, cpu, limit)
        if self.role == "train":
            self.trainer_group.rebuild(store, rank, self.num_trainers, self.device, limit)
            if self._has_side_group:
                self.side_group.rebuild(dist.PrefixStore("side", store), rank, self.num_trainers, cpu, limit)
        else:
            self.trainer_group.rebuild(store, 0, 1, cpu, limit)

    def close(self) -> None:
        """Leaves the job: closes sockets and stops the heartbeat."""
        self.watch.end()
        self.trainer_group.drop("this member has left its job (to evaluate, use session.evaluation() in the loop)")
        self._stop_heart()
        self._inquiry.close()
        self.reach.close()
        self.transport.close()

    def _stop_heart(self) -> None:
        self._inquiry.end()
        self.lighthouses.stop_heart()

    def withdraw(self, seconds: float) -> None:
        """Tells the Lighthouse nothing more, until all members answer that did not, or so many seconds are over."""
        silent = ", ".join(sorted(f"{member} at {address}" for member, address in self.reach.unreachable.items()))
        why = silent or "here, as others say"
        logger.warning("the members continue without this one until it reaches them: no answer from %s", why)
        self.lighthouses.hang_up()
        self._stop_heart()
        self.reach.wait_until_reached(seconds)


def _link(groups: list[Group], transport: Transport) -> None:
    """Makes each group be dropped with the others."""
    for group in groups:
        group.linked, group.transport = [other for other in groups if other is not group], transport
