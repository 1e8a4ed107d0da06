"""The CUDA kernels' own source, built by a host compiler and compared with the CPU ops bit by bit."""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from evermoe import ops

ROOT = Path(__file__).parent.parent
EMULATOR = Path(__file__).parent / "cuda_on_cpu"
FLAGS = ["-std=c++17", "-O1", "-mf16c", "-ffp-contract=off", "-fno-strict-aliasing"]
FLAGS += ["-shared", "-fPIC"]
ORDERS = [0, 1, 2, 3]  # of threads: forward, reverse, two shuffles
SHAPES = [(1, 1, 1, 1, 1), (7, 3, 5, 13, 2), (31, 2, 64, 257, 3), (64, 2, 4, 64, 4), (700, 2, 3, 8, 5)]
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
TILE = 512
MARGIN = 64
raw = torch.ops.evermoe


class Kernels:
    """Launches kernels by name; tensors are passed as addresses."""

    def __init__(self, library):
        self.library = library
        self.library.launch.restype = ctypes.c_char_p
        self.order = 0

    def __call__(self, name, blocks, threads, shared_bytes, *arguments):
        values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        error = self.library.launch(
            ctypes.cast(getattr(self.library, name), ctypes.c_void_p),
            ctypes.c_uint(blocks),
            ctypes.c_uint(threads),
            ctypes.c_size_t(shared_bytes),
            (ctypes.c_uint64 * len(values))(*values),
            ctypes.c_size_t(len(values)),
            self.order,
        )
        assert error is None, f"{name}: {error.decode()}"


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    if not shutil.which("g++") or platform.machine() != "x86_64":
        pytest.skip("needs g++ on x86-64")
    output = tmp_path_factory.mktemp("kernels") / "kernels.so"
    sources = [*sorted((ROOT / "kernels").glob("*.cu")), EMULATOR / "cuda_on_cpu.cpp"]
    command = [
        "g++",
        *FLAGS,
        "-shared",
        "-fPIC",
        "-include",
        EMULATOR / "cuda_on_cpu.h",
        "-x",
        "c++",
        *sources,
    ]
    subprocess.run([*command, "-o", output], check=True)
    return ctypes.CDLL(str(output))


@pytest.fixture(params=ORDERS)
def kernels(library, request):
    kernels = Kernels(library)
    kernels.order = request.param
    return kernels


class Buffer:
    """A tensor with margins that must stay as they are."""

    def __init__(self, shape, dtype, fill=0xEE):
        size = torch.Size(shape).numel() * dtype.itemsize
        self.memory = torch.full((size + 2 * MARGIN,), 0x5A, dtype=torch.uint8)
        self.memory[MARGIN : MARGIN + size] = fill
        self.tensor = self.memory[MARGIN : MARGIN + size].view(dtype).view(shape)

    def equals(self, expected):
        margins = torch.cat([self.memory[:MARGIN], self.memory[-MARGIN:]])
        assert bool((margins == 0x5A).all()), "a write past the end"
        assert torch.equal(self.tensor, expected)

    def equals_but_for_nans(self, expected):
        """Bit for bit, where NaN is NaN."""
        nan = self.tensor.isnan() & expected.isnan()
        self.tensor[nan] = expected[nan]
        self.tensor = self.tensor.view(torch.int32)
        self.equals(expected.view(torch.int32))


def case(shape, dtype=torch.float32):
    tokens, top_k, experts, width, ranks = shape
    random = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts, (tokens, top_k), generator=random)
    counts = torch.zeros(experts, ranks, dtype=torch.int64)
    for expert in ids[ids >= 0].tolist():
        counts[expert, torch.randint(ranks, (), generator=random)] += 1
    row_ids, positions = ops.dispatch_plan(ids, counts)
    x = torch.randn(tokens, width, generator=random).to(dtype)
    return ids, counts, row_ids, positions, x, torch.rand(tokens, top_k, generator=random)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [32, 64])
def test_histogram_and_plan(kernels, shape, bits):
    ids, counts, row_ids, positions, _, _ = case(shape)
    experts, ranks = counts.shape
    slots, tiles = ids.numel(), -(-ids.numel() // TILE)
    typed = ids.to(torch.int32 if bits == 32 else torch.int64)
    histogram = Buffer([experts], torch.int64, 0)
    kernels(f"expert_histogram_i{bits}", 3, 64, 4 * experts, typed, histogram.tensor, slots, experts)
    histogram.equals(ops.expert_histogram(ids, experts))

    tile_counts = Buffer([tiles, experts], torch.int32)
    kernels(f"plan_count_i{bits}", tiles, 32, 4 * experts, typed, tile_counts.tensor, slots, experts)
    per_tile = [ops.expert_histogram(tile, experts) for tile in ids.flatten().split(TILE)]
    tile_counts.equals(torch.stack(per_tile).int())
    ends, first_rows = Buffer([experts, ranks], torch.int64), Buffer([ranks, experts], torch.int64)
    sizes = (tiles, experts, ranks)
    kernels("plan_segments", 1, 64, 64 * 8, counts, tile_counts.tensor, ends.tensor, first_rows.tensor, *sizes)
    ends.equals(counts.cumsum(1))
    first_rows.equals((counts.t().flatten().cumsum(0) - counts.t().flatten()).view(ranks, experts))
    ours = Buffer([slots], torch.int64, 0xFF), Buffer(ids.shape, torch.int64)
    arguments = (tile_counts.tensor, ends.tensor, first_rows.tensor, ours[0].tensor, ours[1].tensor)
    kernels(f"plan_place_i{bits}", tiles, 32, 4 * experts, typed, *arguments, slots, experts, ranks)
    ours[0].equals(row_ids)
    ours[1].equals(positions)


@pytest.mark.parametrize("shape", SHAPES[:4])
@pytest.mark.parametrize("row", TYPES)
@pytest.mark.parametrize("weight", ["none", "f32", "same"])
def test_rows(kernels, shape, row, weight):
    _, _, row_ids, positions, x, weights = case(shape, TYPES[row])
    (tokens, top_k), (slots, width) = positions.shape, (row_ids.shape[0], x.shape[1])
    weight_type = row if weight == "same" else "f32"
    weights = weights.to(TYPES[weight_type])
    used = None if weight == "none" else weights
    row_bytes = width * x.dtype.itemsize
    rows = Buffer([slots, width], x.dtype)
    for unit in [2, 16] if row_bytes % 16 == 0 else [2]:
        kernels(f"permute_{unit}", 3, 32, 0, x, row_ids, rows.tensor, slots, row_bytes // unit, tokens, top_k)
        rows.equals(ops.permute(x, row_ids, positions))
        rows.tensor.zero_()
    permuted = ops.permute(x, row_ids, positions)
    for count in [1, 16 // x.dtype.itemsize] if row_bytes % 16 == 0 else [1]:
        out = Buffer([tokens, width], x.dtype)
        name = f"unpermute_{row}_{weight_type}_{count}"
        sizes = (tokens, top_k, slots, width)
        kernels(name, 5, 64, 0, permuted, positions, 0 if used is None else used, out.tensor, *sizes)
        out.equals(ops.unpermute(permuted, positions, used))
    inverse = Buffer([slots], torch.int64, 0xFF)
    kernels("invert_positions", 2, 32, 0, positions, inverse.tensor, slots, slots)
    inverse.equals(row_ids)
    grad_rows, grad_weights = Buffer([slots, width], x.dtype), Buffer(positions.shape, weights.dtype, 0)
    arguments = (
        x,
        permuted,
        row_ids,
        weights,
        grad_rows.tensor,
        grad_weights.tensor,
        slots,
        width,
        slots,
        top_k,
    )
    kernels(f"unpermute_backward_{row}_{weight_type}", 2, 64, 0, *arguments)
    expected = raw.unpermute_backward(x, permuted, positions, weights)
    grad_rows.equals(expected[0])
    grad_weights.equals(expected[1])


def test_values_out_of_range_are_unrouted(kernels):
    ids, counts = torch.tensor([0, 1, 2, 7, -5]), torch.tensor([[1], [0], [3]])
    histogram = Buffer([3], torch.int64, 0)
    kernels("expert_histogram_i64", 1, 32, 12, ids, histogram.tensor, 5, 3)
    histogram.equals(torch.tensor([1, 1, 1]))
    starts, ends, first_rows = (
        torch.zeros(1, 3, dtype=torch.int32),
        Buffer([3], torch.int64),
        Buffer([3], torch.int64),
    )
    kernels("plan_segments", 1, 32, 256, counts, starts, ends.tensor, first_rows.tensor, 1, 3, 1)
    row_ids, positions = Buffer([5], torch.int64, 0xFF), Buffer([5], torch.int64)
    arguments = (ids, starts, ends.tensor, first_rows.tensor, row_ids.tensor, positions.tensor, 5, 3, 1)
    kernels("plan_place_i64", 1, 32, 12, *arguments)
    row_ids.equals(torch.tensor([0, 2, -1, -1, -1]))
    positions.equals(torch.tensor([0, -1, 1, -1, -1]))
