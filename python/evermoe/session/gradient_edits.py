"""Detects a script that changes gradients between its backward and the sum over the members.

Each member has a part of the gradient then. `clip_grad_norm_` clips that part by its own norm, so that the sum differs
from the gradient of one process. A mask has the same effect on a part and on the sum, and is no error. Only the first
steps of a process are checked, as a script does the same in all of them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from evermoe.process.warn import warn

WATCHED_STEPS = 3
"""Number of steps of a process in which its script is watched."""


class _Seen(NamedTuple):
    parameter: nn.Parameter
    gradient: Tensor
    version: int
    """Autograd's count of changes."""

    @property
    def is_changed(self) -> bool:
        return self.parameter.grad is not self.gradient or self.gradient._version != self.version


class GradientEdits:
    """Warns once of gradients that have changed since backward.

    Args:
        model: whose gradients they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._steps_left = WATCHED_STEPS
        self._seen: list[_Seen] = []

    def begin_step(self) -> None:
        """Begin a step, without gradients."""
        self._seen = []

    def note(self) -> None:
        """Record the gradients at the end of a backward."""
        if self._steps_left:
            gradients = ((each, each.grad) for each in self._model.parameters())
            self._seen = [_Seen(each, grad, grad._version) for each, grad in gradients if grad is not None]

    def check(self, members: int) -> None:
        """Called at the end of the block of a step on one of `members` members."""
        if not self._steps_left:
            return
        self._steps_left -= 1
        if members > 1 and any(each.is_changed for each in self._seen):
            self._steps_left = 0
            warn(
                "gradients were changed in `with step:` after step.backward, where each worker has the gradient of "
                "its own samples: clipping or noise gives another sum than in one process. Use "
                "Session(max_grad_norm=...), or Session(on_gradients=...), which gets the gradients of all workers"
            )
        self._seen = []
