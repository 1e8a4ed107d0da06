"""Commands of the commit protocol that concern membership, the same in sessions and pipelines."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch.distributed as dist

from evermoe.comm.gather import gather_json
from evermoe.comm.membership import MembershipManager
from evermoe.session.commands import Driver, Event

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.05
"""Pause between two requests to the Lighthouse while members are awaited."""
WITHDRAW_SECONDS = 10.0
"""Time after which a member that the others cannot reach asks again, unless they answer earlier."""


class Rendezvous:
    """The commands that concern membership, the same for all drivers.

    Args:
        driver: notified before each.
        membership: asks the Lighthouse and connects the groups.
    """

    def __init__(self, driver: Driver, membership: MembershipManager) -> None:
        self._driver, self._membership = driver, membership
        self._minority = (0, 0)

    def drop(self, reason: str) -> None:
        """Close this member's connections."""
        self._membership.trainer_group.drop(reason)

    def ask(self, standing: dict[str, Any], is_intact: bool) -> Event:
        """Ask the Lighthouse who takes part: `quorum`, `unanswered` or `out_of_time`."""
        self._driver.agreeing()
        if self._membership.trainer_group.broken is not None:
            self._back_off()
        if is_intact:
            gather_json(self._membership.everyone, None)  # the Lighthouse answers once all have asked
        else:
            self._membership.requests.begin_agreement(is_established=standing["established"])
        try:
            group = self._membership.members
            number, participants = self._membership.requests.request_members(standing, group, is_intact=is_intact)
        except ConnectionError as error:
            unanswered = {"event": "unanswered", "reason": str(error), "refused": self._membership.messages.refused}
            if is_intact:
                return unanswered
            if self._membership.requests.is_out_of_time():
                return {"event": "out_of_time", "reason": str(error)}
            time.sleep(WAIT_SECONDS)
            return unanswered
        watch = self._membership.groups.watch
        if watch is not None and not is_intact and watch.awaits_slow([each["id"] for each in participants]):
            time.sleep(WAIT_SECONDS)
            return {"event": "unanswered", "reason": "a process of this island is slow to ask"}
        return {
            "event": "quorum",
            "id": number,
            "participants": participants,
            "is_promoted": self._membership.messages.is_promoted,
        }

    def inquire(self, standing: dict[str, Any]) -> None:
        """Ask the Lighthouse in the background."""
        self._membership.requests.inquire(standing, len(self._membership.members))

    def overheard(self) -> list[Event]:
        """Return the Lighthouse's answers since the last call."""
        return [{"event": "overheard"} | answer for answer in self._membership.requests.take_answers()]

    def compare(self, set: int | None) -> Event:
        """Gather the Lighthouse's answers of all members of the group: `compared`."""
        return {"event": "compared", "sets": gather_json(self._membership.everyone, set)}

    def _back_off(self) -> None:
        """Stay away for a while if the others have waited for this member in vain."""
        self._membership.failure_detector.probe_members()
        end = time.monotonic() + self._membership.failure_detector.backoff_seconds()
        while time.monotonic() < end:
            self._driver.waiting()
            time.sleep(WAIT_SECONDS)

    def wait(self, why: str, found: int = 0, needed: int = 0, size: int = 0) -> Event:
        """Wait before the Lighthouse is asked again: `waited` or `out_of_time`."""
        if why in ("training", "spare"):
            self._membership.requests.expect_members(as_spare=why == "spare")
        if why == "members":
            self._membership.messages.gathering.needed = needed
        if self._membership.requests.is_out_of_time():
            reason = self._lacking(found, size) if why == "minority" else "some members are absent"
            if why == "island":
                reason = f"of the {size} processes of this worker's island, {found} have come"
            if why == "members":
                reason = ""  # the message names the members that have come
            silent = self._membership.requests.lighthouses.silent
            if silent and not self._membership.established:
                reason = f"a new job begins once all its Lighthouses have answered, and {silent[0]} has not"
            return {"event": "out_of_time", "reason": reason}
        if why == "minority":
            self._note_minority(found, size)
        self._membership.requests.lighthouses.try_another(why, is_established=self._membership.established)
        self._driver.waiting()
        time.sleep(WAIT_SECONDS)
        return {"event": "waited"}

    def _note_minority(self, found: int, size: int) -> None:
        if (found, size) != self._minority:
            self._minority = found, size
            logger.warning("waiting: %s", self._lacking(found, size))

    def _lacking(self, found: int, size: int) -> str:
        address, job = self._membership.requests.lighthouses.current, self._membership.identity.job
        return (
            f"{found} of the last {size} members are here, and with several Lighthouses only more than half of them go "
            "on, or half with the lowest id, with the newest state they know of. Bring others back or a Lighthouse "
            f"that they reach; if they are gone for good, say: evermoe lighthouse promote {address} --job {job}"
        )

    def withdraw(self) -> Event:
        """Withdraw until the others can be reached again: `waited` or `out_of_time`."""
        if self._membership.requests.is_out_of_time():
            return {"event": "out_of_time", "reason": "this member and the others cannot reach each other"}
        self._driver.waiting()
        self._membership.requests.withdraw(WITHDRAW_SECONDS)
        return {"event": "waited"}

    def connect(self, epoch: int, generation: int, members: list[str], num_trainers: int) -> Event:
        """Connect a new group: `connected`."""
        self._membership.trainer_group.drop("the membership has changed")
        self._driver.interrupt()
        self._driver.connecting()
        at = self._membership
        at.connect(epoch, members, num_trainers)
        at.failure_detector.activity.reports.connect(at.id, dist.PrefixStore("hangs", at.store))
        at.requests.end_agreement()
        return {"event": "connected"}

    def farewell(self, version: int) -> Event:
        """End the job with all members: `parted`."""
        self._membership.failure_detector.end_watch()  # the first to be done leaves
        return self._driver.farewell(version)

    def recall(self, vote: dict[str, Any] | None) -> Event:
        """Gather the latest passed vote of every member: `recalled`."""
        self._driver.interrupt()
        return {"event": "recalled", "votes": gather_json(self._membership.everyone, vote)}
