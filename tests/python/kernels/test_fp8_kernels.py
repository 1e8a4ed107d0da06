"""The kernels of fp8.cu, bit by bit against the CPU ops."""

import pytest
import torch

from evermoe.ops.fp8 import dequantize_rows, quantize_rows
from support.kernels import Buffer
from support.tokens import FP8_WIDTHS, draw_rows, fp8_row_bytes

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def check(kernels, x, name, blocks=2, threads=64):
    rows, width = x.shape
    size = fp8_row_bytes(width)
    packed = Buffer([rows, size], torch.uint8)
    kernels(f"quantize_{name}", blocks, threads, 0, x, packed, rows, width, size)
    expected = quantize_rows(x)
    packed.equals(expected)
    back = Buffer([rows, width], x.dtype)
    kernels(f"dequantize_{name}", blocks, threads, 0, packed, back, rows, width, size)
    back.tensor[back.tensor.isnan()] = torch.nan
    wanted = dequantize_rows(expected, width, x.dtype)
    wanted[wanted.isnan()] = torch.nan
    back.tensor, wanted = back.tensor.nan_to_num(7.5), wanted.nan_to_num(7.5)
    back.equals(wanted)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("width", FP8_WIDTHS)
@pytest.mark.few(37)
def test_rows(kernels, name, width):
    for rows, blocks, threads in [(1, 1, 32), (5, 2, 64), (3, 1, 128)]:
        check(kernels, draw_rows(rows, width, TYPES[name], seed=width), name, blocks, threads)


@pytest.mark.parametrize("name", TYPES)
def test_what_is_not_finite_and_what_is_tiny(kernels, name):
    x = draw_rows(6, 300, TYPES[name])
    x[0, 5], x[1, 130], x[2, 299] = torch.nan, torch.inf, -torch.inf
    x[3], x[4] = 1e-40, torch.finfo(x.dtype).max
    check(kernels, x, name)


def test_rows_that_are_not_aligned(kernels):
    memory = draw_rows(1, 5 * 64 + 1, torch.bfloat16).flatten()
    check(kernels, memory[1:].view(5, 64), "bf16")


@pytest.mark.long
def test_every_bfloat16(fast_kernels):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.full((len(every), 2), 448.0, dtype=torch.bfloat16)
    x[:, 0] = every
    check(fast_kernels, x[x[:, 0].abs() <= 448].contiguous(), "bf16", 8, 128)
