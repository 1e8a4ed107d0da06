"""The wait for units that are in no member's memory.

Their holders may be on their way back: a process that has ended is started again by its launcher, within
`rejoin_timeout`. A holder that lives, and cannot be reached, is waited for longer, up to `quorum_timeout`: a cut heals,
and nothing is lost then. Two things show that a holder lives:

* the Lighthouse has named it lately, together with members that it cannot reach;
* its host accepts a connection to its probe server: its process is stopped, or stays away from the group.

Members agree again meanwhile, as nothing else shows that a holder has come back: at first soon, then less often.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from evermoe.comm.membership import MembershipManager
from evermoe.comm.reachability import CUT_OFF_SECONDS, REACH_SECONDS, kinds_of_loss
from evermoe.config.membership import Membership
from evermoe.errors import LostExperts

logger = logging.getLogger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.2, 2.0
"""Seconds between two agreements: each pause is twice the previous one. A member that the others cannot reach asks the
Lighthouse from time to time. It waits for the others for the Lighthouse's join timeout, which is longer."""


class MissingUnits:
    """Waits for units, as long as the options say and their holders live.

    Args:
        membership: knows the members.
        options: limits.
    """

    def __init__(self, membership: MembershipManager, options: Membership) -> None:
        self._membership, self._options = membership, options
        self._since = math.inf
        """Time since which some units are missing; infinite when none are."""
        self._pause = FIRST_PAUSE
        self._group: dict[str, Mapping[str, Any]] = {}
        """Data of the members of the latest group that trained, by id."""
        self._living: dict[str, str] = {}
        """Reason why each living member of that group is absent, by id."""
        self._connected: dict[str, float] = {}
        """Time of the latest connection to the probe server of each absent member, by id."""
        self._has_said = False
        self._is_paused = False

    @property
    def are_awaited(self) -> bool:
        """Whether members agree repeatedly, as some units are missing."""
        return self._since < math.inf

    @property
    def is_patient(self) -> bool:
        """Whether this member would still wait for holders that may have ended."""
        limit = self._options.rejoin_timeout
        return limit > 0 and time.monotonic() < self._since + limit

    @property
    def live(self) -> bool:
        """Whether this member knows of holders that live, and would still wait for them."""
        is_in_time = time.monotonic() < self._since + self._options.quorum_timeout
        return self._options.rejoin_timeout > 0 and is_in_time and bool(self._living)

    def look(self) -> None:
        """Find out at the start of a recovery which absent members of the latest group are alive."""
        if not self.are_awaited:
            return
        here, reach, now = self._membership.members, self._membership.reach, time.monotonic()
        absent = {member: about["probe_address"] for member, about in self._group.items() if member not in here}
        left = kinds_of_loss(absent, REACH_SECONDS)
        self._connected |= {member: now for member, kind in left.items() if kind == "hung"}
        self._living = {}
        for member in (each for each in absent if left[each] != "process"):
            if now < self._connected.get(member, -math.inf) + CUT_OFF_SECONDS:
                self._living[member] = "its process is stopped, or does not take part"
            elif reach.is_cut_off(member):
                self._living[member] = "the network between them is cut"

    def found(self) -> None:
        """Begin to wait, as some units are in no member's memory."""
        if not self.are_awaited:
            self._since = time.monotonic()
        if self._living and not self._has_said:
            self._has_said = True
            logger.warning(
                "some units are in no member's memory, but their holders live: %s. Waiting for them, up to "
                "quorum_timeout = %g s",
                self._names(),
                self._options.quorum_timeout,
            )

    def wait(self) -> None:
        """Wait before the members agree again."""
        self._is_paused = True
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, LAST_PAUSE)

    def continues(self) -> bool:
        """Whether members agree again because of missing units: the same loss, and the same recovery."""
        was_paused, self._is_paused = self._is_paused, False
        return self.are_awaited and was_paused

    def over(self) -> None:
        """End the wait: the members have all units, and train."""
        self._since, self._pause, self._has_said = math.inf, FIRST_PAUSE, False
        self._group, self._living, self._connected = dict(self._membership.members), {}, {}

    def explained(self, lost: LostExperts) -> LostExperts:
        """Return the error of a wait in vain; it names holders that live."""
        if not self._living:
            return lost
        return LostExperts(
            f"{lost} These members live and were waited for, for quorum_timeout = {self._options.quorum_timeout:g} s: "
            f"{self._names()}. Repair the network or continue their processes, then start the job again",
            lost.units,
        )

    def _names(self) -> str:
        return ", ".join(
            f"{member} at {self._group[member]['probe_address']} ({why})"
            for member, why in sorted(self._living.items())
        )
