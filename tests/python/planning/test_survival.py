"""The typed face of survival: what comes out of numpy arrays and lists, against enumeration, and errors."""

import dataclasses
import itertools

import numpy as np
import pytest

from evermoe import planning
from evermoe.planning.holders import copy_holders
from evermoe.planning.survival import copy_recovery_probability


def enumerated(matrix_NE, failures):
    nodes = len(matrix_NE)
    choices = [list(alive) for alive in itertools.combinations(range(nodes), nodes - failures)]
    return sum(bool((matrix_NE[alive] > 0).any(axis=0).all()) for alive in choices) / len(choices)


@pytest.mark.parametrize("order", ["C", "F"])
def test_placements_in_any_memory_order_match_enumeration(order):
    rng = np.random.default_rng(3)
    for _ in range(20):
        matrix_NE = np.asarray(rng.integers(0, 3, (7, 5)), order=order)
        for failures in range(8):
            found = planning.recovery_probability(matrix_NE, failures)
            assert found.method == "exact"
            assert found.probability == pytest.approx(enumerated(matrix_NE, failures), abs=1e-12)


def test_domains_fail_together():
    matrix = [[1, 0], [1, 0], [0, 1], [0, 1]]
    assert float(planning.recovery_probability(matrix, 1, domains=[[0, 2], [1, 3]])) == pytest.approx(1.0)
    assert float(planning.recovery_probability(matrix, 1, domains=[(0, 1)])) == pytest.approx(2 / 3)
    assert float(planning.recovery_probability(matrix, 2, domains=[])) == pytest.approx(4 / 6)


def test_samples_say_so_and_their_error():
    matrix_NE = planning.place([2] * 8, nodes=8, slots=2).matrix
    truth = planning.recovery_probability(matrix_NE, 3)
    found = planning.recovery_probability(matrix_NE, 3, samples=2000, seed=5)
    assert (truth.method, truth.error, truth.samples) == ("exact", 0.0, None)
    assert (found.method, found.samples) == ("Monte Carlo", 2000)
    assert found.error == pytest.approx(np.sqrt(np.log(2000) / 4000))
    assert abs(found.probability - truth.probability) < found.error
    assert found == planning.recovery_probability(matrix_NE, 3, samples=2000, seed=5)
    assert found != planning.recovery_probability(matrix_NE, 3, samples=2000, seed=6)


def test_survival_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        planning.recovery_probability([[1]], 0).probability = 0.5  # type: ignore[misc]


def test_copies_of_ranks_and_units_on_nodes():
    nodes = ["a", "a", "b", "b", "c", "c"]
    holders = copy_holders(nodes, 2)
    by_rank = copy_recovery_probability(holders, 2)
    by_node = copy_recovery_probability(holders, 2, nodes=nodes)
    # three nodes in a ring of two copies: any two of them take one list; of 15 pairs of ranks 6 do
    assert by_node.probability == pytest.approx(0.0, abs=1e-12)
    assert by_rank.probability == pytest.approx(1 - 6 / 15)
    units = copy_recovery_probability([[0, 2]], 2, nodes=nodes)
    assert units.probability == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: planning.recovery_probability([[1.5]], 0), r"matrix: expected int64, got float64"),
        (lambda: planning.recovery_probability([1], 0), r"matrix: expected 2 dimensions"),
        (lambda: planning.recovery_probability([[1, -1]], 0), r"matrix: expert 1 has -1 replicas on node 0"),
        (lambda: planning.recovery_probability([[1]], 2), r"failures: expected 0 to 1"),
        (lambda: planning.recovery_probability([[1]], -1), r"failures: expected an integer"),
        (lambda: planning.recovery_probability([[1]], 1 << 70), r"failures: expected an integer"),
        (lambda: planning.recovery_probability([[1]], 0, domains=[[]]), r"domains: domain 0 is empty"),
        (lambda: planning.recovery_probability([[1]], 0, domains=[[1]]), r"domains: domain 0 names node 1"),
        (lambda: planning.recovery_probability([[1]], 0, domains=[[0], [0]]), r"domains: node 0 is in domain 0 and"),
        (lambda: planning.recovery_probability([[1]], 0, domains=[[-1]]), r"domains: expected an integer"),
        (lambda: planning.recovery_probability([[1], [1]], 2, domains=[[0, 1]]), r"failures: expected 0 to 1"),
        (lambda: planning.recovery_probability([[1]], 0, samples=0), r"samples: expected 1 to 2\^32"),
        (lambda: planning.recovery_probability([[1]], 0, samples=-3), r"samples: expected an integer"),
        (lambda: planning.recovery_probability([[1]], 0, seed=-1), r"seed: expected an integer"),
        (lambda: copy_recovery_probability([[1]], 0), r"holders: item 0 names rank 1; there are 1 ranks"),
        (lambda: copy_recovery_probability([[-1]], 0), r"holders: expected an integer"),
        (lambda: copy_recovery_probability([[0]], 2, nodes=["a"]), r"failures: expected 0 to 1"),
        (lambda: copy_recovery_probability([[0]], 0, samples=1 << 40), r"samples: expected 1 to 2\^32"),
    ],
)
def test_errors_name_their_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
