"""Keeper of a pipeline's stages: one version at a time is sent to other ranks, or a slice of one in each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

from evermoe.comm.membership import MembershipManager
from evermoe.copies.first_copies import FirstCopies
from evermoe.copies.snapshot.rounds import Rounds
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.copies.snapshot.window_plan import WindowPlanner
from evermoe.events.base_event import Listener
from evermoe.pipeline.chosen_experts import ChosenExperts
from evermoe.pipeline.pipeline_config import PipelineConfig
from evermoe.pipeline.sparse_windows import SparseWindows
from evermoe.pipeline.stage_replay import StageReplay
from evermoe.pipeline.stages import StageRank, stage_bundles
from evermoe.recovery.survey import SNAPSHOT
from evermoe.state.keeper import CopyMaker
from evermoe.state.stored import NO_COPIES, KeptCopies, StoredUnit


class StageCopies(CopyMaker):
    """Makes copies of a stage.

    Args:
        options: of the pipeline.
        store: this node's arenas.
        membership: all ranks.
        windows: of sparse versions.
        experts: chooses those that are copied.
        replay: chooses the bundles that are sent as steps.
        planner: plans when they are sent.
        rounds: copies versions.
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
        rounds: Rounds,
        emit: Listener,
    ) -> None:
        self._options, self.store, self._membership, self._windows = options, store, membership, windows
        self._experts, self.replay, self._planner, self._rounds = experts, replay, planner, rounds
        self.first = FirstCopies([self], membership, emit)
        """The copies that a recovery makes."""
        self.version: int | None = None
        """The version that is being sent, or was sent last; of a sparse one the version of its first slice."""
        self._copies, self._generation, self._protected = NO_COPIES, 0, 0
        """Copies from before a recovery; generation and version of its own."""
        self._left: deque[tuple[int, Collection[int] | None]] = deque()
        """Versions that are still to be copied of those that the recovery copies, with their bundles."""
        self._stays: Collection[int] = ()
        """Numbers of the bundles that stay with their primaries in that version."""

    # ---- first copies

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
        self.first.drop_earlier_copies()
        self._windows.apply_choice(layout)
        planned = stage_bundles(self._options.copies.name, layout, self._options.copies.replication)
        bundles = self._windows.arrange(self.replay.arrange(self._experts.arrange(planned), layout))
        self._copies, self._generation, self._protected = copies, generation, version
        in_background = self.first.begin_plan(
            copies, waits=waits or self._windows.are_used, has_room=not self.first.failed
        )
        kept = self._rounds.replace_arenas(bundles, generation, copies, in_background=in_background)
        self._experts.keep(kept)
        self.replay.keep(kept, self._membership.everyone.rank, version)
        if self.first.may_arrive_later:
            self.version, self._stays = version, ()
            self.first.begin_copies(version)
            return False
        self.first.make_copies(version, makes_any=True)
        self.forget_version()
        self._windows.protected()
        self.drop_previous()
        return True

    def protect_all(self, version: int) -> None:
        """Begin to make the copies of a recovery; those of a window's slices are made one after the other."""
        self._left = deque(self._windows.first_copies(version))
        self._rounds.begin(*self._left.popleft(), self._copies)

    def wait_for_copies(self) -> bool:
        """Wait for the version that is being sent. Return whether it is complete on this rank."""
        is_complete = self._rounds.wait_complete()
        while is_complete and self._left:
            self._rounds.begin(*self._left.popleft(), self._copies)
            is_complete = self._rounds.wait_complete()
        return is_complete

    @property
    def problem(self) -> str:  # type: ignore[override]
        """Why copies are incomplete although no rank is lost: this host has too little memory."""
        return self._rounds.problem

    @property
    def lost(self) -> str | None:
        """Why the version that is being sent will not be complete: a rank is lost."""
        return self._rounds.lost

    def drop_previous(self) -> None:
        """Drop the copies from before the recovery: all ranks have reported that the new ones are complete."""
        self.first.finish_plan()
        if self._generation:
            self._experts.protected(self._protected)
            self._windows.choice.settle()
            self.store.state.retained.release()
            self.store.prune(self._generation)
            self._copies, self._generation = NO_COPIES, 0

    # ---- versions

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
        contents = self.replay.begin(version, self._stays)
        self._planner.prepare_version(self._stays, contents.nbytes)
        due = self._windows.due(version - self.version)
        self._rounds.begin(version, due, stays=self._stays, contents=contents)

    def before_vote(self, step: int) -> bool:
        """Wait for the version that is being sent. Return whether it is complete on this rank."""
        return not self.first.failed if self._rounds.current is None else self.first.have_arrived()

    def before_update(self) -> None:
        """Wait until the version is captured, so that the state may change."""
        self._rounds.wait_captured()

    def forget_version(self) -> None:
        """Forget the version that was sent."""
        self._rounds.current = self.version = None

    def settle(self) -> bool:
        """Wait until nothing is in flight. Return whether the version that was being sent is complete on this rank."""
        self._left.clear()
        self.before_update()
        is_complete = self.before_vote(0)
        self.forget_version()
        return is_complete

    def stored(self) -> Iterator[tuple[StoredUnit, str]]:
        """Yield every version of every unit in this node's memory, as the recovery in progress uses it."""
        return ((found, SNAPSHOT) for found in self._windows.stored())

    def close(self) -> None:
        """Leave the optimizer to the script. Nothing may be in flight."""
        self.replay.end()
