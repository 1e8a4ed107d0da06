"""Copies of a pipeline's stages on other ranks: one version at a time is sent."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from evermoe.comm.courier import Courier
from evermoe.comm.membership import MembershipManager
from evermoe.copies.snapshot.gpu_sources import GpuSources
from evermoe.copies.snapshot.page_locks import PageLocks
from evermoe.copies.snapshot.round import SnapshotRound
from evermoe.copies.snapshot.store import MAX_TRIES, SnapshotStore
from evermoe.copies.snapshot.window_plan import WindowPlanner
from evermoe.errors import CorruptCopy, PeerLost
from evermoe.events import Listener
from evermoe.pipeline.chosen_experts import ChosenExperts
from evermoe.pipeline.pipeline_config import PipelineConfig
from evermoe.pipeline.sparse_windows import SparseWindows
from evermoe.pipeline.stage_replay import StageReplay
from evermoe.pipeline.stages import StageRank, stage_bundles
from evermoe.profile.memory import share_of_host_bytes
from evermoe.state.stored import KeptCopies


class StageCopies:
    """Makes copies, in the courier's thread.

    Args:
        options: of the pipeline.
        store: this node's arenas.
        membership: all ranks.
        windows: of sparse versions.
        experts: chooses those that are copied.
        replay: chooses the bundles that are sent as steps.
        planner: plans when they are sent.
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
        planner: WindowPlanner,
        courier: Courier,
        emit: Listener,
    ) -> None:
        self._options, self._store, self._membership, self._windows = options, store, membership, windows
        self._experts, self._replay, self._planner, self._courier, self._emit = experts, replay, planner, courier, emit
        store.sources = GpuSources(options.versions.snapshot_memory)
        self._page_locks = PageLocks()
        self._round: SnapshotRound | None = None
        self.version: int | None = None
        """The version that is being sent, or was sent last; of a sparse one the version of its first slice."""
        self._before: tuple[KeptCopies, int, int] | None = None
        """Copies from before a recovery until its own are complete; generation and version of the latter."""
        self._failed = False
        """Whether copies arrived damaged or found no room, and have not been complete since."""
        self._stays: Collection[int] = ()
        """Numbers of the bundles that stay with their primaries in that version."""

    def protect(
        self, layout: Sequence[StageRank], version: int, generation: int, copies: KeptCopies, *, waits: bool
    ) -> bool:
        """Copy all units of `version` to holders that lack them. Return whether the copies are complete. Collective.

        Otherwise they are sent in the background of the next step, whose vote waits for them, and the previous copies
        stay until that vote has passed; the same on all ranks. Training waits if there is no room for both, if the
        latest copies arrived damaged, and for sparse versions. Ranks of a running job with too little memory keep the
        copies that have room, and warn.

        Args:
            layout: by rank.
            version: of the state now.
            generation: of the ranks.
            copies: copies that holders have already, which are dropped once the new ones are complete.
            waits: whether they must be complete on return.

        Raises:
            PeerLost: a rank was lost meanwhile.
            CorruptCopy: copies did not match their digests several times in a row.
        """
        self._drop_held()
        self._windows.apply_choice(layout)
        planned = stage_bundles(self._options.copies.name, layout, self._options.copies.replication)
        bundles = self._windows.arrange(self._replay.arrange(self._experts.arrange(planned), layout))
        must_wait = waits or self._windows.are_used or self._failed
        is_background = not self._membership.trainer_group.all_reduce(torch.tensor([int(must_wait)]))
        self._before = copies, generation, version
        is_on_gpu = any(device.type == "cuda" for device in self._store.state.devices())
        reserves = is_on_gpu or not is_background  # the driver page-locks existing memory
        kept = self._store.replace_arenas(bundles, generation, self._membership, copies, reserves=reserves)
        self._experts.keep(kept)
        self._replay.keep(kept, self._membership.trainer_group.rank, version)
        self._page_locks.lock(
            self._store, share_of_host_bytes(self._membership.nodes, self._membership.trainer_group.rank)
        )
        if is_background and copies:
            self.version, self._stays = version, ()
            self._round = SnapshotRound(self._store, version, self._courier, None, self._emit, copies).start()
            return False
        for at, due in self._windows.first_copies(version):
            self._make(at, due, copies)
        self.forget_version()
        self._windows.protected()
        self.drop_previous()
        return True

    def drop_previous(self) -> None:
        """Drop the copies from before the recovery: all ranks have reported that the new ones are complete."""
        self._failed = False
        if self._before is not None:
            _, generation, version = self._before
            self._experts.protected(version)
            self._windows.choice.settle()
            self._drop_held()
            self._store.prune(generation)

    def _drop_held(self) -> None:
        """Drop the copies that holders had already; their memory is free once the previous arenas are deleted."""
        if self._before is not None:
            self._before[0].forget()
            self._before = None

    def _make(self, version: int, due: Collection[int] | None, copies: KeptCopies) -> None:
        for _ in range(MAX_TRIES):
            self._round = SnapshotRound(self._store, version, self._courier, due, self._emit, copies).start()
            if not self._courier.wait_for_task(self._round.task, self._membership.trainer_group):
                raise PeerLost(self._round.task.lost or "the group was dropped")
            is_complete = float(bool(self._round.task.result))
            if float(self._membership.trainer_group.all_reduce(torch.tensor([is_complete]))) == self._options.size:
                return
            copies.forget()  # the existing copies may be damaged
        raise CorruptCopy("copies arrive with other bytes than were sent, three times in a row: check the network")

    def begin_version(self, version: int) -> None:
        """Begin to copy the state, which has this version; of a sparse version the first slice. Collective.

        Raises:
            PeerLost: a rank is lost.
        """
        self._stays = self._experts.choose(version)
        self.version = version
        self.copy_slice(version)

    def copy_slice(self, version: int) -> None:
        """Begin to copy the next slice of the state, which has this version after one more step."""
        if self.version is None:
            return
        due = self._windows.due(version - self.version)
        contents = self._replay.begin(version, self._stays)
        self._planner.prepare_version(self._stays, contents.nbytes)
        self._round = SnapshotRound(
            self._store, version, self._courier, due, self._emit, stays=self._stays, contents=contents
        ).start()

    def wait_sent(self) -> bool:
        """Wait for the version that is being sent. Return whether it is complete on this rank."""
        if self._round is None:
            return not self._failed
        is_done = self._courier.wait_for_task(self._round.task, self._membership.trainer_group)
        self._failed = is_done and not self._round.task.result
        return is_done and bool(self._round.task.result)

    @property
    def host_speed(self) -> float:
        """Bytes per second at which the latest version, or slice of one, was captured; 0 before the first."""
        return 0.0 if self._round is None else self._round.host_speed

    def wait_captured(self) -> None:
        """Wait until the version is captured, so that the state may change."""
        if self._round is not None:
            self._round.wait_captured()

    def forget_version(self) -> None:
        """Forget the version that was sent."""
        self._round = self.version = None
