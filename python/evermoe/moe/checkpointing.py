"""Activation checkpointing of an MoE layer: detects repeated forwards, and keeps the gradient of the balance loss.

With `use_reentrant=False` the first forward records a graph, and nothing differs from a run without checkpointing. With
`use_reentrant=True` it records none: the backward runs the forward again, with a graph. Torch connects the output. This
module connects the layer's other result, `MoE.balance_loss`:

    first forward    balance_loss becomes the output of a node of its own, which belongs to a `Ticket`
    backward         loss → that node, which keeps its gradient in the ticket
                     loss → the checkpointed function: second forward, whose output carries its own balance_loss along
                          → output → that balance_loss, with the gradient from the ticket

Of the nodes that are ready, autograd runs the youngest, and balance_loss is younger than the node of the checkpointed
function. So if both are part of one loss, the gradient is in the ticket in time, with the right scale. Otherwise the
backward raises an error.
"""

from __future__ import annotations

import sys
from collections import deque
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward
from torch.utils.checkpoint import CheckpointFunction

from evermoe.errors import UnsupportedState

FORWARD, BACKWARD = "CheckpointFunction.forward", "CheckpointFunction.backward"
"""Functions in which reentrant checkpointing runs a function; libraries have copies of torch's."""
TORCHS = {CheckpointFunction.forward.__code__: FORWARD, CheckpointFunction.backward.__code__: BACKWARD}
OURS = "_evermoe_tickets"
"""Attribute of a checkpointed function's context with the tickets of its layers, in the order of their forwards."""


def is_recomputing() -> bool:
    """Return whether this forward repeats one for its backward, as both kinds of activation checkpointing do."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0


def is_recomputing_reentrant() -> bool:
    """Return whether this forward repeats one that recorded no graph."""
    return is_recomputing() and _find_checkpoints().repeated is not None


def is_for_backward() -> bool:
    """Return whether a backward may pass through this forward, or through its repeat by reentrant checkpointing."""
    return torch.is_grad_enabled() or (not torch.compiler.is_compiling() and bool(_find_checkpoints().running))


def carry(layer: Any, y: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Connect a layer's output and its loss, so that reentrant checkpointing keeps the gradient of the loss, too.

    Args:
        layer: of this forward.
        y: its output.
        loss: a scalar that the layer computes in addition to the output.

    Returns:
        Replacements for `y` and `loss`.
    """
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and not is_recomputing()):
        return y, loss
    running, repeated = _find_checkpoints()
    if repeated is not None:
        tickets = _tickets(repeated, layer)
        if not tickets:
            return y, loss
        ticket = tickets.popleft()
        tickets.append(ticket)  # another backward through the same graph uses them in the same order
        if not running:
            return _Carry.apply(y, loss, ticket), loss
    elif running:
        ticket = Ticket()
        with torch.enable_grad():
            loss = _Deferred.apply(loss.new_zeros((), requires_grad=True), loss, ticket)
    for context in running:
        _tickets(context, layer).append(ticket)
    return y, loss


def keep(layer: nn.Module, name: str, value: Tensor) -> None:
    """Set an attribute of a layer, also where a compiled graph has activation checkpointing around the layer.

    Torch refuses side effects in a checkpointed part of a graph, because its backward does not repeat them, unless the
    user allows them all. An attribute of a forward needs no repeat.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(setattr, layer, name, value)
    else:
        setattr(layer, name, value)


class Ticket:
    """The gradient of a first forward's loss, on its way to the loss of the second."""

    def __init__(self) -> None:
        self._gradient: Tensor | None = None

    def keep(self, gradient: Tensor) -> None:
        """Keep the gradient until the second forward's backward, which must be part of the current backward."""
        self._gradient = gradient
        if _find_checkpoints(of_all=True).repeated is None:  # otherwise it may be taken after a nested backward
            Variable._execution_engine.queue_callback(self._check)

    def take(self) -> Tensor | None:
        """Return the gradient, once; None if the current backward does not include the loss."""
        gradient, self._gradient = self._gradient, None
        return gradient

    def _check(self) -> None:
        """Check at the end of the backward that the gradient was taken.

        Raises:
            UnsupportedState: nothing has taken the gradient, and it would be lost.
        """
        if self.take() is not None:
            raise UnsupportedState(
                "MoE: under checkpoint(..., use_reentrant=True) the gradient of balance_loss must arrive in the same "
                "backward as that of the checkpointed output, and before it: add balance_loss, or load_balancing_loss, "
                "to the loss and call backward once; or use_reentrant=False"
            )


class _Deferred(torch.autograd.Function):
    """A loss whose gradient goes into a ticket; autograd needs `anchor` as an input that requires a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, ticket: Ticket) -> Tensor:
        ctx.ticket = ticket
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.ticket.keep(gradients[0])
        return None, None, None


class _Carry(torch.autograd.Function):
    """Passes the output on; its backward gives a loss the gradient of a ticket."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, ticket: Ticket) -> Tensor:
        ctx.ticket = ticket
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return gradients[0], ctx.ticket.take(), None


class _Checkpoints(NamedTuple):
    """Contexts of reentrant checkpointing that enclose a forward."""

    running: list[Any]
    """Contexts that run their function without a graph, from the inside out."""
    repeated: Any
    """The context around them that runs its function again; None without one."""


def _find_checkpoints(*, of_all: bool = False) -> _Checkpoints:
    """Find the contexts of checkpointing in the call stack.

    Args:
        of_all: whether to look outside the current backward, too, if it is nested in another one.
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
    """Return the qualified name; before Python 3.11 only of torch's own checkpointing."""
    name: str = getattr(code, "co_qualname", "")
    return TORCHS.get(code, name)


def _tickets(context: Any, layer: Any) -> deque[Ticket]:
    """Return the tickets of a layer within a checkpointed function."""
    if not hasattr(context, OURS):
        setattr(context, OURS, {})
    found: dict[Any, deque[Ticket]] = getattr(context, OURS)
    return found.setdefault(layer, deque())
