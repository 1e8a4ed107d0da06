"""Options of where experts train, as a session hands them to the planners."""

from __future__ import annotations

import numpy as np
import pytest

from evermoe import SessionConfig, planning
from evermoe.placement import place_layers

LOAD = [18.0, 17.0, 13.0, 13.0, 8.0, 7.0, 7.0, 7.0]


def placed(nodes, **options):
    """[R, E] replicas of experts with `LOAD` on ranks of these nodes."""
    config = SessionConfig(slots=4, **options)
    previous = {"layer": np.zeros((len(nodes), len(LOAD)), np.int64)}
    return place_layers({"layer": len(LOAD)}, [LOAD], previous, nodes, config, {})["layer"]


def survival(matrix, failures, domains=None):
    return float(planning.recovery_probability(matrix, failures, domains=domains))


def test_a_placement_is_made_for_as_many_failures_as_asked():
    one, default = placed("abcd", placement_failures=1), placed("abcd")
    assert (survival(one, 1), survival(default, 1)) == (0.75, 0.5)
    evenness = [planning.imbalance(matrix, LOAD, "balanced") for matrix in (one, default)]
    assert evenness[0] > evenness[1]  # the price
    assert (placed("abcd", placement_failures=2) == default).all()


def test_failures_are_those_of_nodes_and_not_of_workers():
    nodes = [node for node in "abcd" for _ in range(2)]
    domains = planning.failure_domains(nodes)
    for failures in (1, 2, 3):
        matrix = placed(nodes, placement="safest", placement_failures=failures)
        replicas = planning.allocate(LOAD, len(nodes), 4, 1)
        expected = planning.place(replicas, len(nodes), 4, "safest", LOAD, np.zeros_like(matrix), domains, failures)
        assert (matrix == expected.matrix).all()
        assert expected.reason.failures == failures


@pytest.mark.parametrize("nodes", ["a", "ab", "aabb", "aaa", "abc"])
def test_a_job_that_has_shrunk_is_placed_for_the_loss_of_all_nodes_but_one(nodes):
    most = max(1, len(planning.failure_domains(nodes)) - 1)
    for placement in planning.POLICIES:
        shrunk = placed(nodes, placement=placement, placement_failures=100)
        assert (shrunk == placed(nodes, placement=placement, placement_failures=most)).all()
