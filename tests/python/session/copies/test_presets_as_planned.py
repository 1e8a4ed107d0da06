"""A session loses with a node what `evermoe plan --copies` says of its preset."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from evermoe.cli.plan.auto_plan import make_layout
from evermoe.cli.plan.compare import Cluster, compare
from evermoe.cli.plan.compare_presets import PresetRow, compare_presets
from evermoe.cli.plan.setting import CopySetting
from evermoe.planning.presets import PRESET_NAMES, PRESETS
from evermoe.session.session_config import session_config
from support.history import check_recovered
from support.worker import WIDTH, Fault

WORKERS = 3
EXPERTS = {"first": 6, "second": 4}
"""Of the workers' model."""
EXPERT_BYTES = 12 * 3 * WIDTH * 16
"""State of the largest one: three matrices and their two moments."""
FEWEST = 2
"""Slots for single replicas."""
MARKS = {"moetion": pytest.mark.long}
"""`test_presets.py` has the quick one."""
AMPLE, SCARCE = 2.0, 0.2
"""Parts of the experts' state that `moetion` may send in a step."""
LITTLE = 0.01
"""Steps of loss that several failures at once cost on average, which one failure does not."""


def planned(preset: str, slots: int | None, room: float) -> tuple[PresetRow, Counter[int]]:
    """Return the plan's row of the larger layer, and how many experts train on how many nodes.

    `moetion` may send `room` × the state of all experts in a step.
    """
    load_LE = np.ones((1, EXPERTS["first"]))
    config = session_config(preset=preset, checkpoints="anywhere").placement
    slots = slots or max(FEWEST + 1, FEWEST * config.min_replicas)  # the default of a session
    policies = tuple(dict.fromkeys(choices.placement for choices in PRESETS.values()))
    comparison = compare(load_LE, Cluster(WORKERS, slots, config.min_replicas, 1, (1,)), policies)
    setting = CopySetting(expert_parameters=1000, dense_parameters=1000)
    budget = round(room * load_LE.size * setting.expert_parameters * setting.state_bytes)
    layout, _ = make_layout(load_LE, comparison, replace(setting, remote_bytes_per_step=budget))
    rows = {row.preset: row for row in compare_presets(layout)}
    (matrix,) = next(each for each in comparison.results if each.policy == config.policy).matrices
    return rows[preset], Counter((matrix > 0).sum(0).tolist())


@pytest.mark.parametrize(
    ("preset", "slots", "room"),
    [
        *(
            pytest.param(preset, FEWEST, AMPLE, marks=MARKS.get(preset, pytest.mark.quick(preset)))
            for preset in PRESET_NAMES
        ),
        *(
            pytest.param(preset, None, AMPLE, marks=[pytest.mark.long] * (preset != "lazarus"))
            for preset in PRESET_NAMES
        ),
        pytest.param("moetion", FEWEST, SCARCE, marks=pytest.mark.long),
    ],
)
@pytest.mark.few(len(PRESET_NAMES))
def test_session_loses_what_the_plan_says(start_job, tmp_path, preset, slots, room):
    """Both are given moetion's budget: a plan knows the speed of the links, and a session only after some steps."""
    row, replicas = planned(preset, slots, room)
    nbytes = round(room * sum(EXPERTS.values()) * EXPERT_BYTES)
    budget = {"remote_bytes_per_step": nbytes} if preset == "moetion" else {}
    job = start_job(
        WORKERS,
        preset=preset,
        expert_slots=slots,
        rebalance_interval=0,
        join_interval=50,
        checkpoints=str(tmp_path / "saved"),
        checkpoint_interval=4,
        **budget,
    )
    workers = a, _, c = job.start_all({"b": [Fault("vote", 6)]}, steps=8)
    assert [each.join() for each in workers] == [0, -9, 0]
    trained = Counter(unit for each in workers for unit in each.events("copy")[0]["digests"])
    assert Counter(trained[f"first.experts.{expert}"] for expert in range(EXPERTS["first"])) == replicas
    for each in (a, c):
        recovered = each.events("recovered")[-1]
        is_reset = row.repeated_steps > 0 and not row.survives  # to a checkpoint
        assert (recovered["steps_lost"] > 0) == is_reset
        assert bool(recovered["lost_units"]) == is_reset
        if not is_reset:  # a version is copied during the next step, and is complete by then or not
            assert recovered["steps_undone"] <= row.repeated_steps
        if row.lost_steps < LITTLE:
            assert not recovered["stale"]
            assert row.repeated_steps or check_recovered(workers, each)["step"] >= 5
        elif slots:
            assert recovered["stale"], "each expert of the lost node had no other replica"
