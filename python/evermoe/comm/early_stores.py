"""Connections to the stores of members outside this member's group, made before they are needed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from evermoe._native import Secret
from evermoe.comm.endpoint import Endpoint
from evermoe.comm.reachability import Reachability, Stores
from evermoe.comm.task import Task, run_in_thread

logger = logging.getLogger(__name__)


class EarlyStores(Stores):
    """Stores whose clients a background thread connects early: those of a spare to the members, and the reverse.

    A recovery in which a spare joins is then shorter: a client of torch's store costs a connection and a reverse
    look-up of the host's name, and the next group may meet in the store of either side. A connection that fails here is
    made again when it is needed.

    Args:
        place, limit, secret: see `Stores`.
        reach: probes members.
    """

    def __init__(self, place: Endpoint, limit: timedelta, secret: Secret | None, reach: Reachability) -> None:
        super().__init__(place, limit, secret)
        self._reach = reach
        self._task: Task[None] | None = None
        self._tried: set[str] = set()
        self.connected: set[str] = set()
        """Ids of the members that are connected and have answered a probe of this one."""

    def connect_new(self, reports: Mapping[str, Mapping[str, Any]]) -> bool:
        """Connect to new members in the background; return whether no such connection is in progress.

        Args:
            reports: the members' reports, by id.
        """
        if self._task is not None and not self._task.is_over_within(0):
            return False
        new = {each: data for each, data in reports.items() if each not in self._tried}
        self._tried.intersection_update(reports)
        self.connected.intersection_update(reports)
        if not new:
            return True
        self._tried |= new.keys()
        self._task = Task(lambda: self._connect(new))
        run_in_thread(self._task, "evermoe-early-clients", ())
        return False

    def _connect(self, new: Mapping[str, Mapping[str, Any]]) -> None:
        silent = self._reach.find_silent({each: data["probe_address"] for each, data in new.items()})
        for each in silent:
            logger.warning(
                "%s at %s does not answer this member, which could not join its group", each, new[each]["probe_address"]
            )
        for each in new.keys() - set(silent):
            try:
                self.store_at(new[each]["store"])
            except (RuntimeError, TimeoutError, ConnectionError) as error:
                logger.info("no early connection to %s: %s", each, str(error).split("\n", 1)[0])
            else:
                self.connected.add(each)
