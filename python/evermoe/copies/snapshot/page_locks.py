"""Page-locks arenas, so that a GPU writes to them directly and no processor copies its data."""

from __future__ import annotations

import resource

from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.process.warn import warn

MIN_BYTES = 64 << 10
"""Mean size of a bundle's tensors from which each is sent directly; smaller ones are packed first."""


class PageLocks:
    """Page-locks the arenas that this member's GPU fills, each once, for as long as it is mapped.

    If that fails, snapshots use a small page-locked buffer instead, and one warning reports it.
    """

    def __init__(self) -> None:
        self._has_warned = False

    def lock(self, store: SnapshotStore, most_bytes: int | None) -> int:
        """Lock the arenas of a plan. The driver waits for running work, so nothing may be under way.

        Args:
            store: its own arenas are those that this member fills.
            most_bytes: maximum that this member may lock in total; None for no limit.

        Returns:
            Number of bytes that are locked.
        """
        locked = 0
        for kept in store.own:
            tensors = [tensor for each in store.state.tensors(kept.bundle.units) for tensor in each]
            gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
            if gpu is None or sum(tensor.nbytes for tensor in tensors) < MIN_BYTES * len(tensors):
                continue
            nbytes = kept.arena.mapped_bytes
            if most_bytes is not None and locked + nbytes > most_bytes:
                self._warn(
                    nbytes, f"with {locked} bytes before, this member's share of the node's memory is {most_bytes}"
                )
                break
            try:
                kept.arena.page_lock(gpu.index or 0)
            except RuntimeError as error:
                self._warn(nbytes, str(error))
                break
            locked += nbytes
        return locked

    def _warn(self, nbytes: int, reason: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        warn(
            f"{nbytes} bytes of shared memory are not page-locked: {reason}. Snapshots leave the GPU through a buffer, "
            "and a processor copies them once more. If the limit on locked memory is the reason (`ulimit -l`, here "
            f"{allowed}), raise it; in a container, with --ulimit memlock=-1"
        )
