"""Simulated jobs whose dense modules have owners, and nodes of several devices: totals by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evermoe.planning.protection import LOG_STEPS
from evermoe.simulate import Constants, Failure, Scenario, Workload, simulate
from evermoe.simulate.scenario import SimulatedOptions

NODES, LOST, LOST_AT, BACK_AT, SECONDS = 4, 3, 12.5, 22.5, 40.0
MODULE, EXPERT, MODULES, EXPERTS = 1000, 1750, 4, 4
STATE, WEIGHT = 12, 4
RATE = 1e5
"""Bytes a second of digests."""
QUICK = Constants(
    detect_seconds=0.0,
    agree_seconds=0.0,
    rebuild_seconds=0.0,
    survey_seconds=0.0,
    start_seconds=0.0,
    digest_bytes_per_second=RATE,
    network_latency_seconds=0.0,
    network_bytes_per_second=1e12,
    capture_bytes_per_second=1e12,
)
EXPERT_STATE, MODULE_STATE = EXPERTS * EXPERT * STATE, MODULE * STATE
ALL_WEIGHTS = MODULES * MODULE * WEIGHT


def job(shard_optimizer=False, *, devices=1, fails=True, constants=QUICK, replayable=True, **options):
    """Every node trains all experts of one layer; four modules are no expert. One node is lost and comes back."""
    workload = Workload(
        name="small",
        layers=1,
        experts=EXPERTS,
        expert_parameters=EXPERT,
        dense_parameters=MODULES * MODULE,
        step_seconds=1.0,
        state_bytes=STATE,
        weight_bytes=WEIGHT,
        gradient_bytes=4,
        scaling=0.0,
        replayable=replayable,
    )
    events = [(0.0, True, range(NODES)), (LOST_AT, False, [LOST]), (BACK_AT, True, [LOST])]
    return Scenario(
        workload,
        nodes=NODES,
        devices=devices,
        days=SECONDS / 86_400,
        failures=(Failure.at_times(events if fails else events[:1]),),
        constants=constants,
        options=SimulatedOptions(
            expert_slots=EXPERTS, shard_optimizer=shard_optimizer, checkpoint_interval=0, **options
        ),
    )


def test_a_node_that_comes_back_fetches_all_that_is_no_expert():
    found = simulate(job(), "auto", seed=0)
    assert (found.losses, found.recoveries, found.undone_steps) == (1, 3, 0)
    assert found.recovery_bytes == EXPERT_STATE + MODULES * MODULE_STATE
    assert found.local_bytes == found.copy_bytes == 0, "every node has all: nothing is copied"


def test_with_owners_it_fetches_weights_and_the_state_of_its_own_module():
    """The lost module is taken over by the node that has its copy, and goes back: with two it has a tenth too much."""
    found = simulate(job(shard_optimizer=True), "auto", seed=0)
    assert (found.losses, found.recoveries, found.undone_steps) == (1, 3, 0)
    sent = [members - 1 for members in (NODES, NODES - 1, NODES)]  # weights to all others, after each change
    assert found.local_bytes == MODULE_STATE
    assert found.recovery_bytes == EXPERT_STATE + MODULE_STATE + sum(sent) * ALL_WEIGHTS


def test_where_steps_cannot_be_repeated_copies_are_a_step_late():
    """An owner's copy is a snapshot then: all go back to it from snapshots of their own."""
    found = simulate(job(shard_optimizer=True, replayable=False), "auto", seed=0)
    assert (found.losses, found.recoveries, found.undone_steps, found.checkpoint_loads) == (1, 3, 1, 0)


def test_each_module_has_a_copy_of_its_steps():
    found = simulate(job(shard_optimizer=True, fails=False), "auto", seed=0)
    assert found.first_bytes == MODULES * MODULE_STATE
    assert found.copy_bytes == found.steps * MODULES * MODULE * 4


@pytest.mark.parametrize("devices", [1, 2])
def test_memory_has_weights_on_each_device_and_the_optimizer_once(devices):
    """Besides what it trains a node has two versions of its own snapshots: of what all train, two of four nodes do."""
    log_steps, versions, nodes = LOG_STEPS, 2, 2
    replicated = simulate(job(devices=devices, fails=False), "auto", seed=0)
    snapshots = versions * nodes * (EXPERT_STATE + MODULES * MODULE_STATE) // NODES
    assert replicated.memory_bytes == EXPERT_STATE + devices * MODULES * MODULE_STATE + snapshots
    sharded = simulate(job(shard_optimizer=True, devices=devices, fails=False), "auto", seed=0)
    own = MODULE * (STATE - WEIGHT)
    copy = MODULE_STATE + log_steps * MODULE * 4
    snapshots = versions * nodes * EXPERT_STATE // NODES + versions * MODULE_STATE
    assert sharded.memory_bytes == EXPERT_STATE + devices * ALL_WEIGHTS + own + copy + snapshots


@pytest.mark.parametrize("devices", [1, 4])
def test_each_process_checks_what_it_has(devices):
    """All of what every device has, and a part of the node's experts, in the survey; of what comes while that comes."""
    seconds = simulate(job(devices=devices), "auto", seed=0).seconds_by_cause
    each = (MODULES * MODULE_STATE + EXPERT_STATE / devices) / RATE
    assert "verify" not in seconds
    assert seconds["survey"] == pytest.approx(2 * each), "after the loss and as the node comes back, not at the start"


def test_digests_are_computed_while_members_agree_and_connect():
    """From when a loss is noticed; where a node comes, from when the members connect."""
    constants = replace(QUICK, agree_seconds=0.3, rebuild_seconds=0.2)
    seconds = simulate(job(constants=constants), "auto", seed=0).seconds_by_cause
    each = (MODULES * MODULE_STATE + EXPERT_STATE) / RATE
    assert seconds["survey"] == pytest.approx(2 * each - 0.3 - 2 * 0.2)


@pytest.mark.parametrize(("speed", "late"), [(1e6, 0.0), (1e5, 0.38)])
def test_training_waits_for_weights_and_the_next_vote_for_the_rest(speed, late):
    """Of 132,000 bytes a third are weights. The others come while the network is idle in the next step, or delay it."""
    scenario = job(constants=replace(QUICK, network_bytes_per_second=speed))
    assert scenario.workload.network_idle * scenario.workload.step_seconds == 0.5
    found = simulate(scenario, "auto", seed=0)
    weights = (EXPERT_STATE + MODULES * MODULE_STATE) * WEIGHT / STATE
    assert found.seconds_by_cause["fetch"] == pytest.approx(weights / speed + late)


def test_what_a_save_takes_is_the_same_for_all():
    constants = replace(QUICK, persist_seconds=0.25)
    saving = simulate(job(fails=False, constants=constants, save_interval=5), "pec", seed=0)
    assert saving.seconds_by_cause["checkpoint"] == pytest.approx(saving.steps // 5 * 0.25)
    scenario = replace(job(fails=False, constants=constants), restart_interval=10, expert_parallel=1)
    restarting = simulate(scenario, "restart", seed=0)
    assert restarting.seconds_by_cause["checkpoint"] == pytest.approx((restarting.steps - 1) // 10 * 0.25, abs=1e-3)


def test_a_preset_that_keeps_no_copies_of_modules_is_refused():
    with pytest.raises(ValueError, match=r"shard_optimizer=True leaves the optimizer's state .* lazarus has no copies"):
        simulate(job(shard_optimizer=True), "lazarus", seed=0)
