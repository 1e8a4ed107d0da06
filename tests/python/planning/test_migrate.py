"""The typed face of the migration."""

import dataclasses

import numpy as np
import pytest

from evermoe import planning
from evermoe.planning.migrate import Migration
from evermoe.planning.placement import failure_domains


def placed(load_E, ranks, slots, previous=None):
    return planning.place(planning.allocate(load_E, ranks, slots), ranks, slots, previous=previous).matrix


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_new_placement_arrives_completely(order):
    rng = np.random.default_rng(3)
    old_NE = placed(rng.random(16), ranks=8, slots=6)
    old_NE = np.asarray(np.vstack([old_NE, np.zeros((2, 16), np.int64)]), order=order)  # two nodes join
    new_ME = np.asarray(placed(rng.random(16), ranks=9, slots=6), order=order)  # and one leaves
    nbytes_E = rng.integers(1, 100, 16)
    plan = planning.migrate(old_NE, new_ME, nbytes_E)
    held_NE = old_NE > 0
    for expert, source, destination, nbytes in plan.transfers:
        assert old_NE[source, expert] > 0
        assert nbytes == nbytes_E[expert]
        held_NE[destination, expert] = True
    assert held_NE[plan.node_map][new_ME > 0].all()
    assert plan.nbytes == sum(transfer[3] for transfer in plan.transfers)
    assert plan.nbytes < (nbytes_E * ((new_ME > 0) & (old_NE[:9] == 0))).sum()


def test_what_ranks_of_a_node_hold_stays_together():
    rng = np.random.default_rng(4)
    domains = failure_domains(["a", "a", "b", "b", "b", "c", "c", "d"])
    for _ in range(20):
        old_NE = (rng.random((8, 6)) < 0.5).astype(np.int64)
        old_NE[0] |= old_NE.sum(0) == 0
        new_NE = (rng.random((8, 6)) < 0.5).astype(np.int64)
        plan = planning.migrate(old_NE, new_NE, [8] * 6, domains)
        settled = np.empty_like(new_NE)
        settled[plan.node_map] = new_NE
        assert plan.nbytes == 8 * (settled > old_NE).sum() <= 8 * (new_NE > old_NE).sum()
        together = {frozenset(domain) for domain in domains}
        assert {frozenset(plan.node_map[row] for row in domain) for domain in domains} == together


def test_a_migration_is_read_only():
    plan = planning.migrate([[1]], [[1]], [8])
    assert plan == Migration(node_map=[0], transfers=[], nbytes=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.nbytes = 1  # type: ignore[misc]


def test_sizes_beyond_64_bits_in_all():
    plan = planning.migrate([[1, 1], [0, 0], [0, 0]], [[1, 1]] * 3, [2**62, 2**62 - 1])
    assert plan.nbytes == 2**64 - 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: planning.migrate([[1]], [[1], [1]], [1]), r"old: expected a row for each of the 2 rows of new"),
        (lambda: planning.migrate([[1, 0]], [[0, 1]], [1, 1]), r"old: no node holds expert 1, .* recover it first"),
        (lambda: planning.migrate([[1, 0]], [[1]], [1, 1]), r"new: expected 2 columns, one for each expert of nbytes"),
        (lambda: planning.migrate([[1]], [[1]], [1, 1]), r"old: expected 2 columns"),
        (lambda: planning.migrate([[1]], [[1]], [-1]), r"nbytes: expert 0 has -1 bytes"),
        (lambda: planning.migrate([[1, 1]], [[1, 1]], [2**63 - 1, 1]), r"nbytes: all experts together"),
        (lambda: planning.migrate([[1]], [[1]], [1.5]), r"nbytes: expected int64, got float64"),
        (lambda: planning.migrate([[-1]], [[1]], [1]), r"old: row 0 has -1 replicas of expert 0"),
        (lambda: planning.migrate(np.zeros((2, 0), int), np.zeros((1, 0), int), []), r"nbytes: expected one size"),
        (lambda: planning.migrate([1], [[1]], [1]), r"old: expected 2 dimensions"),
        (
            lambda: planning.migrate([[1], [1]], [[1]], [1], [[0, 1]]),
            r"domains: .*as many rows in new as in old, got 1",
        ),
        (lambda: planning.migrate([[1]], [[1]], [1], [[0], [0]]), r"domains: node 0 is in domain 0 and in domain 1"),
    ],
)
def test_errors_name_their_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
