"""The state of a pipeline's training loop as a buffer, so that it is copied and recovered with a stage's units."""

from __future__ import annotations

import torch
from torch import nn

from evermoe.session.loss_scale import LossScale
from evermoe.state import loop_state


class KeptLoop(nn.Module):
    """Settings of the optimizer's groups, the scheduler and the loss scale, as JSON in a buffer.

    Args:
        optimizer: of the stage.
        scheduler: of its learning rate; None for none.
        loss_scale: of the job.
    """

    progress: torch.Tensor

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: loop_state.Scheduler | None, loss_scale: LossScale
    ) -> None:
        super().__init__()
        self._parts, self._loss_scale = loop_state.LoopParts(None, optimizer, scheduler, loss_scale), loss_scale
        self._loop = loop_state.LoopState()
        self.register_buffer("progress", self._loop.progress)
        self._note()

    def advance(self, loss: float, *, has_overflowed: bool) -> None:
        """Advance the loss scale, the scheduler and the buffer after a step.

        Args:
            loss: of the step.
            has_overflowed: whether its update was left out.
        """
        self._loss_scale.update(has_overflowed=has_overflowed)
        loop_state.advance(self._parts.scheduler, loss)
        self._note()

    def _note(self) -> None:
        self._loop.store(loop_state.collect(self._parts))

    def restore(self) -> None:
        """Restore the optimizer's settings, the scheduler and the loss scale from the buffer, which has changed."""
        loop_state.restore(self._loop.load(), self._parts)
