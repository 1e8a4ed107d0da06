"""Recorders of what a layer's experts compute in a forward outside of `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from evermoe.moe.expert import Product


class Layer(Protocol):
    """A layer of experts."""

    def _feed_forward(self, rows_NH: Tensor, product: Product, ends_e: Tensor) -> Tensor: ...


Recorder = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], Tensor]
"""Gets rows `[N, H]` ordered by local expert, the end of each expert's rows, and what computes the outputs `[N, H]`."""

RECORDERS: WeakKeyDictionary[Layer, Recorder] = WeakKeyDictionary()
"""Recorders of the next forwards, by layer."""


def feed_forward(layer: Layer, rows_NH: Tensor, product: Product, ends_e: Tensor) -> Tensor:
    """Return the outputs of a layer's local experts, computed by its recorder if it has one."""
    recorder = RECORDERS.get(layer) if RECORDERS else None
    if recorder is None:
        return layer._feed_forward(rows_NH, product, ends_e)
    return recorder(rows_NH, ends_e, lambda rows: layer._feed_forward(rows, product, ends_e))
