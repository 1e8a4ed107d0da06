"""Sums of gradients over the data-parallel ranks of a pipeline's stage, in groups of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sum_over(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Add up gradients over a group; a parameter that has none on any rank keeps none. Collective.

    An error leaves all gradients unchanged.

    Raises:
        RuntimeError: of torch, a rank is lost.
    """
    _exchange(parameters, lambda flat: dist.all_reduce(flat, group=group))


def sum_again(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, *, is_summed: bool) -> None:
    """Add up gradients, some of which may be sums already: then the first rank that has the sums broadcasts them.

    Args:
        parameters: of the stage.
        group: the stage's ranks.
        is_summed: whether the gradients of this rank are the sums.
    """
    have = torch.zeros(dist.get_world_size(group))
    have[dist.get_rank(group)] = float(is_summed)
    dist.all_reduce(have, group=group)
    if not have.any():
        sum_over(parameters, group)
        return
    first = int(have.nonzero()[0])
    source = first if group is None else dist.get_global_rank(group, first)
    _exchange(parameters, lambda flat: dist.broadcast(flat, source, group=group))


def _exchange(parameters: Sequence[nn.Parameter], exchange: Callable[[Tensor], object]) -> None:
    by_type = [[p for p in parameters if p.dtype == dtype] for dtype in sorted({p.dtype for p in parameters}, key=str)]
    exchanged = []
    for same in by_type:
        marks = [torch.full((1,), float(p.grad is not None), dtype=p.dtype, device=p.device) for p in same]
        flat = torch.cat(
            [*(torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in same), *marks]
        )
        exchange(flat)
        exchanged.append(flat)
    for same, flat in zip(by_type, exchanged, strict=True):
        _write(same, flat)


def _write(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    *sums, counts = flat.split([*(p.numel() for p in parameters), len(parameters)])
    for parameter, total, count in zip(parameters, sums, counts.tolist(), strict=True):
        if count and parameter.grad is None:
            parameter.grad = total.view_as(parameter).clone()
        elif count:
            parameter.grad.copy_(total.view_as(parameter))  # type: ignore[union-attr]
