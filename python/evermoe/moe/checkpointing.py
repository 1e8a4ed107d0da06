"""Activation checkpointing of an MoE layer: repeats the forward's routing, and keeps the balance loss's gradient.

A recomputation must send each token to the experts of the forward. A second choice may differ: the router's noise is
drawn again under `preserve_rng_state=False`, kernels of a GPU may add in another order, and a replay of routing may
have ended before the backward. So the first forward keeps its choice in the contexts of checkpointing that enclose it,
and the recomputation takes it from them (`once`, `draw`). The contexts are torch's own objects, which live as long as
the graph: `_CheckpointFrame`, found through the hooks for saved tensors, and that of `CheckpointFunction`, found in the
call stack.

The gradient of the balance loss: with `use_reentrant=False` the first forward records a graph, and nothing differs from
a run without checkpointing. With `use_reentrant=True` it records none: the backward runs the forward again, with a
graph. Torch connects the output. This module connects the layer's other result, `MoE.balance_loss`:

    first forward    balance_loss becomes the output of a node of its own, which belongs to a `Ticket`
    backward         loss → that node, which keeps its gradient in the ticket
                     loss → the checkpointed function: second forward, whose output carries its own balance_loss along
                          → output → that balance_loss, with the gradient from the ticket

Of the nodes that are ready, autograd runs the youngest, and balance_loss is younger than the node of the checkpointed
function. So if both are part of one loss, the gradient is in the ticket in time, with the right scale. Otherwise the
backward raises an error.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook, _recomputation_hook

from evermoe.errors import UnsupportedState

Value = TypeVar("Value")

FORWARD, BACKWARD = "CheckpointFunction.forward", "CheckpointFunction.backward"
"""Functions in which reentrant checkpointing runs a function; libraries have copies of torch's."""
FRAMES = {f"{kind.__init__.__qualname__}.<locals>.pack_hook" for kind in (_checkpoint_hook, _recomputation_hook)}
"""Hooks with which checkpointing without reentrance runs a function, or repeats it."""
UNPACK = f"{_checkpoint_hook.__init__.__qualname__}.<locals>.unpack_hook"
"""The function that repeats one without reentrance, also from within a backward of the other kind."""
TORCHS = {
    id(CheckpointFunction.forward.__code__): FORWARD,
    id(CheckpointFunction.backward.__code__): BACKWARD,
    **{
        id(c): UNPACK
        for c in _checkpoint_hook.__init__.__code__.co_consts
        if getattr(c, "co_name", "") == "unpack_hook"
    },
}
"""Names of torch's own functions; before Python 3.11 a code object has no qualified name."""
OURS = "_evermoe_memory"
"""Attribute of a checkpointed function's context with its `_Memory`."""


def is_recomputing() -> bool:
    """Return whether this forward repeats one for its backward, as both kinds of activation checkpointing do."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0


def is_recomputing_reentrant() -> bool:
    """Return whether this forward repeats one that recorded no graph."""
    return is_recomputing() and _find_checkpoints().repeated is not None


def is_for_backward() -> bool:
    """Return whether a backward may pass through this forward, or through its repeat by reentrant checkpointing."""
    return torch.is_grad_enabled() or (not torch.compiler.is_compiling() and bool(_find_checkpoints().running))


def is_enclosed() -> bool:
    """Return whether activation checkpointing of either kind runs this forward, or repeats it."""
    return _find_all() is not None


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
        ticket = _memory(repeated).take((layer, "loss"))
        if ticket is None:
            return y, loss
        if not running:
            return _Carry.apply(y, loss, ticket), loss
    elif running:
        ticket = Ticket()
        with torch.enable_grad():
            loss = _Deferred.apply(loss.new_zeros((), requires_grad=True), loss, ticket)
    for context in running:
        _memory(context).keep((layer, "loss"), ticket)
    return y, loss


def once(layer: Any, name: str, compute: Callable[[], Value]) -> Value:
    """Return the result of `compute`; in a recomputation, the result that it had in the forward.

    Inside `torch.compile` it is computed: what a compiled graph recomputes is the compiler's choice.

    Args:
        layer: of this forward.
        name: of the result. A forward may have several of one name.
        compute: returns tensors without a graph, or anything else.
    """
    contexts = _find_all()
    if contexts is None:
        return compute()
    running, repeated, run = contexts
    kept = None if repeated is None else _memory(repeated).take((layer, name), run)
    value: Value = compute() if kept is None else kept[0]
    for context in running:
        _memory(context).keep((layer, name), (value,))
    return value


def draw(layer: Any, name: str, device: torch.device, sample: Callable[[], Tensor]) -> Tensor:
    """Return random numbers; in a recomputation, those of the forward, also under `preserve_rng_state=False`.

    The forward keeps the generator's state, not the numbers. The recomputation draws from the current generator, too,
    so that whatever is drawn after it has the numbers that torch intends.

    Args:
        layer: of this forward.
        name: of the numbers.
        device: where they are drawn.
        sample: draws them from the default generator of the device.
    """
    contexts = _find_all()
    if contexts is None:
        return sample()
    generator = torch if device.type == "cpu" else torch.get_device_module(device)
    place = () if device.type == "cpu" else (device,)
    state = once(layer, name, lambda: generator.get_rng_state(*place))
    numbers = sample()
    if contexts.repeated is None:
        return numbers
    with torch.random.fork_rng(place, device_type=device.type if place else "cuda"):
        generator.set_rng_state(state, *place)
        return sample()


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
        if name == UNPACK and not of_all:
            break
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
    return TORCHS.get(id(code), name)  # a code object need not be hashable


class _Enclosing(NamedTuple):
    """Contexts of both kinds of checkpointing that enclose a forward, as of `_Checkpoints`."""

    running: list[Any]
    repeated: Any
    run: Any
    """An object of this repeat alone; None where repeats are always complete."""


def _find_all() -> _Enclosing | None:
    """Find the contexts of both kinds; None without one."""
    if torch.compiler.is_compiling():
        return None
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if top is None and torch.is_grad_enabled() and not is_recomputing():
        return None
    found, repeated, run = [], None, None
    for pack in [] if top is None else _hooks():
        if getattr(pack, "__qualname__", "") not in FRAMES or pack.__module__ != "torch.utils.checkpoint":
            continue
        own = inspect.unwrap(pack)  # torch 2.15 hides it from its compiler
        cells = dict(zip(own.__code__.co_freevars, own.__closure__ or (), strict=True))
        if "frame" not in cells:
            repeated, run = cells["target_frame_ref"].cell_contents(), pack
            break
        found.append(cells["frame"].cell_contents)
    running, reentrant = _find_checkpoints()
    if not (found or running) and repeated is None and reentrant is None:
        return None
    if reentrant is not None:
        repeated, run = reentrant, None
    return _Enclosing(found + running, repeated, run)


def _hooks() -> list[Any]:
    """Return the hooks of this thread that pack saved tensors, from the inside out."""
    hooks = torch._C._autograd
    found = []
    while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
        found.append(pair)
        hooks._pop_saved_tensors_default_hooks()
    for pair in reversed(found):
        hooks._push_saved_tensors_default_hooks(*pair)
    return [pack for pack, _ in found]


class _Memory:
    """Values of the forwards in a checkpointed function, in the order in which they came."""

    def __init__(self) -> None:
        self._values: dict[Any, list[Any]] = {}
        self._places: dict[Any, int] = {}
        self._run: Any = None

    def keep(self, key: Any, value: Any) -> None:
        """Keep a value of the forward."""
        self._values.setdefault(key, []).append(value)

    def take(self, key: Any, run: Any = None) -> Any:
        """Return the next value in a repeat, and after the last one the first; None if there is none.

        Args:
            key: as of `keep`.
            run: an object of this repeat, if repeats may end early.
        """
        if run is not self._run:
            self._run, self._places = run, {}
        values = self._values.get(key, [])
        place = self._places.get(key, 0)
        self._places[key] = (place + 1) % max(len(values), 1)
        return values[place] if values else None


def _memory(context: Any) -> _Memory:
    if not hasattr(context, OURS):
        setattr(context, OURS, _Memory())
    found: _Memory = getattr(context, OURS)
    return found
