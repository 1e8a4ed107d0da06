"""Connections to the stores of members that are not in this member's group, made before they are needed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from evermoe._native import Secret
from evermoe.comm.reachability import Endpoint, Reachability, Stores
from evermoe.comm.task import Task, run_beside

logger = logging.getLogger(__name__)


class EarlyStores(Stores):
    """Stores that connect a spare and the members in a thread, so that the recovery in which they meet need not.

    The store of either may be the one in which the next group meets. A client of torch's store costs a connection and a
    reverse look-up of the host's name. Nothing here has to succeed: what is missing is connected when it is needed.

    Args:
        place, limit, secret: as of `Stores`.
        reach: finds out whether members answer probes.
    """

    def __init__(self, place: Endpoint, limit: timedelta, secret: Secret | None, reach: Reachability) -> None:
        super().__init__(place, limit, secret)
        self._reach = reach
        self._task: Task[None] | None = None
        self._tried: set[str] = set()
        self.connected: set[str] = set()
        """Ids of the members to which there is a connection, and which have answered here."""

    def connect(self, told: Mapping[str, Mapping[str, Any]]) -> bool:
        """Connects to those that are new, beside what this thread does; returns whether nothing is under way.

        Args:
            told: what members have told, by id.
        """
        if self._task is not None and not self._task.is_over_within(0):
            return False
        new = {each: data for each, data in told.items() if each not in self._tried}
        self._tried.intersection_update(told)
        self.connected.intersection_update(told)
        if not new:
            return True
        self._tried |= new.keys()
        self._task = Task(lambda: self._connect(new))
        run_beside(self._task, "evermoe-early-clients", ())
        return False

    def _connect(self, new: Mapping[str, Mapping[str, Any]]) -> None:
        silent = self._reach.silent({each: data["probe_address"] for each, data in new.items()})
        for each in silent:
            logger.warning(
                "%s at %s does not answer here, so its group could not be joined", each, new[each]["probe_address"]
            )
        for each in new.keys() - set(silent):
            try:
                self.get(new[each]["store"])
            except (RuntimeError, TimeoutError, ConnectionError) as error:
                logger.info("no early connection to %s: %s", each, str(error).split("\n", 1)[0])
            else:
                self.connected.add(each)
