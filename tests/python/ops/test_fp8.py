"""Rows in 8 bits: against torch's own float8_e4m3fn, and bit for bit between the CPU and the kernels."""

import pytest
import torch

from evermoe import ops
from evermoe.ops.fp8 import dequantize_rows, quantize_rows
from support.tokens import FP8_WIDTHS, draw_rows, fp8_row_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(x):
    """The 8-bit rows, by torch's cast."""
    rows, width = x.shape
    blocks = -(-width // 128)
    padded = torch.zeros(rows, blocks, 128)
    padded.view(rows, -1)[:, :width] = x.float()
    scales = (padded.abs().amax(-1) / 448).clamp(min=2.0**-126)
    numbers = (padded * (1 / scales)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    packed = torch.zeros(rows, fp8_row_bytes(width), dtype=torch.uint8)
    packed[:, :width] = numbers.view(rows, -1)[:, :width]
    start = -(-width // 16) * 16
    packed[:, start : start + 4 * blocks] = scales.contiguous().view(torch.uint8).view(rows, -1)
    return packed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", FP8_WIDTHS)
def test_rows_are_those_of_torch(width, dtype, device):
    x = draw_rows(9, width, dtype)
    packed = quantize_rows(x.to(device))
    assert torch.equal(packed.cpu(), expected(x))
    numbers = packed[:, :width].cpu().view(torch.float8_e4m3fn).float()
    start = -(-width // 16) * 16
    scales = packed[:, start:].cpu().contiguous().view(torch.float32)
    wanted = (numbers * scales.repeat_interleave(128, 1)[:, :width]).to(dtype)
    assert torch.equal(dequantize_rows(packed, width, dtype).cpu(), wanted)


def test_every_bfloat16_is_rounded_as_torch_does(device):
    """Each next to one that makes the scale 1, so that ties occur."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.abs() <= 448]
    x = torch.full((len(every), 2), 448.0, dtype=torch.bfloat16)
    x[:, 0] = every
    assert torch.equal(quantize_rows(x.to(device)).cpu()[:, 0], every.float().to(torch.float8_e4m3fn).view(torch.uint8))


def test_every_number_comes_back(device):
    packed = torch.zeros(1, fp8_row_bytes(256), dtype=torch.uint8)
    packed[0, :256] = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    packed[0, 256:264] = torch.tensor([1.0, 2.0]).view(torch.uint8)
    found = dequantize_rows(packed.to(device), 256, torch.float32)[0].cpu()
    numbers = packed[0, :256].view(torch.float8_e4m3fn).float() * torch.tensor([1.0, 2.0]).repeat_interleave(128)
    torch.testing.assert_close(found, numbers, rtol=0, atol=0, equal_nan=True)


def test_fp8_example(device):
    x = torch.tensor([[896.0, 1, -3]], device=device)
    packed = quantize_rows(x)
    assert packed.shape == (1, 32)
    assert packed[0, :3].cpu().view(torch.float8_e4m3fn).tolist() == [448, 0.5, -1.5]
    assert dequantize_rows(packed, 3, torch.float32).tolist() == x.tolist()


def test_what_is_not_finite_takes_its_columns_along(device):
    x = torch.ones(3, 300)
    x[0, 5], x[1, 130], x[2, 299] = torch.nan, torch.inf, -torch.inf
    back = dequantize_rows(quantize_rows(x.to(device)), 300, torch.float32).cpu()
    for row, block in enumerate(back.isnan().split(128, 1)):
        assert block.all(1).tolist() == [row == 0, row == 1, row == 2]
        assert not block[[each for each in range(3) if each != row]].any()


def test_rows_can_be_permuted_and_regrouped_as_bytes(device):
    """A row of zeros, where there is no slot, means zeros."""
    x = draw_rows(6, 200, torch.bfloat16).to(device)
    ids = torch.tensor([[1, 0], [1, -1], [0, 1], [-1, -1], [0, 1], [1, 0]], device=device)
    row_ids, positions = ops.dispatch_plan(ids, ops.expert_histogram(ids, 2)[:, None])
    packed = quantize_rows(x)
    rows = ops.permute(packed.view(torch.float16), row_ids, positions).view(torch.uint8)
    counts = torch.tensor([[4, 2], [1, 5]], device=device)
    found = dequantize_rows(ops.regroup(rows, counts), 200, torch.bfloat16)
    plain = dequantize_rows(packed, 200, torch.bfloat16)
    assert torch.equal(found, ops.regroup(ops.permute(plain, row_ids, positions), counts))


def test_no_rows_and_no_columns(device):
    for shape in [(0, 5), (3, 0), (0, 0)]:
        packed = quantize_rows(torch.empty(shape, device=device))
        assert packed.shape == (shape[0], fp8_row_bytes(shape[1]))
        assert dequantize_rows(packed, shape[1], torch.float16).shape == shape


def test_strided_rows(device):
    x = draw_rows(40, 50, torch.float32).to(device)
    assert torch.equal(quantize_rows(x.t()), quantize_rows(x.t().contiguous()))
    packed = quantize_rows(x)
    assert torch.equal(dequantize_rows(packed[::2], 50, x.dtype), dequantize_rows(packed, 50, x.dtype)[::2])


def test_wrong_rows():
    packed = quantize_rows(torch.randn(2, 40))
    with pytest.raises(RuntimeError, match="rows: expected 64 bytes for 33 columns, got 48"):
        dequantize_rows(quantize_rows(torch.randn(2, 20)), 33, torch.float32)
    with pytest.raises(RuntimeError, match="rows: expected uint8, got float32"):
        dequantize_rows(packed.float(), 40, torch.float32)
    with pytest.raises(RuntimeError, match="like: expected float32, bfloat16 or float16, got int64"):
        dequantize_rows(packed, 40, torch.int64)
    with pytest.raises(RuntimeError, match="an address that 16 divides"):
        dequantize_rows(packed.flatten()[1:65].view(1, 64), 40, torch.float32)
    with pytest.raises(RuntimeError, match="rows: expected float32, bfloat16 or float16, got int64"):
        quantize_rows(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"rows: expected shape \[N, H\]"):
        quantize_rows(torch.randn(3))
    with pytest.raises(RuntimeError, match="has no gradient: detach the rows"):
        quantize_rows(torch.randn(2, 3, requires_grad=True))


@pytest.mark.parametrize("width", [40, 200])
def test_fakes_are_right(width):
    x = draw_rows(5, width, torch.bfloat16)
    torch.library.opcheck(torch.ops.evermoe.quantize_rows.default, (x,))
    packed = quantize_rows(x)
    torch.library.opcheck(torch.ops.evermoe.dequantize_rows.default, (packed, x[:0]))
