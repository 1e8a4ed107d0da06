"""Benches of one process run; what benches replace in the package still exists, and is used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).parents[2] / "benches"
RATE = 1e6
SLOW_WRITES = f"""
import time
from pathlib import Path

import torch

from evermoe.checkpoint import checkpoint_folder, unit_files
from evermoe.state.unit import TensorSpec, Unit
from preset_worker import limit_writes

limit_writes({RATE})
unit = torch.zeros(100_000, dtype=torch.uint8)
described = Unit("unit", (TensorSpec("a", (100_000,), torch.uint8),))
begin = time.monotonic()
checkpoint_folder.write_tensors(Path("tensors"), {{"unit": unit}})
between = time.monotonic()
unit_files.write_units(Path("units"), {{"unit": (described, unit)}})
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


TINY = {
    "bench_copies.py": "--mib 4 --tensors 4 --chunk-kib 16",
    "bench_layer.py": "--tokens 64 --hidden 32 --intermediate 32 --experts 8 --top-k 2 --dtypes float32",
    "bench_ops.py": "--tokens 64 --hidden 32 --experts 8 --top-k 2 --dtypes float32",
    "bench_replica.py": "--elements 65536",
}
"""Benches of what runs in one process, as small as they can be."""


@pytest.mark.long
@pytest.mark.parametrize("bench", TINY)
def test_a_bench_runs_and_writes_its_figures(bench, tmp_path):
    flags = ["--threads", "1", "--seconds", "0.02", "--json", "figures.json", *TINY[bench].split()]
    done = subprocess.run(
        [sys.executable, str(BENCHES / bench), *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "figures.json").read_text())["rows"]


@pytest.mark.long
def test_steps_are_compared_with_every_other_trainer(tmp_path):
    sizes = ["--models", "tiny", "--workers", "1", "2", "--placements", "one", "--rounds", "1", "--steps", "1"]
    done = subprocess.run(
        [sys.executable, str(BENCHES / "bench_step.py"), *sizes, "--presets", "--json", "figures.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    sessions = ["plain", "plain again", "none"]
    assert [row["candidate"] for row in rows] == [*sessions, "torchft", "transformers", *sessions, "transformers"]
    assert all(row["collectives"] > 0 for row in rows if row["workers"] == 2)
