"""Errors and warnings for actions of a script inside the block of a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evermoe.errors import UnsupportedState
from evermoe.session.gradient_edits import GradientEdits
from evermoe.session.training_inputs import refuse_scaled


class ScriptGuard:
    """Watches the script while it computes a step.

    Args:
        model: of the script.
        optimizer: of the script; it must not step then.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._is_open = True
        """Whether the optimizer may step."""
        self._hook = optimizer.register_step_pre_hook(self._refuse_step)
        self._has_seen_loss = False
        self._edits = GradientEdits(model)

    @property
    def may_send_early(self) -> bool:
        """Whether gradients may leave during backward; see `GradientEdits`."""
        return self._edits.may_send_early

    def begin_step(self) -> None:
        """Begin to watch a block, which has no gradients yet."""
        self._is_open = False
        self._edits.begin_step()

    def check_loss(self, loss: Tensor) -> None:
        """Check the first loss of all.

        Raises:
            UnsupportedState: the script has scaled it by a `torch.amp.GradScaler`.
        """
        if not self._has_seen_loss:
            self._has_seen_loss = True
            refuse_scaled(loss)

    def end_backward(self) -> None:
        """Record that a loss is backpropagated."""
        self._edits.note()

    def end_step(self, members: int) -> None:
        """End the block on one of `members` members that train."""
        self._is_open = True
        self._edits.check(members)

    def allow_step(self) -> None:
        """Allow the session to step the optimizer."""
        self._is_open = True

    def remove(self) -> None:
        """Leave the optimizer to the script."""
        self._hook.remove()

    def _refuse_step(self, *_: object) -> None:
        if not self._is_open:
            raise UnsupportedState(
                "optimizer.step() was called inside `with step:`, but the session steps the optimizer itself, once all "
                "members have voted: leave the call out. A torch.amp.GradScaler, whose step() calls it, goes to the "
                "session, as its argument scaler."
            )
