"""Reports of members about what they do while others wait for them, in the store of their group.

A member that has computed, or waited in a collective, for half of `hang_timeout` writes a report: the stacks of its
threads, or the collective. If the wait ends in vain, the others log these reports. So the log of a member that
continues has the stacks of one that hangs on another host, and names collectives that do not match. A process writes
none while it is stopped, or while a call holds the interpreter's lock.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from evermoe.comm.group import Group

logger = logging.getLogger(__name__)

LONG = 0.5
"""Time of a wait or a computation, in hang timeouts, after which a member reports it."""
STORE_SECONDS = 2.0
"""Most seconds for which the reports of others are awaited: their store may be lost."""
MAX_STACKS = 16_000
"""Largest number of characters of a report's stacks; the training thread's come first."""

Report = dict[str, Any]


class HangReports:
    """Writes this member's reports, and logs those of others.

    Args:
        groups: in which this member may wait for others.
        hang_timeout: seconds that a collective waits.
    """

    def __init__(self, groups: Sequence[Group], hang_timeout: float) -> None:
        self._groups, self._limit = groups, LONG * hang_timeout
        self._store: dist.Store | None = None
        self._member = ""
        self._computes_since: float | None = None
        self._written: tuple[float | None, int] | None = None
        """Identifies what the latest report is about."""

    def connect(self, member: str, store: dist.Store) -> None:
        """Begin with the members of a new group: the id of this one, and their store."""
        self._member, self._store, self._written = member, store, None

    def note(self, *, computes: bool) -> None:
        """Record that this member begins to compute, or to wait."""
        self._computes_since = time.monotonic() if computes else None

    def write_long(self) -> None:
        """Write a report if what this member does takes long, once; called by a thread of its own."""
        store, since = self._store, self._computes_since
        waiting = next((group for group in self._groups if group.waiting is not None), None)
        collective = (waiting or self._groups[0]).begun
        about = since, collective.count
        if store is None or about == self._written or self._groups[0].broken is not None:
            return
        if waiting is not None and (began := waiting.waiting) is not None:
            seconds, is_waiting = time.monotonic() - began, True
        elif since is not None:
            seconds, is_waiting = time.monotonic() - since, False
        else:
            return
        if seconds < self._limit:
            return
        self._written = about
        report = {"waits": is_waiting, "seconds": round(seconds, 1), "collective": str(collective)}
        report["stacks"] = "" if is_waiting else stacks()
        _in_background(lambda: store.set(self._member, json.dumps(report)))

    def log_reports(self, late: Sequence[str], members: Sequence[str]) -> None:
        """Log the reports of late members, and collectives that do not match.

        Args:
            late: ids of the members for which this one has waited in vain.
            members: ids of all other members.
        """
        reports = self._read(members)
        for each in late:
            report = reports.get(each)
            if report is not None and not report["waits"]:
                logger.warning(
                    "%s computed for %.3g s after %s. Its threads then:\n%s",
                    each,
                    report["seconds"],
                    report["collective"] or "the step had begun",
                    report["stacks"],
                )
        waits = {each: report["collective"] for each, report in reports.items() if report["waits"]}
        if len(set(waits.values())) > 1:
            named = "; ".join(f"{each} in {collective}" for each, collective in sorted(waits.items()))
            logger.warning("members waited in different collectives: %s", named)

    def _read(self, members: Sequence[str]) -> Mapping[str, Report]:
        """Return the reports of this member and others, by id; empty if their store does not answer."""
        store, found = self._store, dict[str, Report]()
        if store is None:
            return found

        def read() -> None:
            for each in (self._member, *members):
                if store.check([each]):
                    found[each] = json.loads(store.get(each))

        _in_background(read).join(STORE_SECONDS)
        return dict(found)


def stacks() -> str:
    """Return the stacks of all Python threads of this process, the main thread's first; of evermoe's their latest."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = names.get(ident, str(ident))
        if ident != threading.get_ident():
            calls = traceback.format_stack(frame, limit=1 if name.startswith("evermoe-") else None)
            parts.append(f"  thread {name}:\n" + "".join(calls))
    return "".join(parts)[:MAX_STACKS]


def _in_background(work: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        with suppress(RuntimeError, ValueError):  # the store is lost, and its members with it
            work()

    thread = threading.Thread(target=run, name="evermoe-hangs", daemon=True)
    thread.start()
    return thread
