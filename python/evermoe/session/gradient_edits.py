"""Detects a script that changes gradients between its backward and the sum over the members.

Each member has a part of the gradient then. `clip_grad_norm_` clips that part by its own norm, so that the sum differs
from the gradient of one process. A mask has the same effect on a part and on the sum, and is no error. Only the first
steps of a process are checked, as a script does the same in all of them.

Gradients that leave during backward must not change afterwards. `evermoe.comm.arrivals` notices changes that autograd
counts. Those that it does not count, such as writes to `gradient.data`, show in the norms that are compared here: a
script with such changes gets all its gradients sent after backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from evermoe.process.warn import warn
from evermoe.state.shards import local_part

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

    Attributes:
        has_uncounted: whether the script has changed gradients in a way that autograd does not count.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._steps_left = WATCHED_STEPS
        self._seen: list[_Seen] = []
        self._norms: list[Tensor] = []
        self.has_uncounted = False

    @property
    def may_send_early(self) -> bool:
        """Whether gradients may leave during backward: the script is known to change them in no uncounted way."""
        return not self._steps_left and not self.has_uncounted

    def begin_step(self) -> None:
        """Begin a step, without gradients."""
        self._seen = []

    def note(self) -> None:
        """Record the gradients at the end of a backward."""
        if self._steps_left:
            gradients = ((each, each.grad) for each in self._model.parameters())
            self._seen = [_Seen(each, grad, grad._version) for each, grad in gradients if grad is not None]
            self._norms = _norms(self._seen)

    def check(self, members: int) -> None:
        """Called at the end of the block of a step on one of `members` members."""
        if not self._steps_left:
            return
        self._steps_left -= 1
        is_changed = any(each.is_changed for each in self._seen)
        if not is_changed and self._norms:
            before, now = torch.stack(self._norms), torch.stack(_norms(self._seen))
            # A gradient that is not a number equals itself here: with a large loss scale there are some at first.
            is_changed = self.has_uncounted = not torch.allclose(before, now, rtol=0, atol=0, equal_nan=True)
        self._norms = []
        if members > 1 and is_changed:
            self._steps_left = 0
            warn(
                "gradients were changed in `with step:` after step.backward, where each worker has the gradient of "
                "its own samples: clipping or noise gives another sum than in one process. Use "
                "Session(max_grad_norm=...), or Session(on_gradients=...), which gets the gradients of all workers"
            )
        self._seen = []


@torch.no_grad()
def _norms(seen: list[_Seen]) -> list[Tensor]:
    dense = [local_part(each.gradient) for each in seen if each.gradient.layout == torch.strided]
    return list(torch._foreach_norm(dense)) if dense else []
