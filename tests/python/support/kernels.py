"""Runs the CUDA kernels' own source on the CPU (tests/emulator), for tests that compare it with the CPU ops."""

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import platform
import shutil
import subprocess
import weakref
from pathlib import Path
from typing import ClassVar

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
EMULATOR = ROOT / "tests" / "emulator"
SHUFFLES = [2, 3]  # seeds: threads and blocks in drawn orders, several blocks at once
ORDERS = [0, 1, *SHUFFLES]  # forward, reverse, shuffled
MARGIN = 64
MAP_NORESERVE = 0x4000  # of Linux on x86-64; older Pythons have no name for it


def build(output, **variables):
    """The path of the library that build.mk makes in the folder `output`."""
    if platform.machine() != "x86_64" or not (shutil.which("g++") and shutil.which("make")):
        pytest.skip("needs g++ and make on x86-64")
    output.mkdir(parents=True, exist_ok=True)
    settings = [f"{name.upper()}={value}" for name, value in variables.items()]
    command = ["make", "--silent", "-j2", "-f", EMULATOR / "build.mk", f"OUT={output}", *settings]
    with open(output / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, check=True, timeout=300)
    return output / "kernels.so"


def sparse(shape, dtype):
    """Zeros that take memory only where they are touched."""
    size = torch.Size(shape).numel() * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags), dtype=dtype).view(shape)


class Buffer:
    """A tensor with margins that must stay as they are. Kernels may not read it before it is written.

    `fill`, a byte, and `set` write it.
    """

    known: ClassVar = weakref.WeakValueDictionary()  # by the address of the memory

    def __init__(self, shape, dtype, fill=None):
        size = torch.Size(shape).numel() * dtype.itemsize
        self.memory = torch.full((size + 2 * MARGIN,), 0x5A, dtype=torch.uint8)
        self.memory[MARGIN : MARGIN + size] = 0xEE if fill is None else fill
        self.tensor = self.memory[MARGIN : MARGIN + size].view(dtype).view(shape)
        self.initialised = fill is not None
        Buffer.known[self.memory.untyped_storage().data_ptr()] = self

    def set(self, values):
        """Writes the tensor before the first launch; returns the buffer."""
        self.tensor.copy_(values)
        self.initialised = True
        return self

    def equals(self, expected):
        margins = torch.cat([self.memory[:MARGIN], self.memory[-MARGIN:]])
        assert bool((margins == 0x5A).all()), "a write past the end"
        torch.testing.assert_close(self.tensor, expected, rtol=0, atol=0)

    def equals_but_for_nans(self, expected):
        """Bit for bit, where NaN is NaN."""
        nan = self.tensor.isnan() & expected.isnan()
        self.tensor = torch.where(nan, expected, self.tensor).view(torch.uint8)
        self.equals(expected.view(torch.uint8))


class Kernels:
    """Launches kernels by name: tensors and buffers as addresses, integers as 64 bits, a table by value as bytes.

    A checked build stops at an access outside of the arguments and of `also`, the tensors that a table points to, and
    at a read of what neither a kernel nor the test wrote: a tensor counts as written, a `Buffer` says. `first_block`
    leaves out the blocks before it, to come to large indices soon.
    """

    def __init__(self, path, order=0):
        self.library = ctypes.CDLL(str(path))
        self.library.emulated_launch.restype = ctypes.c_char_p
        self.library.emulated_parameters.restype = ctypes.POINTER(ctypes.c_size_t)
        self.is_checked = hasattr(self.library, "emulated_register")
        if self.is_checked:
            self.library.emulated_register.restype = ctypes.c_char_p
        self.order = order
        self.buffers = {}  # registered, by address

    def __call__(self, name, blocks, threads, shared_bytes, *arguments, also=(), first_block=0):
        arguments = [argument.tensor if isinstance(argument, Buffer) else argument for argument in arguments]
        values = [self._value(argument) for argument in arguments]
        self._check_sizes(name, values)
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
        addresses = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        sizes = *map(ctypes.c_uint, (first_block, blocks, threads)), ctypes.c_size_t(shared_bytes)
        with self._registered([*arguments, *also]):
            error = self.library.emulated_launch(name.encode(), *sizes, addresses, self.order)
        assert error is None, f"{name}: {error.decode()}"

    def close(self):
        """Forgets the buffers."""
        for address in self.buffers:
            self.library.emulated_forget(ctypes.c_void_p(address))
        self.buffers.clear()

    @staticmethod
    def _value(argument):
        if isinstance(argument, torch.Tensor):
            assert argument.is_contiguous(), "kernels take contiguous tensors"
            argument = argument.data_ptr()
        return argument if isinstance(argument, bytes) else (argument % (1 << 64)).to_bytes(8, "little")

    def _check_sizes(self, name, values):
        """The driver would read past the values, or leave some out, without a word."""
        sizes = self.library.emulated_parameters(name.encode())
        assert sizes, f"{name}: no such kernel"
        expected = list(itertools.takewhile(bool, sizes))
        got = [len(value) for value in values]
        assert got == expected, f"{name}: expected parameters of {expected} bytes, got {got}"

    @contextlib.contextmanager
    def _registered(self, arguments):
        """Buffers stay registered, with what the kernels wrote to them; other tensors for one launch."""
        for_one_launch = []
        for i, tensor in enumerate(arguments):
            if not self.is_checked or not isinstance(tensor, torch.Tensor) or not tensor.nbytes:
                continue
            buffer = Buffer.known.get(tensor.untyped_storage().data_ptr())
            data = tensor if buffer is None else buffer.tensor
            address = data.data_ptr()
            if address in self.buffers:
                continue
            what = f"argument {i} ({str(data.dtype).removeprefix('torch.')} {list(data.shape)})"
            initialised = buffer is None or buffer.initialised
            place = ctypes.c_void_p(address), ctypes.c_size_t(data.nbytes)
            error = self.library.emulated_register(*place, what.encode(), int(initialised))
            assert error is None, f"{what}: {error.decode()}"
            if buffer is None:
                for_one_launch.append(address)
            else:
                self.buffers[address] = buffer
        try:
            yield
        finally:
            for address in for_one_launch:
                self.library.emulated_forget(ctypes.c_void_p(address))


@pytest.fixture(scope="session")
def library():
    """Path of the kernels' library with all checks."""
    return build(ROOT / "target/emulator/checked", checked=1)


@pytest.fixture(scope="session")
def fast_library():
    """Path of the kernels' library without checks."""
    return build(ROOT / "target/emulator/fast")


@pytest.fixture(params=ORDERS)
def kernels(library, request):
    """Launches kernels under all checks, in several orders of threads and blocks."""
    with contextlib.closing(Kernels(library, request.param)) as kernels:
        yield kernels


@pytest.fixture(params=[0, 2])
def fast_kernels(fast_library, request):
    """Launches kernels without checks, for larger sizes."""
    return Kernels(fast_library, request.param)
