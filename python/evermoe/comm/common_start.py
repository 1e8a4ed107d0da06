"""Agreements of an island's processes to begin a step together.

A process that learns of a loss between two steps must not recover while another one of its island, which does not know
of it yet, begins the next step: that one would wait for it in a collective of FSDP2. So each announces in their store
that it is ready to begin, and waits until all have; one that has lost a peer announces that instead, and does not wait.

    process 0   ready ─ wait ──────────┐ returns False: recovers
    process 1   learns of a loss ─ lost ┘ recovers
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from evermoe.comm.group import Group

GO, LOST = "go", "lost"
FIRST_PAUSE, LAST_PAUSE = 1e-4, 5e-3
"""Seconds between two looks into the store; a wait with a time limit of torch's would log each limit."""


class CommonStart:
    """Starts of steps and evaluations, and results of votes, which the processes of an island have all, or none.

    Args:
        size: processes of the island; 0 without an island, where each process begins alone.
        group: members of the session.
    """

    def __init__(self, size: int, group: Group) -> None:
        self.size, self._group = size, group
        self._store: dist.Store | None = None
        self._keys: Iterator[str] = iter(())
        self._key = ""
        """Key of the next start; the outcome is its value."""
        self._before = ["", ""]
        """Keys of the latest starts, the older one first."""

    @property
    def width(self) -> int:
        """Processes that evaluate the same part: those of an island, or one."""
        return max(1, self.size)

    def connect(self, epoch: int) -> None:
        """Count starts from 0, as the members of an agreement are about to be connected.

        Args:
            epoch: unique name of their groups.
        """
        if not self.size or not dist.is_initialized():
            return
        if self._store is None:
            self._store = dist.PrefixStore("evermoe", c10d._get_default_store())
        self._keys = (f"{epoch:016x}/{number}" for number in itertools.count())
        self._key = next(self._keys)

    def begin(self) -> bool:
        """Wait until all processes of the island are ready; return whether they are.

        If not, one of them has lost a peer, and this member's connections are closed.

        Raises:
            DistError: the island's store is lost.
        """
        if self._store is None:
            return True
        store, key = self._store, self._key
        if store.add(f"{key}/ready", 1) == self.size:
            store.compare_set(key, "", GO)
        self._group.on_wait(True)
        try:
            pause = FIRST_PAUSE
            while not store.check([key]):
                if self._group.broken is not None:
                    store.compare_set(key, "", LOST)
                time.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE)
        finally:
            self._group.on_wait(False)
        begins = store.get(key).decode() == GO
        oldest, self._before = self._before[0], [self._before[1], key]
        for each in (oldest, f"{oldest}/ready") if oldest else ():
            store.delete_key(each)  # all have read it, as they were ready for the next one
        self._key = next(self._keys)
        if not begins:
            self._group.drop("another process of this island has lost a peer")
        return begins

    def lose(self) -> None:
        """Announce that this member has lost a peer, and begins nothing before it is connected again."""
        if self._store is not None:
            self._store.compare_set(self._key, "", LOST)
