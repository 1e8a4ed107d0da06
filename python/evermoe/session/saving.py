"""Checkpoints as a session's steps and its script ask for them."""

from __future__ import annotations

from pathlib import Path

from evermoe.checkpoint.checkpointer import Checkpointer
from evermoe.comm.group import Group
from evermoe.copies.loss_ledger import LossLedger
from evermoe.errors import PeerLost
from evermoe.process.warn import warn
from evermoe.state.version import step_of


class Saving:
    """Writes checkpoints, and records in the ledger which tokens they contain. A lost member ends none of the calls.

    Args:
        checkpointer: of the session.
        ledger: of the tokens at risk.
        group: the members that train. It is dropped if one is lost meanwhile: the session then recovers.
    """

    def __init__(self, checkpointer: Checkpointer, ledger: LossLedger, group: Group) -> None:
        self._checkpointer, self._ledger, self._group = checkpointer, ledger, group

    def begin_if_scheduled(self, version: int) -> None:
        """Begin the checkpoint of `version` if one is scheduled for its step. It is written in the background."""
        try:
            if self._checkpointer.begin_if_due(version):
                self._ledger.record_checkpoint(version)
        except PeerLost as lost:
            warn_unwritten(version, lost)

    def save(self, version: int, path_or_name: str | Path | None) -> str | None:
        """Write a checkpoint of `version` and wait for it; None if a member was lost meanwhile. Collective."""
        try:
            path = self._checkpointer.save(version, path_or_name)
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
