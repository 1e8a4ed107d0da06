"""Each script of `examples/` as a user runs it: in a process of its own, from another folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_SECONDS = 100
PRINTED = {
    "01_ops": ["the operations and the loop agree"],
    "02_moe_layer": [r"balance 0.1: loss \S+ -> \S+", r"layers found: \['experts'\]"],
    "03_session": ["recovered at step 10 with 2 workers", "30 steps committed, 0 lost"],
    "04_optimizer_calibration": [
        "evermoe.optim.AdamW +can be repeated: evermoe",
        "the replica of 2080 parameters has the trainer's bits: True",
    ],
    "05_replica_node": [
        r"worker 0 recovered at step 12; it fetched 2 units: \{'(peer|local memory)': 2\}",
        "30 steps, loss .*, 0 steps lost",
        "the replica node followed 30 steps and trained none",
    ],
    "06_pipeline": [
        "stage 0 lost its peer in step 6",
        "stage 1 is ready at step 6",
        "step 15: loss",
        "[1-9][0-9]* digests of states and copies compared, 0 differ",
    ],
    "07_trace": ["windows in which the network is idle", "the trace of 2 ranks has [1-9][0-9]+ spans"],
    "08_plan_api": ["balanced +busiest node 1.00 x the mean", "expert 11: replayed", "auto .* nothing is delayed"],
    "09_checkpoint": [
        "resumed training has the same bits as 40 uninterrupted steps: True",
        "a plain model has the same weights: True",
    ],
    "10_transformers": ["20 steps committed, 0 lost", r"transformers loads it: loss \d"],
    "11_torchrun": [
        r"start 0 of worker 0: a job of 2 that begins at step 0",
        r"start 1 of worker 0: a job of 2 that begins at step (10|11)",
        "30 steps, 0 lost",
    ],
    "12_larger_than_a_device": [r"worker 0 held [46] of 12 experts, then 6", "8 steps, 0 lost, loss"],
}
"""By example, patterns of lines that it must print."""


def test_every_example_has_a_test():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", sorted(PRINTED))
@pytest.mark.few(1)
def test_example_runs_and_prints_what_it_promises(name, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"{name}: not done in {LIMIT_SECONDS} s; so far:\n{process.communicate()[0]}") from None
    assert process.returncode == 0, printed
    for pattern in PRINTED[name]:
        assert re.search(pattern, printed), f"{name}: expected {pattern!r} in\n{printed}"
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path != temporary]
    assert not [path for path in left if "torchinductor" not in path], f"{name} leaves files behind"
