"""Where experts go in a recovery: to ranks that have their bytes already, as far as the load and the nodes allow."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

import evermoe
from evermoe import Placement, planning
from evermoe.planning.placement import failure_domains
from evermoe.planning.recovery import recovery_plan
from evermoe.recovery.survey import Holding, Inventory, Standing
from evermoe.recovery.target import ExpertTarget
from evermoe.state.placement import place_layers
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit
from evermoe.state.version import version_of

LAYER = "moe.experts"
EXPERTS = 12
NOW = version_of(1, 9)


@pytest.fixture(scope="module")
def state():
    model = nn.ModuleDict({"moe": evermoe.MoE(4, 6, EXPERTS)})
    return TrainingState(model, evermoe.optim.AdamW(model.parameters()))


def holding(expert, kind, version=NOW):
    return Holding(expert_unit(LAYER, expert), version, expert, kind)


def inventory(trained, copied, load, version=NOW, **standing):
    """Return the offer of a rank that trains some experts and keeps copies of others."""
    holdings = [holding(e, "active", version) for e in trained] + [holding(*copy) for copy in copied]
    return Inventory(Standing(version, True, **standing), holdings, [], True, load=[load])


def target(state, nodes, config):
    return ExpertTarget(state, SimpleNamespace(rank=0, size=len(nodes)), nodes, config, None)


def from_peers(state, inventories, matrix):
    """Bytes of experts that ranks get from each other for a placement."""
    needs = [[expert_unit(LAYER, int(e)) for e in np.flatnonzero(row)] for row in matrix]
    sizes = [(expert_unit(LAYER, e), state.catalog.by_name[expert_unit(LAYER, e)].nbytes) for e in range(EXPERTS)]
    plan = recovery_plan(sizes, [each.holdings for each in inventories], needs)
    assert plan.version == NOW
    return sum(dict(sizes)[unit] for unit, source, destination, _ in plan.transfers if source != destination)


def settings(ranks_of_node, config):
    """Ranks' inventories after a node has died, and nodes: the survivors train what they did, and keep some copies."""
    for seed in range(40):
        random = np.random.default_rng(seed)
        nodes = [f"n{rank // ranks_of_node}" for rank in range(4 * ranks_of_node)]
        load = (random.random(EXPERTS) ** 2 + 0.01).tolist()
        empty = {LAYER: np.zeros((len(nodes), EXPERTS), np.int64)}
        held_RE = place_layers({LAYER: EXPERTS}, [load], empty, nodes, config, {})[LAYER]
        shifted = (np.array(load) * np.exp(random.normal(0, 0.7, EXPERTS))).tolist()
        copies: list[list[tuple[int, str]]] = [[] for _ in nodes]
        for expert in range(EXPERTS):
            on = {nodes[rank] for rank in np.flatnonzero(held_RE[:, expert])}
            others = [rank for rank, node in enumerate(nodes) if node not in on]
            if len(on) == 1:
                copies[min(others, key=lambda rank: len(copies[rank]))].append((expert, "snapshot"))
        dead = f"n{seed % 4}"
        alive = [rank for rank, node in enumerate(nodes) if node != dead]
        trained = [np.flatnonzero(held_RE[rank]).tolist() for rank in alive]
        yield (
            [inventory(experts, copies[rank], shifted) for rank, experts in zip(alive, trained, strict=True)],
            [nodes[rank] for rank in alive],
        )


def survival(matrix, nodes):
    domains = failure_domains(nodes)
    return [float(planning.recovery_probability(matrix, lost, domains=domains)) for lost in (1, 2)]


@pytest.mark.parametrize("policy", ["balanced", "safest", "mro"])
@pytest.mark.parametrize("ranks_of_node", [1, 2, 3])
def test_fewer_bytes_come_from_peers_and_a_node_costs_what_it_did(state, ranks_of_node, policy):
    config = Placement(policy=policy)
    without, with_copies = 0, 0
    for inventories, nodes in settings(ranks_of_node, config):
        trained = np.zeros((len(nodes), EXPERTS), np.int64)
        for rank, each in enumerate(inventories):
            trained[rank] = [holding(expert, "active") in each.holdings for expert in range(EXPERTS)]
        load = [inventories[0].load[0]]
        placed = place_layers({LAYER: EXPERTS}, load, {LAYER: trained}, nodes, config, {})[LAYER]
        settled = target(state, nodes, config).place(NOW, inventories)[LAYER]
        assert sorted(map(tuple, settled)) == sorted(map(tuple, placed))
        assert survival(settled, nodes) == survival(placed, nodes)
        before, after = from_peers(state, inventories, placed), from_peers(state, inventories, settled)
        assert after <= before
        without, with_copies = without + before, with_copies + after
    assert with_copies < without


def test_all_ranks_compute_the_same_placement(state):
    config = Placement()
    for inventories, nodes in settings(2, config):
        found = []
        for rank in range(len(nodes)):
            group = SimpleNamespace(rank=rank, size=len(nodes))
            found.append(ExpertTarget(state, group, nodes, config, None).place(NOW, inventories)[LAYER])
        assert all((matrix == found[0]).all() for matrix in found)


def placed_for(state, inventories):
    nodes = [f"n{rank}" for rank in range(len(inventories))]
    return target(state, nodes, Placement(expert_slots=6)).place(NOW, inventories)[LAYER]


def test_copies_of_another_version_and_files_do_not_count(state):
    even = [1.0] * EXPERTS
    none = placed_for(state, [inventory([], [], even), inventory([], [], even)])
    for kind, version in (("snapshot", version_of(1, 8)), ("persisted", NOW)):
        first = [(expert, kind, version) for expert in np.flatnonzero(none[1]).tolist()]
        assert (placed_for(state, [inventory([], first, even), inventory([], [], even)]) == none).all()
    first = [(expert, "replayed") for expert in np.flatnonzero(none[1]).tolist()]
    now = placed_for(state, [inventory([], first, even), inventory([], [], even)])
    assert (now == none[::-1]).all()


def test_the_start_of_a_job_counts_nothing_as_held(state):
    even = [1.0] * EXPERTS
    fresh = [inventory(range(EXPERTS), [], even, version=0), inventory([], [], even, version=0)]
    nodes = ["a", "b"]
    matrix = target(state, nodes, Placement(expert_slots=6)).place(0, fresh)[LAYER]
    empty = {LAYER: np.zeros((2, EXPERTS), np.int64)}
    assert (matrix == place_layers({LAYER: EXPERTS}, [even], empty, nodes, Placement(expert_slots=6), {})[LAYER]).all()


def test_experts_that_lost_tokens_get_replicas_before_others(state):
    """MoEtion, section 3.5: their load counts 10 % more."""
    load = [1.0] * EXPERTS
    load[7] = 1.09
    boosted = {LAYER: [1.1 if expert == 5 else 1.0 for expert in range(EXPERTS)]}
    for boosts, replicated in (({}, 7), (boosted, 5)):
        inventories = [inventory([], [], load, boosts=boosts) for _ in range(2)]
        matrix = target(state, ["a", "b"], Placement(expert_slots=7)).place(NOW, inventories)[LAYER]
        assert np.flatnonzero(matrix.sum(0) > 1).tolist() == [replicated]
