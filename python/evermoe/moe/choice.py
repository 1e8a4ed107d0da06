"""The choice of experts in one forward of a layer, which may be recorded, replaced, or repeated for its backward.

A router chooses, then computes the weights of its choice. To replace a choice, this module must come between the two.
`MoE` gives its `Router` a `Choice`. Other routers, those of transformers or your own, choose by `torch.topk` in the
forward of the module that contains the experts. While that forward runs, a mode replaces the result of the `topk`:
other indices, and the scores of these. So the router computes the weights as for its own choice, and they have
gradients.

Shape suffixes: T tokens of this rank, K experts per token, E experts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from evermoe.comm.group import Group
from evermoe.errors import UnsupportedState
from evermoe.moe import checkpointing


class Layer:
    """A layer of experts, whose choices may be replaced."""

    num_experts: int
    group: Group
    replaced: Replaced | None = None
    """Set while blocks of `record_routing` and `replay_routing` run."""
    choice: Choice | None = None
    """Of a forward whose router has begun; None where nothing replaces or repeats it."""


class Recorder:
    """Ids and weights of a layer's forwards, in their order.

    Attributes:
        ids: int64 `[T, K]` of each forward.
        weights: `[T, K]` of each forward, without a graph.
    """

    def __init__(self) -> None:
        self.ids: list[Tensor] = []
        self.weights: list[Tensor] = []


class Replay:
    """Ids, and perhaps weights, for the next forwards of a layer.

    Args:
        name: path of the layer.
        ids_TK: int64 `[T, K]`, of all these forwards; a row of -1 leaves the choice to the router.
        weights_TK: `[T, K]`; None: the router computes them.

    Attributes:
        place: tokens that earlier forwards have taken.
    """

    def __init__(self, name: str, ids_TK: Tensor, weights_TK: Tensor | None) -> None:
        self.name, self._ids_TK, self._weights_TK = name, ids_TK, weights_TK
        is_given_T1 = ids_TK[:, :1] >= 0
        self._is_given_T1 = None if bool(is_given_T1.all()) else is_given_T1
        self.is_used = bool(is_given_T1.any())
        self.place = 0

    def __len__(self) -> int:
        return len(self._ids_TK)

    @property
    def top_k(self) -> int:
        """K."""
        return self._ids_TK.shape[1]

    def find(self, own_TK: Tensor) -> Chosen:
        """Return the choice for the tokens of a forward, for which the router chooses `own_TK`.

        Raises:
            ValueError: the forward has more tokens than are left, or another K.
        """
        tokens, top_k = own_TK.shape
        if top_k != self.top_k:
            raise ValueError(
                f"replay_routing: expected ids [tokens, layers, {top_k}], as the router of layer {self.name} chooses "
                f"{top_k} experts for each token, got ids for {self.top_k}"
            )
        if tokens > len(self) - self.place:
            raise ValueError(
                f"replay_routing: expected the ids of all tokens of the forwards in the block, in their order; layer "
                f"{self.name} has a forward of {tokens} tokens, and {len(self) - self.place} of {len(self)} are left"
            )
        part = slice(self.place, self.place + tokens)
        ids_TK = self._ids_TK[part].to(own_TK)
        weights_TK = None if self._weights_TK is None else self._weights_TK[part].to(own_TK.device)
        if self._is_given_T1 is None:
            return Chosen(ids_TK, weights_TK, None)
        is_given_T1 = self._is_given_T1[part].to(own_TK.device)
        return Chosen(torch.where(is_given_T1, ids_TK, own_TK), weights_TK, is_given_T1)


class Replaced(NamedTuple):
    """Replaces or records the choices of a layer while blocks of `record_routing` and `replay_routing` run."""

    replay: Replay | None
    """Of the innermost block that replays; None without one."""
    recorders: Sequence[Recorder]
    """Of all blocks that record."""


class Chosen(NamedTuple):
    """Experts of the tokens of a forward."""

    ids_TK: Tensor
    weights_TK: Tensor | None = None
    """Weights that replace those of the router; None without them."""
    is_given_T1: Tensor | None = None
    """Tokens whose weights are replaced; None for all."""


class Choice:
    """The choice of one forward of a layer.

    Args:
        layer: of the forward.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._is_repeat = checkpointing.is_recomputing()
        self._replaced = None if self._is_repeat else layer.replaced
        self._chosen: Chosen | None = None
        self._next: Chosen | None = None
        """In a recomputation: the choice that comes next, if it is not the one that was asked for."""

    def is_of_groups(self, own_TK: Tensor) -> bool:
        """Return whether this is not the choice of experts, but of two whose scores are those of a group.

        A group may consist of all experts. The number of experts of a replay, or of the forward, then differs.
        """
        replay = None if self._replaced is None else self._replaced.replay
        if replay is not None:
            return replay.top_k != own_TK.shape[1]
        if self._is_repeat and self._next is None:
            self._next = checkpointing.once(self._layer, "choice", lambda: Chosen(own_TK))
        return self._next is not None and self._next.ids_TK.shape[1] != own_TK.shape[1]

    def choose(self, own_TK: Tensor) -> Tensor:
        """Return the experts of the tokens, `[T, K]`, for which the router chooses `own_TK`.

        Raises:
            ValueError: the ids of a replay do not fit the forward.
        """
        replay = None if self._replaced is None else self._replaced.replay
        find = Chosen if replay is None else replay.find
        found, self._next = self._next, None
        self._chosen = found or checkpointing.once(self._layer, "choice", lambda: find(own_TK))
        return self._chosen.ids_TK

    def weigh(self, own_TK: Tensor) -> Tensor:
        """Return the weights of the choice, `[T, K]`, for which the router computes `own_TK`."""
        if self._chosen is None or self._chosen.weights_TK is None:
            return own_TK
        weights_TK, is_given_T1 = self._chosen.weights_TK.to(own_TK.dtype), self._chosen.is_given_T1
        return weights_TK if is_given_T1 is None else torch.where(is_given_T1, weights_TK, own_TK)

    def end(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts and weights for the tokens, when they arrive at the experts.

        Raises:
            UnsupportedState: a replay needs the router's weights of other experts, or a recomputation has chosen other
                experts than its forward, and the router does not choose as this module expects.
            ValueError: the ids of a replay do not fit the forward.
        """
        if self._chosen is None or self._chosen.ids_TK.shape != ids_TK.shape:
            own_TK, ids_TK = ids_TK, self.choose(ids_TK)
            assert self._chosen is not None
            if self._chosen.weights_TK is None:
                self._check(own_TK, ids_TK)
        weights_TK = self.weigh(weights_TK)
        if self._replaced is not None:
            raw_TK = self._chosen.ids_TK
            is_padding_T1 = (ids_TK < 0).all(1, keepdim=True) & (raw_TK < self._layer.num_experts).any(1, keepdim=True)
            for recorder in self._replaced.recorders:
                recorder.ids.append(raw_TK.masked_fill(is_padding_T1, -1).long())
                recorder.weights.append(weights_TK.detach())
            if self._replaced.replay is not None:
                self._replaced.replay.place += len(ids_TK)
        return ids_TK, weights_TK

    def _check(self, own_TK: Tensor, ids_TK: Tensor) -> None:
        replay = None if self._replaced is None else self._replaced.replay
        if replay is None and not self._is_repeat:
            return
        with _disable_current_modes():  # a selective policy refuses a repeat with other operators than the forward
            if torch.equal(own_TK, ids_TK):
                return
        if self._is_repeat and self._layer.group.gives_zeros:  # the zeros of an earlier layer change the scores
            return
        if replay is None:
            raise UnsupportedState(
                "Experts: activation checkpointing ran a forward again, and the router has chosen other experts than "
                "before. Its noise must be drawn from torch's generators under preserve_rng_state=True; or use "
                "evermoe.Router"
            )
        raise UnsupportedState(
            f"replay_routing: the router of layer {replay.name} does not choose by torch.topk, over {ids_TK.shape[1]} "
            "of the last dimension, in the forward of the module that contains the experts. So its weights of other "
            "experts are unknown: give weights, or use evermoe.Router"
        )


def begin_choice(layer: Layer) -> Choice | None:
    """Begin the choice of a forward, before the router runs; None if nothing can replace or repeat it."""
    if torch.compiler.is_compiling():
        return None if layer.replaced is None else _uncompiled["_begin"](layer)
    return _begin(layer)


def end_choice(layer: Layer, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """End the choice of a forward, as `Choice.end`, also if it was not begun."""
    if torch.compiler.is_compiling():
        return (ids_TK, weights_TK) if layer.replaced is None else _uncompiled["_end"](layer, ids_TK, weights_TK)
    return _end(layer, ids_TK, weights_TK)


def _begin(layer: Layer) -> Choice | None:
    if layer.replaced is not None or checkpointing.is_enclosed():
        layer.choice = Choice(layer)
    elif layer.choice is not None:  # an error has ended an earlier forward
        layer.choice = None
    return layer.choice


def _end(layer: Layer, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    choice = layer.choice
    if choice is None and (layer.replaced is not None or torch.is_grad_enabled()):
        choice = _begin(layer)
    if choice is None:
        return ids_TK, weights_TK
    layer.choice = None
    return choice.end(ids_TK, weights_TK)


_uncompiled: dict[str, Callable[..., Any]] = {}
"""Functions by name that compiled forwards call outside their graphs, while choices are replaced."""


def prepare_compiled() -> None:
    """Fill `_uncompiled` before choices are replaced: `torch.compiler.disable` loads the compiler, which is slow."""
    for function in (_begin, _end, _enter_mode, _leave_mode) if not _uncompiled else ():
        _uncompiled[function.__name__] = torch.compiler.disable(function)


# ---- routers that choose by torch.topk


class _ByTopK(TorchFunctionMode):
    """Replaces the choice of a router in the forward of a module that contains experts."""

    def __init__(self, layer: Layer, choice: Choice) -> None:
        super().__init__()
        self._layer, self._choice = layer, choice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores = args[0] if args else kwargs["input"]
        own = found.indices
        if self._layer.choice is not self._choice or scores.shape[-1] < self._layer.num_experts:
            return found  # the choice has ended, or this one is of groups of experts
        own_TK = own.reshape(-1, own.shape[-1])
        if self._choice.is_of_groups(own_TK):
            return found
        ids = self._choice.choose(own_TK).view_as(own)
        return torch.return_types.topk((scores.gather(-1, ids), ids))


class _Modes(threading.local):
    """Modes of the forwards that run in this thread, each with its module."""

    def __init__(self) -> None:
        self.running: list[tuple[nn.Module, _ByTopK]] = []


_modes = _Modes()


def watch(parent: nn.Module, layer: Layer) -> None:
    """Replace the choices of a router that chooses by `torch.topk` in the forward of `parent`, which calls `layer`."""
    if not any(isinstance(hook, partial) and hook.func is _enter for hook in parent._forward_pre_hooks.values()):
        parent.register_forward_pre_hook(partial(_enter, layer))
        parent.register_forward_hook(partial(_leave, layer), always_call=True)


def _enter(layer: Layer, parent: nn.Module, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        _enter_mode(layer, parent)
    elif layer.replaced is not None:
        _uncompiled["_enter_mode"](layer, parent)


def _leave(layer: Layer, parent: nn.Module, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        _leave_mode(parent)
    elif layer.replaced is not None:
        _uncompiled["_leave_mode"](parent)


def _enter_mode(layer: Layer, parent: nn.Module) -> None:
    choice = _begin(layer)
    if choice is not None:
        mode = _ByTopK(layer, choice)
        mode.__enter__()
        _modes.running.append((parent, mode))


def _leave_mode(parent: nn.Module) -> None:
    if _modes.running and _modes.running[-1][0] is parent:
        _modes.running.pop()[1].__exit__(None, None, None)
