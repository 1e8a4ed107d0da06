"""The most memory that workers take until their first step, measured: real processes, and their PSS."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[4] / "benches" / "bench_start.py"
MOST = 1.15
"""Largest peak, in multiples of what a worker holds in training."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "hidden"),
    [
        ("deferred", 256),
        ("folder", 256),
        ("deferred", 512),
    ],
)
def test_no_worker_takes_more_than_its_share_at_the_start(tmp_path, how, hidden):
    """A third of a model of 75 or 151 million parameters each."""
    result = tmp_path / "result.json"
    command = [sys.executable, str(BENCH), "--from", how, "--hidden", str(hidden), "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    workers = json.loads(result.read_text())[how]
    assert len(workers) == 3
    for worker in workers:
        assert 2.9 * worker["parameters"] < worker["share"] - worker["parameters"] < 3.1 * worker["parameters"]
        assert worker["start"] < MOST * worker["share"], worker
