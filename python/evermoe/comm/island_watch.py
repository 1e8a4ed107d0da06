"""Ends the waits in an island's own groups once one of its processes is lost.

After a loss a session's step runs to its end, with the collectives of FSDP2 that the other processes of the island
make, too. If one of these is lost, such a collective may wait for a long time: NCCL learns of no loss, and gloo of no
process that is stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from evermoe.comm.island import Island
from evermoe.comm.reachability import Reachability
from evermoe.comm.torch_groups import interrupt_torch_groups

PAUSE_SECONDS = 0.2
"""Time between two probes."""
SLOW_SECONDS = 30.0
"""Time after a loss in which processes of the island that answer may be slow to ask the Lighthouse."""


class IslandWatch:
    """Probes the other processes of an island while the session's group is broken. Link it to that group.

    Args:
        island: place of this process in it.
        reach: probes members.
        limit: seconds without an answer after which a process is lost.
    """

    def __init__(self, island: Island, reach: Reachability, limit: float) -> None:
        self.island, self._reach, self._limit = island, reach, limit
        self._others: dict[str, str] = {}
        self._broken_at = 0.0
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Held to begin and to end, as any thread may drop the group."""

    @classmethod
    def of(cls, island: Island | None, reach: Reachability, limit: float) -> IslandWatch | None:
        """Return the watch of an island; None without one."""
        return None if island is None else cls(island, reach, limit)

    def connect(self, members: list[tuple[str, str]], rank: int) -> None:
        """Stop to probe: the session's group is connected again.

        Args:
            members: each member and the address of its probe server, in the order of ranks.
            rank: of this member.
        """
        self.end()
        first = rank - self.island.position
        own = members[first : first + self.island.size]
        self._others = dict(own[: self.island.position] + own[self.island.position + 1 :])
        self._is_over = threading.Event()

    def drop_alone(self, reason: str) -> None:
        """Begin to probe, as the session's group is broken."""
        with self._lock:
            if self._others and self._thread is None and not self._is_over.is_set():
                self._broken_at = time.monotonic()
                self._thread = threading.Thread(
                    target=self._probe, args=[self._is_over], name="evermoe-island", daemon=True
                )
                self._thread.start()

    def awaits_slow(self, named: Collection[str]) -> bool:
        """Return whether a process of the island answers that is not in a set of the Lighthouse, and may still ask.

        The Lighthouse may name a set early, without a member that is slow to ask after a loss.

        Args:
            named: members of the set.
        """
        absent = {member: address for member, address in self._others.items() if member not in named}
        is_soon = time.monotonic() - self._broken_at < SLOW_SECONDS
        return is_soon and bool(absent) and len(self._reach.find_silent(absent)) < len(absent)

    def end(self) -> None:
        """Stop to probe."""
        with self._lock:
            self._is_over.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _probe(self, is_over: threading.Event) -> None:
        answered = time.monotonic()
        while not is_over.wait(PAUSE_SECONDS):
            if not self._reach.find_silent(self._others):
                answered = time.monotonic()
            elif time.monotonic() - answered > self._limit:
                interrupt_torch_groups()
                return
