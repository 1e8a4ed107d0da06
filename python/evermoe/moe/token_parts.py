"""Tokens of experts divided over processes that all have the same tokens, as in tensor parallelism.

Each process sends a part of the tokens to their experts, and gathers the outputs of all parts. So an expert sees each
token once, and what surrounds the experts has complete tokens and gradients on each process.

    x [T, H] on each process ─ own rows ─ experts ─ rows of all ─ y [T, H] on each process
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evermoe.moe.experts import Experts


class DividedTokens:
    """Divides the tokens of a layer over the processes of a group, until `end`.

    Args:
        layer: whose forwards get the same tokens on all processes.
        group: of torch.distributed; their gradients of the layer's output are the same, too.
    """

    def __init__(self, layer: Experts, group: dist.ProcessGroup) -> None:
        self._group, self._tokens = group, 0
        self._handles = [
            layer.register_forward_pre_hook(self._cut, with_kwargs=True),
            layer.register_forward_hook(self._join),
        ]

    def end(self) -> None:
        """Leave the layer's tokens as they are."""
        for each in self._handles:
            each.remove()

    def _cut(
        self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        self._tokens = len(tensors[0])
        return tuple(map(self._own, args)), {name: self._own(each) for name, each in kwargs.items()}

    def _own(self, value: Any) -> Any:
        return _OwnRows.apply(value, self._group) if isinstance(value, Tensor) else value

    def _join(self, layer: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        joined: Tensor = _AllRows.apply(output, self._tokens, self._group)
        return joined


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.length = group, len(rows)
        return rows.tensor_split(group.size())[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradients[0], ctx.length, ctx.group), None


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(rows, length, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].tensor_split(ctx.group.size())[ctx.group.rank()].contiguous(), None, None


def _gathered(rows: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all processes, `length` in total, of which each has one more or less than another."""
    size = group.size()
    if not length:
        return rows
    most = -(-length // size)
    sent = rows.new_zeros(most, *rows.shape[1:])
    sent[: len(rows)] = rows
    found = sent.new_empty(size * most, *rows.shape[1:])
    dist.all_gather_into_tensor(found, sent, group=group)
    short = length % size  # the first parts have one row more than the others
    is_long = [not short or place < short for place in range(size)]
    return torch.cat([part[: most - (not long)] for part, long in zip(found.split(most), is_long, strict=True)])
