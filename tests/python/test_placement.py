"""Options of where experts train, as a session hands them to the planners."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evermoe import MoE, Placement, planning
from evermoe.planning.dispatch import imbalance
from evermoe.planning.owners import place_owners
from evermoe.planning.placement import POLICIES, failure_domains
from evermoe.state.placement import place_layers, rebalanced
from evermoe.state.training_state import TrainingState

LOAD = [18.0, 17.0, 13.0, 13.0, 8.0, 7.0, 7.0, 7.0]


def placed(nodes, **options):
    """[R, E] replicas of experts with `LOAD` on ranks of these nodes."""
    config = Placement(expert_slots=4, **options)
    previous = {"layer": np.zeros((len(nodes), len(LOAD)), np.int64)}
    return place_layers({"layer": len(LOAD)}, [LOAD], previous, nodes, config, {})["layer"]


def survival(matrix, failures, domains=None):
    return float(planning.recovery_probability(matrix, failures, domains=domains))


def test_a_placement_is_made_for_as_many_failures_as_asked():
    one, default = placed("abcd", failures=1), placed("abcd")
    assert (survival(one, 1), survival(default, 1)) == (0.75, 0.5)
    evenness = [imbalance(matrix, LOAD, "balanced") for matrix in (one, default)]
    assert evenness[0] > evenness[1]  # the price
    assert (placed("abcd", failures=2) == default).all()


def test_failures_are_those_of_nodes_and_not_of_workers():
    nodes = [node for node in "abcd" for _ in range(2)]
    domains = failure_domains(nodes)
    for failures in (1, 2, 3):
        matrix = placed(nodes, policy="safest", failures=failures)
        replicas = planning.allocate(LOAD, len(nodes), 4, 1)
        expected = planning.place(replicas, len(nodes), 4, "safest", LOAD, np.zeros_like(matrix), domains, failures)
        assert (matrix == expected.matrix).all()
        assert expected.reason.failures == failures


@pytest.mark.parametrize("nodes", ["a", "ab", "aabb", "aaa", "abc"])
def test_a_job_that_has_shrunk_is_placed_for_the_loss_of_all_nodes_but_one(nodes):
    most = max(1, len(failure_domains(nodes)) - 1)
    for placement in POLICIES:
        shrunk = placed(nodes, policy=placement, failures=100)
        assert (shrunk == placed(nodes, policy=placement, failures=most)).all()


def spread(nbytes, owners, ranks, loads=None):
    return [
        (loads or [0] * ranks)[rank] + sum(size for size, owner in zip(nbytes, owners, strict=True) if owner == rank)
        for rank in range(ranks)
    ]


def moved(nbytes, before, after):
    return sum(size for size, old, new in zip(nbytes, before, after, strict=True) if old != new)


@pytest.fixture
def sizes():
    return np.random.default_rng(0).integers(1, 100, 60).tolist()


@pytest.mark.parametrize("loads", [[0, 0, 0, 0], [500, 0, 100, 200]])
def test_owners_fill_all_ranks_equally(sizes, loads):
    owners = place_owners(sizes, [range(4)] * 60, [[]] * 60, loads)
    even = (sum(sizes) + sum(loads)) / 4
    assert max(spread(sizes, owners, 4, loads)) <= even + max(sizes) / 2


def test_owners_stay_when_a_rank_is_lost_and_when_one_comes(sizes):
    four = place_owners(sizes, [range(4)] * 60, [[]] * 60, [0] * 4)
    lost = sum(size for size, owner in zip(sizes, four, strict=True) if owner == 3)
    three = place_owners(sizes, [[o] if o < 3 else [] for o in four], [[]] * 60, [0] * 3)
    assert moved(sizes, four, three) == lost, "what survives stays"
    assert max(spread(sizes, three, 3)) <= 1.1 * sum(sizes) / 3
    again = place_owners(sizes, [[o] for o in three], [[]] * 60, [0] * 4)
    assert moved(sizes, three, again) == spread(sizes, again, 4)[3], "the newcomer gets some, and nothing else moves"
    assert max(spread(sizes, again, 4)) <= 1.1 * sum(sizes) / 4
    assert place_owners(sizes, [[o] for o in again], [[]] * 60, [0] * 4) == again


def test_an_orphan_goes_where_a_copy_of_it_is_unless_that_rank_is_full():
    assert place_owners([10, 10, 10, 10], [[0], [0], [], []], [[], [], [1], [1]], [0, 0]) == [0, 0, 1, 1]
    assert place_owners([10, 10, 10, 10], [[0], [0], [], []], [[], [], [0], [0]], [0, 0]) == [0, 0, 1, 1]


def test_a_unit_larger_than_an_even_share_has_an_owner_too():
    assert place_owners([100, 1, 1], [[], [], []], [[], [], []], [0, 0]) == [0, 1, 1]
    assert place_owners([], [], [], [3, 4]) == []


@pytest.mark.parametrize(
    ("load", "matrix", "moves"),
    [
        ([8, 1, 1, 1, 1, 1], [[1, 1, 0, 1, 0, 1], [0, 1, 1, 0, 1, 1]], True),
        ([1, 1, 1, 1, 1, 1], [[1, 1, 0, 1, 0, 1], [0, 1, 1, 0, 1, 1]], False),
        ([8, 1, 1, 1, 1, 1], [[1] * 6] * 2, False),
    ],
    ids=["the load has shifted", "it has not", "every expert is everywhere"],
)
def test_experts_move_where_a_layer_becomes_much_more_even(load, matrix, moves):
    layer = MoE(4, 4, 6, top_k=1)
    state = TrainingState(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    layer.experts.matrix_RE, layer.experts.token_split = np.array(matrix), "balanced"
    layer.experts.count.add(np.array(load), is_counted=True)
    state.expert_load.add_step()
    found = rebalanced(state, ["a", "b"], Placement(expert_slots=sum(matrix[0])), {})
    assert (found is not None) == moves
