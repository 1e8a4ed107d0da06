"""Runs the CUDA kernels' own source on the CPU (tests/cuda_on_cpu), for tests that compare it with the CPU ops."""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
EMULATOR = Path(__file__).parent / "cuda_on_cpu"
ORDERS = [0, 1, 2, 3]  # of threads: forward, reverse, two shuffles
MARGIN = 64


def build(output, **variables):
    """The path of the library that build.mk makes in the folder `output`."""
    if platform.machine() != "x86_64" or not (shutil.which("g++") and shutil.which("make")):
        pytest.skip("needs g++ and make on x86-64")
    settings = [f"{name.upper()}={value}" for name, value in variables.items()]
    command = ["make", "--silent", "-j2", "-f", EMULATOR / "build.mk", f"OUT={output}", *settings]
    subprocess.run(command, check=True, timeout=300)
    return output / "kernels.so"


class Kernels:
    """Launches kernels by name; tensors are passed as addresses, integers as 64 bits, a table by value as bytes."""

    def __init__(self, path, order=0):
        self.library = ctypes.CDLL(str(path))
        self.library.emulated_launch.restype = ctypes.c_char_p
        self.library.emulated_parameters.restype = ctypes.POINTER(ctypes.c_size_t)
        self.order = order

    def __call__(self, name, blocks, threads, shared_bytes, *arguments):
        values = [self._value(argument) for argument in arguments]
        self._check_sizes(name, values)
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
        addresses = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        sizes = ctypes.c_uint(blocks), ctypes.c_uint(threads), ctypes.c_size_t(shared_bytes)
        error = self.library.emulated_launch(name.encode(), *sizes, addresses, self.order)
        assert error is None, f"{name}: {error.decode()}"

    @staticmethod
    def _value(argument):
        if isinstance(argument, Buffer):
            argument = argument.tensor
        if isinstance(argument, torch.Tensor):
            assert argument.is_contiguous(), "kernels take contiguous tensors"
            argument = argument.data_ptr()
        return argument if isinstance(argument, bytes) else (argument % (1 << 64)).to_bytes(8, "little")

    def _check_sizes(self, name, values):
        """The driver would read past the values, or leave some out, without a word."""
        sizes = self.library.emulated_parameters(name.encode())
        assert sizes, f"{name}: no such kernel"
        expected = []
        while sizes[len(expected)]:
            expected.append(sizes[len(expected)])
        got = [len(value) for value in values]
        assert got == expected, f"{name}: expected parameters of {expected} bytes, got {got}"


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Path of the kernels' library."""
    return build(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=ORDERS)
def kernels(library, request):
    """Launches kernels, in several orders of threads."""
    return Kernels(library, request.param)


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
