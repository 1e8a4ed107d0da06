"""Copies of a pipeline's stages on other ranks: one version at a time on its way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evermoe.comm.courier import Courier
from evermoe.comm.membership import Membership
from evermoe.errors import CorruptCopy, PeerLost
from evermoe.events import Listener
from evermoe.snapshot.round import SnapshotRound
from evermoe.snapshot.store import MOST_TRIES, SnapshotStore
from evermoe.state.stored import KeptCopies
from evermoe.train.pipeline_config import PipelineConfig
from evermoe.train.stages import Seat, stage_bundles


class StageCopies:
    """Makes them, in the courier's thread.

    Args:
        options: of the pipeline.
        store: this node's arenas.
        membership: all ranks.
        courier: sends and receives.
        emit: of the session.
    """

    def __init__(
        self,
        options: PipelineConfig,
        store: SnapshotStore,
        membership: Membership,
        courier: Courier,
        emit: Listener,
    ) -> None:
        self._options, self._store, self._membership = options, store, membership
        self._courier, self._emit = courier, emit
        self._group = membership.trainer_group
        self._round: SnapshotRound | None = None

    @property
    def version(self) -> int | None:
        """The version that is on its way, or has come last; None if there is none."""
        return None if self._round is None else self._round.version

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
        bundles = stage_bundles(self._options.preset, seats, self._options.copies)
        try:
            self._store.replace_arenas(bundles, generation, self._membership, copies)
            self._make(version, copies)
        finally:
            copies.forget()  # their memory is free once the arenas of before are gone
        self._round = None
        self._store.prune(generation)

    def _make(self, version: int, copies: KeptCopies) -> None:
        for _ in range(MOST_TRIES):
            self._round = SnapshotRound(self._store, version, self._courier, emit=self._emit, copies=copies).start()
            if not self._courier.wait(self._round.task, self._group):
                raise PeerLost(self._round.task.lost or "the group was dropped")
            is_whole = float(bool(self._round.task.result))
            if float(self._group.all_reduce(torch.tensor([is_whole]))) == self._options.size:
                return
            copies.forget()  # those of before may be what is damaged
        raise CorruptCopy("copies arrive with other bytes than were sent, three times in a row: check the network")

    def begin(self, version: int) -> None:
        """Begins to copy the state, which is that of `version`."""
        self._round = SnapshotRound(self._store, version, self._courier, emit=self._emit).start()

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
        self._round = None
