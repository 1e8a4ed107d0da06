"""The CUDA kernels' own source, built by a host compiler and compared with the CPU ops bit by bit."""

import ctypes
import platform
import shutil
import struct
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
MARGIN = 64


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
def test_histogram(kernels, shape, bits):
    ids, counts, _, _, _, _ = case(shape)
    experts, slots = counts.shape[0], ids.numel()
    typed = ids.to(torch.int32 if bits == 32 else torch.int64)
    histogram = Buffer([experts], torch.int64, 0)
    kernels(f"expert_histogram_i{bits}", 3, 64, 4 * experts, typed, histogram.tensor, slots, experts)
    histogram.equals(ops.expert_histogram(ids, experts))


def test_ids_out_of_range_are_not_counted(kernels):
    histogram = Buffer([3], torch.int64, 0)
    kernels("expert_histogram_i64", 1, 32, 12, torch.tensor([0, 1, 2, 7, -5]), histogram.tensor, 5, 3)
    histogram.equals(torch.tensor([1, 1, 1]))


def adamw_table(steps, gradients):
    """The kernel's last argument as words: the numbers of each step, its kind of gradient and the address."""
    kinds = {torch.float32: 1, torch.bfloat16: 2}
    packed = b""
    for numbers, gradient in zip(steps.tolist(), gradients, strict=True):
        kind, address = (0, 0) if gradient is None else (kinds[gradient.dtype], gradient.data_ptr())
        packed += struct.pack("<9fIQ", *numbers, kind, address)
    return struct.unpack("<48Q", packed.ljust(48 * 8, b"\0"))


@pytest.mark.parametrize(
    ("size", "per_thread"), [(0, 1), (1, 4), (3, 4), (7, 1), (8, 4), (257, 4), (1031, 1), (1031, 4)]
)
def test_adamw(kernels, size, per_thread):
    """Floats of every kind, to compare bit for bit; NaNs are NaNs, as which of them comes out is not said."""
    random = torch.Generator().manual_seed(size)
    bits = [torch.randint(-(1 << 31), (1 << 31) - 1, (size,), generator=random).int() for _ in range(5)]
    gradients = [torch.randn(size, generator=random), None, bits[0].view(torch.float32)]
    gradients += [torch.randn(size, generator=random).bfloat16(), torch.randn(size, generator=random)]
    options = {"lr": 0.3, "betas": (0.9, 0.97), "eps": 1e-9, "weight_decay": 0.2}
    steps = [ops.adamw_step(t=t, **options) for t in range(1, 5)]
    steps.append(ops.adamw_step(t=5, loss_scale=3.0, clip=0.7, maximize=True, **options | {"betas": (0.3, 0.5)}))
    start = [torch.randn(size, generator=random), torch.randn(size, generator=random), torch.zeros(size)]
    for state in (start, [values.view(torch.float32) for values in bits[1:4]]):
        ours, expected = [Buffer([size], torch.float32) for _ in state], [values.clone() for values in state]
        for buffer, values in zip(ours, state, strict=True):
            buffer.tensor.copy_(values)
        table = adamw_table(torch.stack(steps), gradients)
        addresses = [buffer.tensor for buffer in ours]
        kernels(f"adamw_{per_thread}", 2, 32, 0, *addresses, size, len(steps), *table)
        ops.adamw_(*expected, gradients, torch.stack(steps))
        for buffer, values in zip(ours, expected, strict=True):
            buffer.equals_but_for_nans(values)
