"""The parts of benches that reach into the package: what they replace is still there, and used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHES = Path(__file__).parents[2] / "benches"
RATE = 1e6
SLOW_WRITES = f"""
import time
from pathlib import Path

import torch

from evermoe.persist import checkpoint_folder, folder
from evermoe.state.unit import TensorSpec, Unit
from preset_worker import limit_writes

limit_writes({RATE})
unit = torch.zeros(100_000, dtype=torch.uint8)
described = Unit("unit", (TensorSpec("a", (100_000,), torch.uint8),))
begin = time.monotonic()
folder.write_tensors(Path("tensors"), {{"unit": unit}})
between = time.monotonic()
checkpoint_folder.write_units(Path("units"), {{"unit": (described, unit)}})
print(between - begin, time.monotonic() - between)
"""


def test_a_slow_disk_takes_as_long_as_its_rate_says(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SLOW_WRITES],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{BENCHES}:{BENCHES.parent / 'python'}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert min(map(float, done.stdout.split())) >= 100_000 / RATE
    assert {path.name for path in tmp_path.iterdir()} >= {"tensors", "units"}
