"""The native planners refuse what makes no sense: no abort, no panic, no memory without a bound, always ValueError."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evermoe import _native
from evermoe.planning.placement import session_slots
from support import absurd

TESTS = Path(__file__).parents[1]


def test_random_nonsense_is_refused():
    command = [sys.executable, "-m", "support.absurd", "0", "3"]
    done = subprocess.run(command, check=False, cwd=TESTS, capture_output=True, text=True, timeout=120)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"after {last}: exit {done.returncode}\n{done.stderr[-3000:]}"


def test_a_plan_of_endless_steps_is_refused():
    text = absurd.PLAN.to_json()
    steps = f'"steps_per_version":{absurd.PLAN.reason[1]}'
    assert steps in text
    for wrong in (0, 4097, 1 << 32):
        with pytest.raises(ValueError, match="expected a version of 1 to 4096 steps"):
            _native.ChunkPlan.from_json(text.replace(steps, f'"steps_per_version":{wrong}'))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1 << 64) - 1, [4, 4], None, 1 << 40), r"experts: expected at most 2\^24 in all, got 18446744073709551615"),
        ((8, [1 << 63, 1 << 63], None, 1), r"domain_sizes: expected at most 2\^24"),
        ((8, [4, 4], 1 << 40, 1), r"slots: expected at most 2\^24"),
    ],
)
def test_slots_of_endless_models_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        session_slots(*arguments)


@pytest.mark.parametrize("experts", [1, 7, 8, 64])
@pytest.mark.parametrize("sizes", [[1], [4, 4], [1, 7], [3, 0, 5], [1, 1, 14]])
@pytest.mark.parametrize("replicas", [1, 2, 3, 1 << 40])
def test_slots_are_the_fewest_with_which_each_expert_has_its_nodes(experts, sizes, replicas):
    """Or one more than the fewest that hold all experts, or as many as all wanted replicas take."""
    nodes = sum(size > 0 for size in sizes)
    least = max(-(-experts // sum(sizes)) + 1, -(-experts * min(replicas, sum(sizes)) // sum(sizes)))
    wanted = experts * min(replicas, nodes)
    enough = next(n for n in range(least, 1000) if sum(min(experts, n * size) for size in sizes) >= wanted)
    assert session_slots(experts, sizes, None, replicas) == enough


def test_a_log_has_no_other_units():
    log = _native.ReplayLog([("a", 4, 48)], 1 << 20)
    for act in (log.newest, log.version, log.needs_state, log.installed, log.forget):
        with pytest.raises(ValueError, match="unit: expected the place of one of 1 units, got 99"):
            act(99)


LONG_DRAWS = """
import signal
import numpy as np
from evermoe import planning

signal.signal(signal.SIGINT, signal.default_int_handler)
matrix = np.zeros((40, 40), np.int64)
for node in range(40):
    matrix[[node, (node + 7) % 40], node] = 1
print("begins", flush=True)
planning.recovery_probability(matrix, 20, samples=1 << 32)
"""
"""Two nodes hold each of 40 experts; 2^32 samples of them would take an hour."""


def test_a_signal_ends_long_draws():
    with subprocess.Popen([sys.executable, "-c", LONG_DRAWS], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout.readline() == "begins\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors, errors
