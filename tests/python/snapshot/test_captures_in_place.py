"""Captures straight into a page-locked arena, through the extension module, against the stand-in driver."""

import subprocess
import sys

import pytest

from evermoe.ops.cache import has_cuda_kernels
from support.kernels import ROOT, build

SCRIPT = """
import ctypes, sys
import torch
from evermoe import _native

ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # under the name that is asked for; its device is the host
sizes, counts = [5_000_000, 3, 9_000_001, 0, 17], [2, 0, 3]
tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
places = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
workspace = torch.empty(_native.ChunkCopier.workspace_bytes(sizes, 4 << 20, 2), dtype=torch.uint8)
copier = _native.ChunkCopier(0, 0, places, 4 << 20, 2, workspace.data_ptr(), None, True, (tensors, workspace))
assert len(copier.chunks()) == 3 * 4 << 20
engine = _native.CopyEngine()
units = [("a", 5_000_003), ("b", 0), ("c", 9_000_018)]
for is_locked in (False, True):
    arena = _native.Arena.create(f"{sys.argv[2]}/{is_locked}", "", units)
    if is_locked:
        arena.page_lock(0)
        arena.page_lock(0)  # it is
    assert arena.is_page_locked == is_locked and arena.mapped_bytes >= 2 * arena.payload_bytes
    for version in range(1, 4):
        for tensor in tensors:
            tensor.random_(256)
        capture = engine.capture_device(arena, version, copier, counts, 0)
        capture.hurry()
        assert capture.wait() == arena.payload_bytes
        assert arena.versions()[0] == (capture.index, version) and arena.verify(capture.index) == []
        found = torch.from_numpy(arena.buffer(capture.index))
        a, _, c = [found[offset : offset + nbytes] for _, offset, nbytes in arena.units()]
        assert torch.equal(a, torch.cat(tensors[:2])) and torch.equal(c, torch.cat(tensors[2:]))
    for wrong, message in [([2, 0, 2], "add up"), ([1, 1, 3], "unit \\"a\\"")]:
        try:
            engine.capture_device(arena, 4, copier, wrong, 0)
            raise SystemExit(f"{wrong} is accepted")
        except ValueError as error:
            assert message in str(error), error
    assert arena.versions()[0][1] == 3
try:
    _native.Arena.create(f"{sys.argv[2]}/no device", "", units).page_lock(7)
    raise SystemExit("there is no such device")
except RuntimeError as error:
    assert "CUDA" in str(error)
engine.shutdown()
print("complete")
"""


def test_units_are_in_their_places(tmp_path):
    if not has_cuda_kernels():
        pytest.skip("no kernels in this build")
    driver = build(ROOT / "target/emulator/driver", driver=1).with_name("libcuda.so")
    command = [sys.executable, "-c", SCRIPT, str(driver), str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout == "complete\n", done.stderr
