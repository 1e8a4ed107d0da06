"""Rows in 8 bits, for the way to the experts; see `evermoe.ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from evermoe.ops._load import check_rows, torch_ops


def quantize_rows(rows: Tensor) -> Tensor:
    """Bring rows into 8 bits: e4m3 numbers, and a float32 scale for each 128 columns (DeepSeek-V3, section 3.3.2).

    The scale is the largest magnitude of the columns / 448, at least 2^-126; a column times 1 / scale is rounded to the
    nearest number, of two equally near ones to the even one. Columns with an infinity or a NaN become NaN together. Not
    differentiable.

    Args:
        rows: float32, bfloat16 or float16 `[N, H]`.

    Returns:
        uint8 `[N, bytes]`: of each row the numbers, padded to 16 bytes, then the scales, padded to 16 bytes. A row of
        zeros alone means zeros, too, so that rows can be permuted, sent and regrouped as they are.

    Example: columns `[896, 1, -3]` have the scale 2 and become the numbers `[448, 0.5, -1.5]`.
    """
    check_rows(rows=rows)
    if torch.is_grad_enabled() and rows.requires_grad:
        raise RuntimeError("quantize_rows has no gradient: detach the rows, and give them a gradient of your choice")
    return torch_ops.quantize_rows.default(rows)


def dequantize_rows(rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Bring rows back from 8 bits: number times scale, rounded once.

    Args:
        rows: uint8 `[N, bytes]`, from `quantize_rows`.
        width: H, columns of a row.
        dtype: float32, bfloat16 or float16, of the result.

    Returns:
        `[N, H]`.

    Example: numbers `[448, 0.5, -1.5]` with the scale 2: `[896, 1, -3]`.
    """
    return torch_ops.dequantize_rows.default(rows, rows.new_empty((0, width), dtype=dtype))
