"""Requests to the Lighthouse for the members of the job, and this member's message to the others in them.

Every member sends heartbeats to torchft's Lighthouse from a native thread and requests a set of members; all get the
same answer. The protocol (`evermoe.session.protocol`) checks it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from evermoe.comm.early_stores import EarlyStores
from evermoe.comm.ended_members import EndedMembers
from evermoe.comm.gathering import not_admitted_error
from evermoe.comm.inquiry import Inquiry
from evermoe.comm.lighthouse import Lighthouses
from evermoe.comm.messages import Messages, participant
from evermoe.comm.reachability import PROBE_SECONDS, Reachability
from evermoe.config.membership import Membership
from evermoe.errors import JoinTimeout

logger = logging.getLogger(__name__)

END_SECONDS = 5.0
"""Time in which the Lighthouse must report the end of the job to spares."""
RETURN_SECONDS = 1.0
"""Time that healthy members get to reach a Lighthouse that was restarted."""


class _Agreement:
    """Time limits of the agreement in progress, and of this member's patience with others.

    Args:
        options: the limits, and the role.
    """

    def __init__(self, options: Membership) -> None:
        self._options, self._came = options, time.monotonic()
        self._deadline: float | None = None
        """Time by which the current agreement must be reached."""
        self._patience = 0.0
        self._answered: float | None = None
        """Time of the Lighthouse's first answer in this agreement."""
        self.is_expected = False
        """Whether the members know of this one but still train."""

    @property
    def is_in_progress(self) -> bool:
        return self._deadline is not None

    @property
    def is_out_of_time(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    @property
    def seconds_left(self) -> float:
        assert self._deadline is not None
        return self._deadline - time.monotonic()

    def begin(self) -> None:
        self._deadline = time.monotonic() + self._options.quorum_timeout
        self._patience, self._answered = 0.0, None

    def end(self) -> None:
        self._deadline, self.is_expected = None, False

    def suspend(self) -> None:
        """End the time limit, which begins again with the next request."""
        self._deadline = None

    def expect_return(self) -> None:
        """Give other members time to reach a Lighthouse that was restarted."""
        self._patience, self._answered = RETURN_SECONDS, None

    def note_answer(self) -> None:
        """Let the patience run out from the first answer on."""
        self._answered = self._answered or time.monotonic()
        self._patience = min(self._patience, max(0.0, self._answered + RETURN_SECONDS - time.monotonic()))

    def patience(self, *, is_established: bool, has_heard_all: bool) -> float:
        """Return the seconds for which the Lighthouse's answer shall wait for other members.

        Args:
            is_established: whether this member has state of the running job.
            has_heard_all: whether all Lighthouses have answered.
        """
        # A newcomer is patient until it knows whether the job runs at another Lighthouse.
        found = self._patience if has_heard_all or is_established else RETURN_SECONDS
        if self._options.role == "spare" and not is_established:  # gives the members of a new job time to join
            found = max(found, self._came + self._options.hang_timeout - time.monotonic())
        return found


class MemberRequests:
    """Requests the members of the job, at once or in the background.

    Args:
        member: this member's id.
        options: time limits, and the role.
        about: fields of this member's message that stay the same.
        lighthouses: the job's Lighthouses.
        messages: writes this member's messages, and reads those of the others.
        reach: this member's probe server, and probes of the others.
        stores: clients of the others' stores.
    """

    def __init__(
        self,
        member: str,
        options: Membership,
        about: Mapping[str, Any],
        lighthouses: Lighthouses,
        messages: Messages,
        reach: Reachability,
        stores: EarlyStores,
    ) -> None:
        self._options, self._about, self._reach, self._stores = options, about, reach, stores
        self.lighthouses, self._messages = lighthouses, messages
        self._inquiry = Inquiry(lighthouses, member)
        self._ended = EndedMembers(member, messages, reach, reports=not options.allow_solo_resume)
        self._agreement = _Agreement(options)
        self.steps = 0
        """Steps after which the script ends the job; 0 for no limit."""
        self.named: dict[str, dict[str, Any]] = {}
        """Reports of the members in the latest set of the Lighthouse, by id."""

    @property
    def _members(self) -> int:
        """Number of members with which a new job begins."""
        return self._options.members or 1

    def begin_agreement(self, *, is_established: bool) -> None:
        """Start the time limit of an agreement, unless one is in progress.

        Args:
            is_established: whether this member has state of the running job.
        """
        if not self._agreement.is_in_progress:
            self._agreement.begin()
            self._messages.gathering.begin_agreement(0 if is_established else self._members)
            self.lighthouses.forget_answered()

    def end_agreement(self) -> None:
        """End the time limit: the members have agreed."""
        self._agreement.end()

    def expect_members(self, *, as_spare: bool) -> None:
        """Restart the time limit, as the members know of this one but still train; a spare waits without a limit."""
        self._agreement.suspend()
        if not self._agreement.is_expected:
            self._agreement.is_expected = True
            spare = f"this worker is a spare: it waits until one of the {self._members} that train is missing"
            logger.warning(spare if as_spare else "the job's members train, and admit this one between two steps")

    def is_out_of_time(self) -> bool:
        """Return whether the agreement has taken longer than `quorum_timeout`."""
        return self._agreement.is_out_of_time

    def timeout_error(self, problem: str) -> JoinTimeout:
        """Return the error of an agreement that took too long."""
        seconds, used = round(self._options.quorum_timeout), self.lighthouses
        if self._agreement.is_expected:
            return not_admitted_error(seconds)
        return self._messages.gathering.timeout_error(problem, seconds, used.current, lighthouse_runs=used.is_running())

    def inquire(self, standing: dict[str, Any], members: int) -> None:
        """Request the members in the background, now and from time to time; `take_answers` returns the answers.

        Args:
            standing: this member's state for the others, from the protocol.
            members: number of members that send such requests.
        """
        self._inquiry.begin_asking(self._message(standing, RETURN_SECONDS, waits=False), members)

    def take_answers(self) -> list[dict[str, Any]]:
        """Return the answers to `inquire` since the last call: fields of `Overheard` in `src/protocol/event.rs`."""
        found = []
        for quorum in self._inquiry.take_answers():
            asked = self._messages.read_members(quorum.participants, is_established=True)
            self._stores.connect_new({each.id: each.data for each in asked if each.data["standing"]["is_spare"]})
            if self._messages.names_this_member(asked):
                named = [participant(member.id, member.data) for member in asked]
                is_refused = bool(self._messages.problem(asked))
                found.append({"id": quorum.quorum_id, "participants": named, "is_refused": is_refused})
        return found

    def request_members(
        self, standing: dict[str, Any], group: Collection[str], *, is_intact: bool
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of the set that the Lighthouse names, and the protocol's view of each member of this job.

        Args:
            standing: this member's state for the others, from the protocol.
            group: ids of the members of the latest group, by rank.
            is_intact: whether the group stays as it is if no answer comes within `heartbeat_timeout`.

        Raises:
            ConnectionError: no Lighthouse answers, or its answer is inconsistent; request again.
            ValueError: the Lighthouse serves another job, or the job has another model or other options.
        """
        is_established = standing["established"]
        self._reach.probe_again(PROBE_SECONDS)
        self._inquiry.stop_asking()  # a background request would replace this one
        if is_intact:
            # A missing member may only be slow to reconnect to a restarted Lighthouse: newcomers wait for it.
            seconds = self._options.heartbeat_timeout
            self._agreement.expect_return()
        else:
            seconds = min(self._agreement.seconds_left, max(30.0, 2 * self._options.hang_timeout))
        try:
            patience = self._agreement.patience(
                is_established=is_established, has_heard_all=not self.lighthouses.silent
            )
            message = self._message(standing, patience, waits=True)
            with self._ended.reporting_ended(self.lighthouses.current, list(group)):
                quorum = self.lighthouses.request_quorum(message, max(0.1, seconds))
            self._inquiry.supersede(quorum, is_intact=is_intact)
        except ConnectionError:
            # The Lighthouse may return without memory, and reach other members a little later.
            self._agreement.expect_return()
            raise
        asked = self._messages.read_members(
            quorum.participants, is_established=is_established, steps=self.steps, needed=self._members
        )
        self._ended.check_set(quorum.quorum_id, asked, group)
        self._agreement.note_answer()
        self.named = {member.id: member.data for member in asked}
        self._messages.gathering.note_members(self.named)
        self._reach.note_cut_off({each.id: each.data["unreachable"] for each in asked if each.data["waits"]})
        self._reach.retain_members(self.named)
        return quorum.quorum_id, [participant(member.id, member.data) for member in asked]

    def _message(self, standing: dict[str, Any], patience: float, *, waits: bool) -> dict[str, Any]:
        message = {
            **self._about,
            "standing": standing,
            "waits": waits,
            "patience": patience,
            "steps": self.steps,
            "unreachable": sorted(self._reach.unreachable),
        }
        return self._messages.write_message(message)

    def announce_end(self, standing: dict[str, Any]) -> None:
        """Try to notify spares that the job is over, by one more request to the Lighthouse."""
        self._inquiry.stop_asking()
        with suppress(ConnectionError):
            self.lighthouses.request_quorum(self._message(standing, 0.0, waits=False), END_SECONDS)

    def stop_heartbeat(self) -> None:
        """Send no more requests and heartbeats, until the next request."""
        self._inquiry.stop_asking()
        self.lighthouses.stop_heartbeat()

    def withdraw(self, seconds: float) -> None:
        """Stop the heartbeat until all silent members answer again, at most for this number of seconds."""
        silent = (f"{member} at {address}" for member, address in sorted(self._reach.unreachable.items()))
        why = ", ".join(silent) or "this member, as others report"
        logger.warning("the members continue without this one until it reaches them: no answer from %s", why)
        self.lighthouses.close_client()
        self.stop_heartbeat()
        self._reach.wait_until_reached(seconds)

    def close(self) -> None:
        """Stop the heartbeat, and the thread that sends requests."""
        self.stop_heartbeat()
        self._inquiry.close()
