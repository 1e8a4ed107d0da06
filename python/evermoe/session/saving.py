"""Checkpoints as a session's steps and its script ask for them, and saves of some units as its preset does."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from evermoe.checkpoint.checkpointer import Checkpointer
from evermoe.checkpoint.unit_saver import UnitSaver
from evermoe.comm.membership import MembershipManager
from evermoe.copies.protection import Protection
from evermoe.errors import PeerLost
from evermoe.events.base_event import Listener
from evermoe.presets import Pec
from evermoe.process.warn import warn
from evermoe.session.session_config import SessionConfig
from evermoe.state.training_state import TrainingState
from evermoe.state.version import step_of


class Saving:
    """Writes checkpoints and saves, and records in the ledger which tokens they contain.

    Except for `restart` and `save_first`, a lost member ends none of the calls.

    Args:
        config: of the session.
        state: this member's units.
        membership: the members that train.
        protection: selects the experts in a save; its ledger counts the tokens at risk.
        emit: called with every published checkpoint.
    """

    def __init__(
        self,
        config: SessionConfig,
        state: TrainingState,
        membership: MembershipManager,
        protection: Protection,
        emit: Listener,
    ) -> None:
        self._selector, self._ledger = protection.selection.selector, protection.ledger
        self._group = membership.trainer_group
        self._own_time = membership.failure_detector.activity.own_time
        self.checkpointer = Checkpointer(config.checkpoints, state, membership, emit)
        """Writes the checkpoints."""
        self.saver: UnitSaver | None = None
        """Saves some units at a time; None if the preset saves none, and on a member that does not train."""
        store, copies = self.checkpointer.store, config.copies
        if store is not None and copies.choices.needs_checkpoint_dir and copies.replication:
            self.saver = UnitSaver(store, state, membership, copies.preset.group(Pec).save_interval)

    # ---- saves of some units

    def restart(self, version: int, generation: int) -> None:
        """Resume with the members of a generation from a version; collective.

        Raises:
            PeerLost: a member is lost.
        """
        self.checkpointer.restart(version, generation)
        if self.saver is not None:
            self._drop(*self.saver.restart(version))

    def _drop(self, version: int, experts: Collection[str]) -> None:
        if experts:
            self._ledger.drop_copies(experts, version)

    def save_first(self, version: int) -> None:
        """Save every unit, and wait for it, unless the store has them; collective.

        Raises:
            PeerLost: a member is lost.
        """
        if self.saver is not None and (experts := self.saver.save_all(version)):
            self._ledger.record_copies(experts, version)

    @property
    def is_save_over(self) -> bool:
        """Whether a save is under way and this member knows its outcome."""
        return self.saver is not None and self.saver.is_over

    def advance_saves(self, version: int, *, is_over: bool) -> None:
        """Begin to save the experts selected next, and all other units, if a save is scheduled for this step.

        Args:
            version: of the current state.
            is_over: whether all members know the outcome of the save under way, which this finishes.
        """
        if self.saver is None:
            return
        try:
            if is_over:
                self._drop(*self.saver.advance())
            with self._own_time.part("checkpoint"):
                begun = self.saver.begin_if_due(version, self._selector.select_to_save)
        except PeerLost as lost:
            self._group.drop(str(lost))
            return
        if begun is not None:
            self._ledger.record_copies(begun, version)

    def before_update(self) -> None:
        """Wait until the state may change."""
        with self._own_time.part("checkpoint"):
            self.checkpointer.before_update()
            if self.saver is not None:
                self.saver.before_update()

    def lag(self, step: int) -> dict[str, int]:
        """Return the steps since the newest checkpoint and the newest save, after `step` steps."""
        return self.checkpointer.lag(step) | ({} if self.saver is None else self.saver.lag(step))

    def close(self) -> None:
        """End the thread that saves units."""
        if self.saver is not None:
            self.saver.close()

    # ---- checkpoints

    def begin_if_scheduled(self, version: int) -> None:
        """Begin the checkpoint of `version` if one is scheduled for its step. It is written in the background."""
        try:
            with self._own_time.part("checkpoint"):
                has_begun = self.checkpointer.begin_if_due(version)
            if has_begun:
                self._ledger.record_checkpoint(version)
        except PeerLost as lost:
            warn_unwritten(version, lost)

    def save(self, version: int, path_or_name: str | Path | None, keep: int | None) -> str | None:
        """Write a checkpoint of `version` and wait for it; None if a member was lost meanwhile. Collective."""
        try:
            with self._own_time.part("checkpoint"):
                path = self.checkpointer.save(version, path_or_name, keep)
        except PeerLost as lost:
            self._group.drop(str(lost))
            warn_unwritten(version, lost)
            return None
        if path_or_name is None:
            self._ledger.record_checkpoint(version)
        return str(path)


def warn_unwritten(version: int, why: Exception) -> None:
    """Warn that a checkpoint was not written."""
    warn(f"the checkpoint of step {step_of(version)} was not written: {why}")
