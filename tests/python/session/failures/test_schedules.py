"""Random schedules of failures, one for each preset; `make test-failures` has hundreds."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from support import schedules
from support.hosts import need_namespaces
from support.mishaps import MISHAPS

SEEDS = {"gemini": 0, "pec": 31, "baft": 2, "moetion": 3, "lazarus": 4, "auto": 5}
IN_LONG = ("baft", "moetion", "lazarus")
KINDS = ("is cut from", "longer at", "the Lighthouse is away", "the disk is full")


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.long] * (name in IN_LONG)) for name, seed in SEEDS.items()]
)
@pytest.mark.few(1)
def test_schedule(tmp_path, seed):
    try:
        schedules.run(seed, tmp_path)
    except schedules.MissingRights as missing:
        pytest.skip(str(missing))


def test_seeds_cover_each_preset_and_each_kind_of_failure_besides_deaths():
    plans = {preset: schedules.plan(seed) for preset, seed in SEEDS.items()}
    assert all(plan.preset == preset for preset, plan in plans.items())
    told = [each for plan in plans.values() for each in plan.told]
    assert not [kind for kind in KINDS if not any(kind in each for each in told)]


def test_seeds_draw_all_that_there_is():
    drawn = {schedules.plan(seed).drawn for seed in range(2000)}
    assert drawn == {mishaps for several in MISHAPS for mishaps in several}


@pytest.mark.long
def test_without_rights_nothing_passes_unless_another_schedule_is_allowed():
    need_namespaces()
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    seed = SEEDS["gemini"]
    assert schedules.plan(seed).needs == {"hosts"}
    assert not schedules.plan(seed, unprivileged=True).needs
    without = ["setpriv", "--bounding-set", "-sys_admin,-net_admin"]
    line = [*without, sys.executable, schedules.__file__, "--runs", "1", "--first-seed", str(seed)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"NOT DONE: seed {seed}, " in done.stdout
    assert "may not make network namespaces; --unprivileged draws another schedule" in done.stdout
