"""A stand-in for NVML, tests/emulator/fake_nvml.cpp, and workers whose GPUs it knows; they compute on the CPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from evermoe.comm import membership
from support import harness, worker
from support.kernels import EMULATOR

LIBRARY, REPORTS = "EVERMOE_TEST_NVML_LIBRARY", "EVERMOE_TEST_NVML"


def build(folder: Path) -> Path:
    """The path of the library, built in a folder."""
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    library, source = folder / "libnvidia-ml.so.1", EMULATOR / "fake_nvml.cpp"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run(["g++", *flags, "-o", library, source], check=True, timeout=120)
    return library


def load(library: str | Path) -> None:
    """Puts the stand-in where the process looks for NVML: a library with that name is loaded already."""
    ctypes.CDLL(str(library))


def report(file: Path, *lines: str) -> None:
    """Lets a GPU report these lines, besides earlier ones."""
    file.write_text((file.read_text() if file.exists() else "") + "".join(f"{line}\n" for line in lines))


def main(options: worker.Options) -> None:
    os.environ |= options.environment
    load(os.environ[LIBRARY])
    membership.find_hardware = lambda node, device: f"GPU-of-{node}"
    worker.main(options)


class GpuWorker(harness.Worker):
    """A worker that has a GPU, as far as NVML is concerned: its UUID is `GPU-of-NODE`."""

    main = staticmethod(main)
