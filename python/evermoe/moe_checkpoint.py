"""Activation checkpointing of an MoE layer: which forward repeats another, and a balance loss that keeps its gradient.

With `use_reentrant=False` the first forward leaves a graph, and all is as without checkpointing. With
`use_reentrant=True` it leaves none: the backward runs it once more, with one. Torch connects the output. What the layer
leaves beside it, `MoE.balance_loss`, is connected here:

    first forward    balance_loss becomes the output of a node of its own, which belongs to a `Ticket`
    backward         loss → that node, which keeps its gradient in the ticket
                     loss → the checkpointed function: second forward, whose output carries its own balance_loss along
                          → output → that balance_loss, with the gradient from the ticket

Of the nodes that are ready autograd runs the youngest, and balance_loss is younger than the node of the checkpointed
function. So the gradient is there in time where both are part of one loss, and has its scale. Elsewhere it is refused.
"""

from __future__ import annotations

import sys
from collections import deque
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward
from torch.utils.checkpoint import CheckpointFunction

from evermoe.errors import UnsupportedState

FORWARD, BACKWARD = "CheckpointFunction.forward", "CheckpointFunction.backward"
"""What reentrant checkpointing runs a function in; libraries have copies of torch's."""
TORCHS = {CheckpointFunction.forward.__code__: FORWARD, CheckpointFunction.backward.__code__: BACKWARD}
OURS = "_evermoe_tickets"
"""Where the context of a checkpointed function has the tickets of its layers, in the order of their forwards."""


def is_recomputing() -> bool:
    """Return whether this forward repeats one for its backward, as activation checkpointing of either kind does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0


def is_recomputing_reentrant() -> bool:
    """Return whether the first forward has left no graph, as in reentrant checkpointing."""
    return is_recomputing() and _find_checkpoints().repeated is not None


def is_for_backward() -> bool:
    """Return whether a backward may use this forward, or its repeat by reentrant checkpointing."""
    return torch.is_grad_enabled() or (not torch.compiler.is_compiling() and bool(_find_checkpoints().running))


def carry(layer: Any, y: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's output and its loss, connected so that the loss's gradient arrives under checkpointing, too.

    Args:
        layer: of this forward.
        y: its output.
        loss: a scalar that the layer leaves beside the output.

    Returns:
        Both, for the layer to leave instead.
    """
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and not is_recomputing()):
        return y, loss
    running, repeated = _find_checkpoints()
    if repeated is not None:
        tickets = _tickets(repeated, layer)
        if not tickets:
            return y, loss
        ticket = tickets.popleft()
        tickets.append(ticket)  # another backward through the same graph takes them in the same order
        if not running:
            return _Carry.apply(y, loss, ticket), loss
    elif running:
        ticket = Ticket()
        with torch.enable_grad():
            loss = _Deferred.apply(loss.new_zeros((), requires_grad=True), loss, ticket)
    for context in running:
        _tickets(context, layer).append(ticket)
    return y, loss


class Ticket:
    """The gradient of a first forward's loss, on its way to the loss of the second."""

    def __init__(self) -> None:
        self._gradient: Tensor | None = None

    def keep(self, gradient: Tensor) -> None:
        """Keep the gradient until the backward of the second forward, which must be part of the running backward."""
        self._gradient = gradient
        if _find_checkpoints(of_all=True).repeated is None:  # else it may come once the backward in a backward is over
            Variable._execution_engine.queue_callback(self._check)

    def take(self) -> Tensor | None:
        """What was kept, once; None where the loss is no part of what the backward is of."""
        gradient, self._gradient = self._gradient, None
        return gradient

    def _check(self) -> None:
        """Raise if nothing has used the gradient by the end of the backward.

        Raises:
            UnsupportedState: it would be lost.
        """
        if self.take() is not None:
            raise UnsupportedState(
                "MoE: under checkpoint(..., use_reentrant=True) the gradient of balance_loss must arrive in the same "
                "backward as that of the checkpointed output, and before it: add balance_loss, or load_balancing_loss, "
                "to the loss and call backward once; or use_reentrant=False"
            )


class _Deferred(torch.autograd.Function):
    """A loss whose gradient goes into a ticket; `anchor` is there as autograd wants something to differentiate by."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, ticket: Ticket) -> Tensor:
        ctx.ticket = ticket
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.ticket.keep(gradients[0])
        return None, None, None


class _Carry(torch.autograd.Function):
    """The output, behind which a loss gets the gradient of a ticket."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, ticket: Ticket) -> Tensor:
        ctx.ticket = ticket
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return gradients[0], ctx.ticket.take(), None


class _Checkpoints(NamedTuple):
    """The contexts of reentrant checkpointing that a forward runs in."""

    running: list[Any]
    """Of those that run their function without a graph, from the inside out."""
    repeated: Any
    """Of the one that runs its function once more, within which the others do; None for none."""


def _find_checkpoints(*, of_all: bool = False) -> _Checkpoints:
    """Search the call stack for checkpointed functions.

    Args:
        of_all: also outside of the backward that runs, where that is part of another one.
    """
    running: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (of_all or frame.f_code is not _engine_run_backward.__code__):
        name = _name(frame.f_code)
        if name in (FORWARD, BACKWARD):
            context = frame.f_locals[frame.f_code.co_varnames[0]]
            if name == BACKWARD:
                return _Checkpoints(running, context)
            running.append(context)
        frame = frame.f_back
    return _Checkpoints(running, None)


def _name(code: CodeType) -> str:
    """Return the qualified name; before Python 3.11 that of torch's own checkpointing alone."""
    name: str = getattr(code, "co_qualname", "")
    return TORCHS.get(code, name)


def _tickets(context: Any, layer: Any) -> deque[Ticket]:
    """Return the saved-tensor hooks of a layer within a checkpointed function."""
    if not hasattr(context, OURS):
        setattr(context, OURS, {})
    found: dict[Any, deque[Ticket]] = getattr(context, OURS)
    return found.setdefault(layer, deque())
