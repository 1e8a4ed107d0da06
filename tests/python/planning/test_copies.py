"""The promise of `replication`: each preset keeps every unit on that number of nodes, or refuses to."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from evermoe.planning import allocate, place
from evermoe.planning.placement import session_slots
from evermoe.planning.presets import PRESET_NAMES, PRESETS
from evermoe.planning.protection import RankInfo, UnitInfo, plan_protection, survival
from evermoe.session.session_config import session_config

NODES, EXPERTS = 5, 8
COPIES = [1, 2, 3, 4]


def config(preset, copies, dense):
    """The options of a session; None where it refuses them."""
    try:
        return session_config(preset=preset, replication=copies, shard_optimizer=dense, checkpoints="anywhere")
    except ValueError as error:
        assert ("replication" in str(error) or dense) and preset in str(error), error
        return None


def trained(options):
    """By unit, the ranks that train it, where a session of these options places it, one rank a node."""
    slots = session_slots(EXPERTS, [1] * NODES, None, options.placement.min_replicas)
    load = np.ones(EXPERTS)
    counts = allocate(load, NODES, slots, options.placement.min_replicas)
    matrix = place(counts, NODES, slots, options.placement.policy, load).matrix
    experts = {f"e{expert}": tuple(np.flatnonzero(matrix[:, expert]).tolist()) for expert in range(EXPERTS)}
    owners = {f"d{owner}": (owner,) if options.shard_optimizer else tuple(range(NODES)) for owner in range(NODES)}
    return experts | owners


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_each_unit_is_on_as_many_nodes_or_the_session_refuses(preset, copies, dense):
    options = config(preset, copies, dense)
    refuses = (preset == "pec" and copies > 2) or (preset == "lazarus" and dense)
    assert (options is None) == refuses
    if options is None:
        return
    active = trained(options)
    units = [
        UnitInfo(name, 1200, 400, ranks, 10.0, replayable=name[0] == "e", may_lag=name[0] == "e")
        for name, ranks in active.items()
    ]
    ranks = [RankInfo(f"node{rank}", 1 << 40) for rank in range(NODES)]
    plan = plan_protection(preset, units, ranks, replication=copies, budget=0.01)
    held = {each.unit: {*active[each.unit], *each.holders} for each in plan.units}
    if preset == "pec":  # a portion of the tokens is lost, as its summary says
        assert all(not each.holders for each in plan.units)
        return
    assert min(map(len, held.values())) >= copies
    for failures in (1, 2):
        losses = [{*lost} for lost in itertools.combinations(range(NODES), failures)]
        survived = sum(all(each - lost for each in held.values()) for lost in losses) / len(losses)
        assert survived == pytest.approx(survival(plan, active, ranks)[failures - 1])
        assert survived == 1.0 or copies <= failures, f"{failures} lost nodes: {survived}"


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("preset", [name for name in PRESET_NAMES if PRESETS[name].active_copies is False])
def test_what_several_nodes_train_has_snapshots_on_as_many(preset, copies, dense):
    """After a crash of all processes, and without a node's memory: a snapshot of `embed` is left elsewhere."""
    options = config(preset, copies, dense)
    if options is None:
        return
    active = trained(options)
    units = [UnitInfo(name, 1200, 400, ranks, 10.0, may_lag=name[0] == "e") for name, ranks in active.items()]
    ranks = [RankInfo(f"node{rank}", 1 << 40) for rank in range(NODES)]
    plan = plan_protection(preset, units, ranks, replication=copies, budget=0.01)
    for each in plan.units:
        keepers = {each.primary, *each.holders} if each.kind == "snapshot" else {*each.own}
        assert len(keepers) >= min(copies, len(active[each.unit])), each
