"""Loads that drift move hardly any replica, and loads that change much are followed."""

import warnings

import numpy as np
import pytest

from evermoe import planning
from evermoe.planning.placement import FewerReplicas
from evermoe.state.placement import Placement, place_layers

SIZES = [(8, 3), (6, 3), (8, 4), (8, 10), (8, 32), (16, 8), (16, 64), (32, 8), (64, 8), (64, 32), (128, 16), (256, 32)]
"""Experts, nodes."""
MAX_MOVED = 0.15
TOLERATED = 1.05 / 0.95


def loads(kind, experts, random):
    if kind == "uniform":
        return np.full(experts, 1000.0)
    if kind == "zipf":
        return random.permutation(1000 / np.arange(1, experts + 1) ** 0.7)
    if kind == "hot":
        load = np.full(experts, 100.0)
        load[random.integers(experts)] *= experts / 2
        return load
    return random.lognormal(5, 1, experts)


def slot_counts(experts, nodes):
    fewest = -(-experts // nodes)
    return [slots for slots in sorted({fewest + 1, 2 * fewest, 3 * fewest}) if nodes * slots >= experts]


def arrived(after, before):
    """Experts that nodes have to get; a second replica of one that a node has is none of them."""
    return int(((after > 0) & (before == 0)).sum())


def placed(load, nodes, slots, before=None, domains=None):
    now = None if before is None else before.sum(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FewerReplicas)
        replicas = planning.allocate(load, nodes, slots, 2, now)
    return planning.place(replicas, nodes, slots, load=load, previous=before, domains=domains)


@pytest.mark.parametrize("kind", ["uniform", "zipf", "hot", "lognormal"])
@pytest.mark.parametrize(("experts", "nodes"), SIZES)
@pytest.mark.parametrize("in_racks", [False, True])
def test_a_drift_by_5_percent_moves_at_most_15_percent_of_the_replicas(kind, experts, nodes, in_racks):
    domains = [list(range(at, min(at + 2, nodes))) for at in range(0, nodes, 2)] if in_racks else None
    for slots in slot_counts(experts, nodes):
        for seed in range(4):
            random = np.random.default_rng(seed)
            load = loads(kind, experts, random)
            first = placed(load, nodes, slots, domains=domains)
            drifted = load * random.uniform(0.95, 1.05, experts)
            then = placed(drifted, nodes, slots, first.matrix, domains)
            moved = arrived(then.matrix, first.matrix)
            assert then.reason.moved == moved
            assert moved <= MAX_MOVED * nodes * slots, (slots, seed, str(then.reason))
            limit = max(1.05, first.reason.imbalance, then.reason.least_imbalance * 1.02)
            assert then.reason.imbalance <= limit * TOLERATED + 1e-9, (slots, seed, str(then.reason))
            assert then.reason.survival >= first.reason.survival - 0.05 - 1e-9
            assert then.reason.spread >= min(first.reason.spread, then.reason.spread)


@pytest.mark.parametrize(("experts", "nodes"), SIZES)
def test_a_load_that_grows_fourfold_is_followed(experts, nodes):
    slots = slot_counts(experts, nodes)[-1]
    load = np.full(experts, 1000.0)
    first = placed(load, nodes, slots)
    load[0] *= 4
    then, fresh = placed(load, nodes, slots, first.matrix), placed(load, nodes, slots)
    assert then.matrix[:, 0].sum() > first.matrix[:, 0].sum()
    each = [(load / found.matrix.sum(0)).max() for found in (then, fresh)]
    assert each[0] <= each[1] * TOLERATED + 1e-9


def test_drifts_in_a_row_do_not_add_up():
    """A placement that stays is compared with the best one now, not with the earlier load."""
    random, (experts, nodes, slots) = np.random.default_rng(0), (16, 8, 4)
    load = loads("lognormal", experts, random)
    now = placed(load, nodes, slots)
    for _ in range(200):
        load = load * random.uniform(0.95, 1.05, experts)
        now = placed(load, nodes, slots, now.matrix)
        fresh = placed(load, nodes, slots)
        assert now.reason.imbalance <= max(1.05, fresh.reason.imbalance, now.reason.least_imbalance * 1.02) * 1.11


def test_a_session_keeps_all_layers_where_they_are():
    options = Placement(min_replicas=2)
    random, nodes = np.random.default_rng(0), [f"node-{at}" for at in range(4)]
    experts = {f"layers.{at}": 16 for at in range(6)}
    load_LE = [loads("zipf", 16, random) for _ in experts]
    nothing = {path: np.zeros((4, 16), np.int64) for path in experts}
    first = place_layers(experts, load_LE, nothing, nodes, options, {})
    drifted = [row * random.uniform(0.95, 1.05, 16) for row in load_LE]
    then = place_layers(experts, drifted, first, nodes, options, {})
    moved = sum(arrived(then[path], first[path]) for path in experts)
    assert moved <= MAX_MOVED * sum(matrix.sum() for matrix in first.values())


def test_previous_ones_that_are_none_are_refused():
    with pytest.raises(ValueError, match="previous: expected one number for each of 2 experts, got 3"):
        planning.allocate([1, 2], 2, 2, previous=[1, 1, 2])
    with pytest.raises(ValueError, match="previous: expert 0 has -1"):
        planning.allocate([1, 2], 2, 2, previous=[-1, 5])
