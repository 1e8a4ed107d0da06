"""Damaged input is refused with its error, or does not matter: `support.damage`. Rust's readers: `tests/damage`."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SHARE = 100
"""The short form has this many times fewer cases."""
CASES = {
    "inventories": 60_000,
    "frames": 20_000,
    "tensors": 8000,
    "memory": 4000,
    "checkpoints": 4000,
    "saves": 4000,
    "manifests": 20_000,
}


def run(cases, seconds):
    command = [sys.executable, "-m", "support.damage", *(f"{kind}={number}" for kind, number in cases.items())]
    done = subprocess.run(command, check=False, cwd=TESTS, capture_output=True, text=True, timeout=seconds)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"case {lines[-1:]}: exit {done.returncode}\n{done.stderr[-3000:]}"
    print(*(line for line in lines if "refused" in line), sep="\n")


def test_damage_is_refused_or_does_not_matter():
    run({kind: number // SHARE for kind, number in CASES.items()}, 100)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_damage_is_refused_or_does_not_matter_in_100_000_cases():
    run(CASES, 1700)
