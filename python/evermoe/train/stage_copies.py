"""Copies of a pipeline's stages on other ranks: one version at a time on its way."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from evermoe.comm.courier import Courier
from evermoe.comm.membership import MembershipManager
from evermoe.errors import CorruptCopy, PeerLost
from evermoe.events import Listener
from evermoe.profile.memory import share_of_host_bytes
from evermoe.snapshot.gpu_sources import GpuSources
from evermoe.snapshot.page_locks import PageLocks
from evermoe.snapshot.round import SnapshotRound
from evermoe.snapshot.store import MAX_TRIES, SnapshotStore
from evermoe.state.stored import KeptCopies
from evermoe.train.chosen_experts import ChosenExperts
from evermoe.train.pipeline_config import PipelineConfig
from evermoe.train.repeated_round import RepeatedRound
from evermoe.train.sparse_windows import SparseWindows
from evermoe.train.stage_replay import StageReplay
from evermoe.train.stages import StageRank, stage_bundles


class StageCopies:
    """Makes them, in the courier's thread.

    Args:
        options: of the pipeline.
        store: this node's arenas.
        membership: all ranks.
        windows: of sparse versions.
        experts: says which of them are copied.
        replay: says what travels as steps.
        courier: sends and receives.
        emit: of the session.
    """

    def __init__(
        self,
        options: PipelineConfig,
        store: SnapshotStore,
        membership: MembershipManager,
        windows: SparseWindows,
        experts: ChosenExperts,
        replay: StageReplay,
        courier: Courier,
        emit: Listener,
    ) -> None:
        self._options, self._store, self._membership, self._windows = options, store, membership, windows
        self._experts, self._replay, self._courier, self._emit = experts, replay, courier, emit
        self._group = membership.trainer_group
        store.sources = GpuSources(options.snapshot_memory)
        self._page_locks = PageLocks()
        self._round: SnapshotRound | None = None
        self.version: int | None = None
        """The version that is on its way, or has come last; of a sparse one that of its first slice. None: there is
        none."""
        self._before: tuple[KeptCopies, int, int] | None = None
        """Copies of before a recovery, until its own are whole; the generation of these, and their version."""
        self._failed = False
        """Whether copies came damaged or found no room, and have not been whole since."""
        self._stays: Collection[int] = ()
        """Numbers of the bundles that stay with their primaries in that version."""

    def protect(
        self, seats: Sequence[StageRank], version: int, generation: int, copies: KeptCopies, *, waits: bool
    ) -> bool:
        """Copies all units as of `version` to holders that lack them; says whether the copies are whole on return.

        Else they are on their way beside the next step, whose vote waits for them, and those of before stay until it
        has passed; the same on all ranks. Training waits where there is no room for both, where copies came damaged
        before, and for sparse versions. Collective. Ranks of a running job that have too little memory keep what has
        room, and warn.

        Args:
            seats: by rank.
            version: of the state now.
            generation: of the ranks.
            copies: those that holders have already, which are forgotten once the new ones are whole.
            waits: whether they must be whole on return.

        Raises:
            PeerLost: a rank was lost meanwhile.
            CorruptCopy: copies did not match their digests several times in a row.
        """
        self._drop_before()
        self._windows.change(seats)
        planned = stage_bundles(self._options.preset, seats, self._options.copies)
        bundles = self._windows.arrange(self._replay.arrange(self._experts.arrange(planned), seats))
        must_wait = waits or self._windows.are_used or self._failed
        is_beside = not self._group.all_reduce(torch.tensor([int(must_wait)]))
        self._before = copies, generation, version
        is_on_gpu = any(device.type == "cuda" for device in self._store.state.devices())
        reserves = is_on_gpu or not is_beside  # the driver page-locks what is there
        kept = self._store.replace_arenas(bundles, generation, self._membership, copies, reserves=reserves)
        self._experts.keep(kept)
        self._replay.keep(kept, self._group.rank, version)
        self._page_locks.lock(self._store, share_of_host_bytes(self._membership.nodes, self._group.rank))
        if is_beside and copies:
            self.version, self._stays = version, ()
            self._round = SnapshotRound(self._store, version, self._courier, None, self._emit, copies).start()
            return False
        for at, due in self._windows.first_copies(version):
            self._make(at, due, copies)
        self.forget()
        self._windows.protected()
        self.arrived()
        return True

    def arrived(self) -> None:
        """The copies that are due are whole everywhere, as all have said: those of before the recovery are dropped."""
        self._failed = False
        if self._before is not None:
            _, generation, version = self._before
            self._experts.protected(version)
            self._windows.choice.settle()
            self._drop_before()
            self._store.prune(generation)

    def _drop_before(self) -> None:
        """Forgets what holders have had already; its memory is free once the arenas of before are gone."""
        if self._before is not None:
            self._before[0].forget()
            self._before = None

    def _make(self, version: int, due: Collection[int] | None, copies: KeptCopies) -> None:
        for _ in range(MAX_TRIES):
            self._round = SnapshotRound(self._store, version, self._courier, due, self._emit, copies).start()
            if not self._courier.wait(self._round.task, self._group):
                raise PeerLost(self._round.task.lost or "the group was dropped")
            is_whole = float(bool(self._round.task.result))
            if float(self._group.all_reduce(torch.tensor([is_whole]))) == self._options.size:
                return
            copies.forget()  # those of before may be what is damaged
        raise CorruptCopy("copies arrive with other bytes than were sent, three times in a row: check the network")

    def begin(self, version: int) -> None:
        """Begins to copy the state, which is that of `version`; of a sparse version the first slice. Collective.

        Raises:
            PeerLost: a rank is gone.
        """
        self._stays = self._experts.choose(version)
        self.version = version
        self.proceed(version)

    def proceed(self, version: int) -> None:
        """Begins to copy what is due of the state after one more step, which is that of `version`: the next slice."""
        if self.version is None:
            return
        due = self._windows.due(version - self.version)
        sent = self._replay.begin(version, self._stays)
        self._round = RepeatedRound(
            self._store, version, self._courier, due, self._emit, stays=self._stays, sent=sent
        ).start()

    def wait(self) -> bool:
        """Waits for the version that is on its way; whether it is whole here."""
        if self._round is None:
            return not self._failed
        is_done = self._courier.wait(self._round.task, self._group)
        self._failed = is_done and not self._round.task.result
        return is_done and bool(self._round.task.result)

    @property
    def host_speed(self) -> float:
        """Bytes per second at which the latest version, or slice of one, was captured; 0 before it is."""
        return 0.0 if self._round is None else self._round.host_speed

    def wait_captured(self) -> None:
        """Waits until the state may be changed."""
        if self._round is not None:
            self._round.wait_captured()

    def forget(self) -> None:
        """No version is on its way any more."""
        self._round = self.version = None
