"""Copies and `state_dict` of a layer whose experts are distributed over the ranks of a job."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from evermoe.comm.group import Group
from evermoe.errors import UnsupportedState
from evermoe.moe import graph_ops
from evermoe.moe.exchange_planner import ExchangePlanner
from evermoe.process.warn import warn

_averages: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[AveragedModel]] = weakref.WeakKeyDictionary()
"""Averages that have a copy of a layer, by layer."""


class PartialExperts(nn.Module):
    """A layer with E experts; this rank holds those in `ids`."""

    ids: list[int]
    num_experts: int
    group: Group
    _name: Tensor
    _planner: ExchangePlanner

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which belongs to no job.

        Raises:
            UnsupportedState: this rank holds only a part of the experts, and a copy could not reach the others; or an
                `AveragedModel` would average other experts' rows than it has copied.
        """
        average = _average_that_copies()
        if average is not None and self.group.is_elastic:
            raise UnsupportedState(
                "torch.optim.swa_utils.AveragedModel copies the experts of this rank, which a session moves: create an "
                "evermoe.optim.EMA(optimizer) before the session, whose averages move with them"
            )
        if len(self.ids) < self.num_experts:
            raise UnsupportedState(
                f"expected a layer with all its {self.num_experts} experts to copy or pickle, got one with "
                f"{len(self.ids)}, those that this rank holds: copy the model before its session begins, or load what "
                "session.full_state_dict() gives into a model of your own"
            )
        if average is not None:
            _averages.setdefault(self, weakref.WeakSet()).add(average)
        return self.__dict__ | {"group": Group(), "_planner": self._planner.copy_without_job()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy and register it, since compiled graphs must see a separate layer."""
        super().__setstate__(state)
        self._name = graph_ops.register(self)  # type: ignore[arg-type]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if len(self.ids) < self.num_experts:
            warn(
                f"state_dict() has {len(self.ids)} of the {self.num_experts} experts of layer "
                f"{prefix.removesuffix('.') or 'Experts'}: those that this rank holds. All of them are in "
                "session.full_state_dict(), called by all members, and in a checkpoint (checkpoints=), which "
                "evermoe.load_weights and `evermoe export` read"
            )


def is_averaged_apart(layer: PartialExperts) -> bool:
    """Return whether an `AveragedModel` that still exists has copied the layer."""
    return bool(_averages.get(layer))


def _average_that_copies() -> AveragedModel | None:
    """Return the `AveragedModel` that is being created by a caller; None without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not AveragedModel.__init__.__code__:
        frame = frame.f_back
    return frame.f_locals["self"] if frame is not None else None
