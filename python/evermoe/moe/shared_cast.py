"""Casts of weights under autocast that all forwards share whose graphs exist at the same time.

Why a cast lives no longer than the graphs that need it: `torch.autocast` itself keeps casts until its context ends, and
a cast that lived until the next update would save more, where gradients are accumulated. But a script may change
weights between two backwards in a way that no version counter shows (`parameter.data.add_`, as adversarial training
does), and would train with stale weights without a message. It would also hold 2 bytes per parameter where activation
checkpointing holds none. While a graph holds the cast in any case, sharing it costs nothing: pipelines have several
micro-batches in flight, and losses such as DPO's have two forwards for one backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary


class _Kept(NamedTuple):
    state: tuple[int, int]
    cast: TensorWeakRef


_casts: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The latest cast of each weight."""


class _Share(torch.autograd.Function):
    """Use a cast in one more graph. Each graph casts its own gradient, so that sums are those without sharing."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = weights.dtype
        ctx.save_for_backward(cast)  # alive until this backward, as the matrices that products save
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


def share_cast(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `weights.to(dtype)`, differentiably; the memory is that of a previous cast which a graph still holds.

    The weights may change in the meantime: by operations that count in their version, or by another `data`.

    Args:
        weights: any shape, a leaf.
        dtype: of the result.
    """
    is_recorded = torch.is_grad_enabled() and weights.requires_grad
    if weights.dtype == dtype or not is_recorded or torch.compiler.is_compiling():
        return weights.to(dtype)
    state = weights._version, weights.untyped_storage()._cdata  # the second changes with `weights.data = …`
    kept = _casts.get(weights)
    cast = kept.cast() if kept is not None and kept.state == state else None
    if cast is None or cast.dtype != dtype:
        cast = weights.detach().to(dtype)
        _casts[weights] = _Kept(state, TensorWeakRef(cast))
    shared: Tensor = _Share.apply(weights, cast)
    return shared
