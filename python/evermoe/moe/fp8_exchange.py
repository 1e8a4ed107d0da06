"""Dispatch of tokens to the experts in 8 bits.

Shape suffixes: T tokens of this rank, H hidden width, K experts per token, N rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evermoe import ops
from evermoe.comm.group import Group
from evermoe.moe.token_exchange import Exchange
from evermoe.ops.fp8 import dequantize_rows, quantize_rows


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, row_ids: Tensor, positions_TK: Tensor, exchange: Exchange, group: Group
    ) -> Tensor:
        ctx.save_for_backward(positions_TK)
        ctx.exchange, ctx.group = exchange, group
        tokens = quantize_rows(x_TH)  # once per token, not once per expert
        rows = ops.permute(tokens.view(torch.float16), row_ids, positions_TK).view(torch.uint8)
        rows = exchange.by_expert(exchange.move(rows, group))  # the host waits in it, while the GPU has work
        return dequantize_rows(rows, x_TH.shape[1], x_TH.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (positions_TK,) = ctx.saved_tensors
        rows_NH = ctx.exchange.by_source(gradients[0].contiguous())
        rows_NH = ctx.exchange.move(rows_NH, ctx.group, is_return=True)
        return ops.unpermute(rows_NH, positions_TK), None, None, None, None


def send(x_TH: Tensor, row_ids: Tensor, positions_TK: Tensor, exchange: Exchange, group: Group) -> Tensor:
    """Send tokens in 8 bits, and return the rows that this rank receives; collective and differentiable.

    The rows are reordered by expert while they still have 8 bits. The gradient ignores the rounding, and is sent back
    in the dtype of the tokens.

    Args:
        x_TH: float32, bfloat16 or float16.
        row_ids: from `ops.dispatch_plan` or `Exchange.pad`.
        positions_TK: from `ops.dispatch_plan` or `Exchange.pad`.
        exchange: plan of the exchange.
        group: all ranks.

    Returns:
        `[N, H]`, dtype of `x_TH`, ordered by local expert, then by source rank.
    """
    return _Send.apply(x_TH, row_ids, positions_TK, exchange, group)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor) -> Tensor:
        return dequantize_rows(quantize_rows(x_TH), x_TH.shape[1], x_TH.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def rounded(x_TH: Tensor) -> Tensor:
    """Round tokens as `send` does, without sending them; the gradient ignores the rounding."""
    return _Rounded.apply(x_TH)
