"""Copies of a pipeline's stages on other ranks: one version at a time on its way."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from evermoe.comm.courier import Courier
from evermoe.comm.membership import Membership
from evermoe.errors import CorruptCopy, PeerLost
from evermoe.events import Listener
from evermoe.profile.memory import share_of_host_bytes
from evermoe.snapshot.gpu_sources import GpuSources
from evermoe.snapshot.page_locks import PageLocks
from evermoe.snapshot.round import SnapshotRound
from evermoe.snapshot.store import MOST_TRIES, SnapshotStore
from evermoe.state.stored import KeptCopies
from evermoe.train.pipeline_config import PipelineConfig
from evermoe.train.sparse_windows import SparseWindows
from evermoe.train.stages import Seat, stage_bundles


class StageCopies:
    """Makes them, in the courier's thread.

    Args:
        options: of the pipeline.
        store: this node's arenas.
        membership: all ranks.
        windows: of sparse versions.
        courier: sends and receives.
        emit: of the session.
    """

    def __init__(
        self,
        options: PipelineConfig,
        store: SnapshotStore,
        membership: Membership,
        windows: SparseWindows,
        courier: Courier,
        emit: Listener,
    ) -> None:
        self._options, self._store, self._membership, self._windows = options, store, membership, windows
        self._courier, self._emit = courier, emit
        self._group = membership.trainer_group
        store.sources = GpuSources(options.snapshot_memory)
        self._page_locks = PageLocks()
        self._round: SnapshotRound | None = None
        self.version: int | None = None
        """The version that is on its way, or has come last; of a sparse one that of its first slice. None: there is
        none."""

    def protect(self, seats: Sequence[Seat], version: int, generation: int, copies: KeptCopies) -> None:
        """Copies all units as of `version` to holders that lack them; on return the copies are whole everywhere.

        Collective. Ranks of a running job that have too little memory keep what has room, and warn.

        Args:
            seats: by rank.
            version: of the state now.
            generation: of the ranks.
            copies: those that holders have already, which are forgotten.

        Raises:
            PeerLost: a rank was lost meanwhile.
            CorruptCopy: copies did not match their digests several times in a row.
        """
        bundles = self._windows.arrange(stage_bundles(self._options.preset, seats, self._options.copies))
        try:
            self._store.replace_arenas(bundles, generation, self._membership, copies)
            self._page_locks.lock(self._store, share_of_host_bytes(self._membership.nodes, self._group.rank))
            for at, due in self._windows.first_copies(version):
                self._make(at, due, copies)
        finally:
            copies.forget()  # their memory is free once the arenas of before are gone
        self.forget()
        self._windows.protected()
        self._store.prune(generation)

    def _make(self, version: int, due: Collection[int] | None, copies: KeptCopies) -> None:
        for _ in range(MOST_TRIES):
            self._round = SnapshotRound(self._store, version, self._courier, due, self._emit, copies).start()
            if not self._courier.wait(self._round.task, self._group):
                raise PeerLost(self._round.task.lost or "the group was dropped")
            is_whole = float(bool(self._round.task.result))
            if float(self._group.all_reduce(torch.tensor([is_whole]))) == self._options.size:
                return
            copies.forget()  # those of before may be what is damaged
        raise CorruptCopy("copies arrive with other bytes than were sent, three times in a row: check the network")

    def begin(self, version: int) -> None:
        """Begins to copy the state, which is that of `version`; of a sparse version the first slice."""
        self.version = version
        self.proceed(version)

    def proceed(self, version: int) -> None:
        """Begins to copy what is due of the state after one more step, which is that of `version`: the next slice."""
        if self.version is None:
            return
        due = self._windows.due(version - self.version)
        self._round = SnapshotRound(self._store, version, self._courier, due, self._emit).start()

    def wait(self) -> bool:
        """Waits for the version that is on its way; whether it is whole here."""
        if self._round is None:
            return True
        is_done = self._courier.wait(self._round.task, self._group)
        return is_done and bool(self._round.task.result)

    def wait_captured(self) -> None:
        """Waits until the state may be changed."""
        if self._round is not None:
            self._round.wait_captured()

    def forget(self) -> None:
        """No version is on its way any more."""
        self._round = self.version = None
