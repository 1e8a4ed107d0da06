"""The drivers' interface to the commit protocol, a state machine in `src/protocol/`: events in, commands out.

The machine decides. `Rendezvous` carries out the commands that concern membership, `CommitProtocol` those that concern
votes. The others are for a `Driver`: the session or the pipeline's session. The machine gets each command's outcome.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NoReturn

from evermoe import _native
from evermoe.comm.membership import MembershipManager
from evermoe.comm.vote import Ballot, cast
from evermoe.errors import IslandLost, JobFinished, LeftBehind, PeerLost
from evermoe.session.commands import Command, Driver, Event
from evermoe.session.rendezvous import Rendezvous
from evermoe.state.version import step_of

HELD = ("settle", "farewell")
"""Commands that end a job, which wait until the script asks for the next step."""

Recorder = Callable[[Event, list[Command]], None]
"""Called with each event and the commands that follow."""


class CommitProtocol:
    """Version, vote and recovery of one member.

    Args:
        driver: carries out what concerns training.
        membership: asks the Lighthouse and connects the groups.
        members: members that train, for which a new job waits.
        is_fixed: whether that number is always needed.
        join_interval: steps between looks for new members; 0 for none.
        join_wait: seconds between the first sign of a newcomer and this member's vote for it.
        rebalance_interval: steps between looks whether experts should move; 0 for none.
        generation: newest generation that this node's memory names.
        on_record: called with each event and its commands.
    """

    def __init__(
        self,
        driver: Driver,
        membership: MembershipManager,
        *,
        members: int,
        is_fixed: bool = False,
        join_interval: int = 0,
        join_wait: float = 0.0,
        rebalance_interval: int = 0,
        generation: int = 0,
        on_record: Recorder = lambda event, commands: None,
    ) -> None:
        settings = {
            "id": membership.id,
            "trains": membership.role == "train",
            "is_spare": membership.options.role == "spare",
            "members": members,
            "is_fixed": is_fixed,
            "allows_solo_resume": membership.options.allow_solo_resume,
            "needs_majority": membership.requests.lighthouses.are_several,
            "join_interval": join_interval,
            "rebalance_interval": rebalance_interval,
            "generation": generation,
        }
        self._machine = _native.Protocol(settings)
        self._driver, self._membership, self._on_record = driver, membership, on_record
        self._rendezvous = Rendezvous(driver, membership)
        self._ballot = Ballot(0.0)
        self._leaves = False
        self._join_wait, self._heard_at = join_wait, math.inf
        """Time since which this member knows of newcomers that the group has not admitted."""
        self._holds = False
        self._held: Command | None = None
        """The command that waits for the script."""
        self.is_stepping = False
        """Whether the script has a step to compute."""
        self.has_left = False
        """Whether this member has left a job that is not over."""
        self._commands = self._all_commands()
        self._tell_membership()
        on_record(settings, [])

    @property
    def version(self) -> int:
        """Version of this member's state."""
        return self._machine.version

    @property
    def step(self) -> int:
        """Steps that the state has taken."""
        return step_of(self._machine.version)

    @property
    def is_ready(self) -> bool:
        """Whether this member can compute a step without a recovery."""
        return self._machine.is_ready

    @property
    def is_over(self) -> bool:
        """Whether the job is over for this member."""
        return self._machine.is_over

    # ---- events of drivers

    def look(self, until: int, *, holds: bool = False) -> None:
        """Carry out commands until a step must be computed or the job is over.

        Args:
            until: steps after which the job is over.
            holds: whether this member stays in its job until the next look: its script has work between steps.
        """
        self._holds = holds
        broken = self._membership.trainer_group.broken
        if broken is not None and (self.is_ready or self._held):
            self.lose(broken)
        if self._held is not None:
            held, self._held = self._held, None
            self._advance(self._carry_out(**held))
        elif not self.is_stepping:
            self._advance({"event": "look", "until": until})

    def vote(self, ballot: Ballot) -> None:
        """Vote on a step, and take it if all members agree."""
        self.is_stepping = False
        self._advance(self._say(ballot))

    def leave(self) -> None:
        """Leave the job after the current step, unless it is the last one."""
        self._leaves = True

    def lose(self, reason: str) -> None:
        """Record that a peer was lost or the group was dropped."""
        self._held = None
        self._advance({"event": "lost", "reason": reason})

    # ---- the machine

    def _all_commands(self) -> dict[str, Callable[..., Event | None]]:
        """Return what carries out each command, by its name in `src/protocol/event.rs`."""
        rendezvous, driver = self._rendezvous, self._driver
        return {
            "drop": rendezvous.drop,
            "ask": rendezvous.ask,
            "inquire": rendezvous.inquire,
            "compare": rendezvous.compare,
            "wait": rendezvous.wait,
            "withdraw": rendezvous.withdraw,
            "connect": rendezvous.connect,
            "recall": rendezvous.recall,
            "weigh": driver.weigh,
            "restore": driver.restore,
            "count_losses": driver.count_losses,
            "protect": driver.protect,
            "resume": driver.resume,
            "step": self._step,
            "follow": self._follow,
            "vote": self._vote,
            "take": self._take,
            "commit": driver.commit,
            "settle": driver.settle,
            "farewell": rendezvous.farewell,
            "pause": driver.pause,
            "leave": self._leave,
            "close": driver.close,
            "stop": self._stop,
        }

    def _advance(self, event: Event | None) -> None:
        while event is not None:
            for heard in self._rendezvous.overheard():
                self._handle(heard)
            answer = None
            for command in self._handle(event):
                answer = self._carry_out(**command)
            event = answer

    def _handle(self, event: Event) -> list[Command]:
        if event["event"] == "lost":
            self.is_stepping = False
            self._membership.groups.start.lose()
        commands = self._machine.handle(event)
        self._tell_membership()
        self._on_record(event, commands)
        return commands

    def _tell_membership(self) -> None:
        self._membership.generation = self._machine.generation
        self._membership.established = self._machine.is_established

    def _carry_out(self, command: str, **fields: Any) -> Event | None:
        if self._holds and command in HELD:
            self._held = {"command": command} | fields
            return None
        if command == "connect":
            self._heard_at = math.inf  # newcomers are in the new group
        if command == "stop":
            self._stop(**fields)  # any exception ends the job, PeerLost too
        try:
            return self._commands[command](**fields)
        except PeerLost as lost:
            return {"event": "lost", "reason": str(lost)}

    # ---- commands that concern the vote

    def _take(self, vote: dict[str, Any], is_recalled: bool) -> None:
        sums = Ballot.from_bits(vote["sums"])
        self._driver.take(vote["before"], vote["after"], sums, is_recalled=is_recalled)

    def _step(self, number: int) -> None:
        self._membership.requests.end_agreement()
        self._driver.step(number)
        self.is_stepping = True

    def _follow(self, number: int) -> Event:
        self._membership.requests.end_agreement()
        return self._say(self._driver.follow(number))

    def _say(self, ballot: Ballot) -> Event:
        self._ballot = ballot._replace(leaving=float(self._leaves))
        is_whole, leaves = bool(ballot.votes), bool(self._ballot.leaving)
        lag = self._driver.lag(self.step + 1)
        return {"event": "gradients", "is_whole": is_whole, "leaves": leaves, "lag": lag}

    def _vote(self, version: int, calls: bool) -> Event:
        if calls:
            self._heard_at = min(self._heard_at, time.monotonic())
        is_time = time.monotonic() >= self._heard_at + self._join_wait
        ballot = self._ballot._replace(newcomer_seen=float(is_time))
        sums, attached = cast(self._membership.everyone, ballot, self._driver.attached())
        if not self._membership.groups.start.begin():  # scripts in an island must all see the step as taken, or none
            raise PeerLost("another process of this island has lost a peer in the vote")
        if sums.newcomer_seen:
            self._heard_at = math.inf
        self._driver.tallied(self.step, sums, attached)
        counts = {"votes": int(sums.votes), "leaving": int(sums.leaving), "newcomer_seen": int(sums.newcomer_seen)}
        return {"event": "tally", **counts, "sums": sums.to_bits()}

    def _leave(self) -> None:
        self.has_left = True

    def _stop(self, why: str, **fields: Any) -> NoReturn:
        if why == "finished":
            raise JobFinished(f"job {self._membership.identity.job} has committed all its steps")
        if why == "units_lost":
            self._driver.units_lost()
        if why == "no_progress":
            raise PeerLost(
                f"{fields['recoveries']} recoveries in a row without a committed step at step {self.step}; the last "
                f"failure: {fields['reason']}"
                + (
                    f"; waited in vain for {self._membership.failure_detector.late}"
                    if self._membership.failure_detector.late
                    else ""
                )
            )
        if why == "left_behind":
            raise LeftBehind(
                f"this member took part until agreement {fields['adopted']} of the Lighthouse, which is at agreement "
                f"{fields['id']} now, and no member of those between is left: the others continued without it, and may "
                "have committed steps that it does not know. Start it again to join them or to resume from what is "
                "left; with allow_solo_resume it would train on from its own state."
            )
        if why == "island_lost":
            raise IslandLost(
                f"of the {fields['size']} processes of this worker's island, {fields['found']} are left, and an island "
                "takes part only with all of them: the other islands continue without it. Start all processes of this "
                "island again, as torchrun does when one ends: they join the others and take their state."
            )
        raise self._membership.requests.timeout_error(fields["reason"])
