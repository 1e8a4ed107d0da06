"""The typed face of the copy planners: policies, training jobs, and errors."""

import pytest

from evermoe import planning
from evermoe.planning.holders import copy_holders, training_copy_holders


def test_policies_differ_where_they_should():
    nodes = ["a", "b", "c", "d"]
    pairs = [[0, 1], [1, 0], [2, 3], [3, 2]]
    assert copy_holders(nodes, 2) == pairs
    assert copy_holders(nodes, 2, policy="mixed") == pairs
    assert copy_holders(nodes, 2, policy="group") == pairs
    assert copy_holders(nodes, 2, policy="ring") == [[0, 1], [1, 2], [2, 3], [3, 0]]


@pytest.mark.parametrize("policy", planning.holders.COPY_POLICIES)
def test_ten_thousand_nodes(policy):
    holders = copy_holders([f"node{number:05}" for number in range(10_000)], 4, policy=policy)
    assert all(len(set(ranks)) == 4 and ranks[0] == rank for rank, ranks in enumerate(holders))


def test_zero_stages_of_a_training_job():
    nodes = ["a", "b", "c", "d"]
    peers = [[0, 1], [1, 0], [2, 3], [3, 2]]
    ring = [[0, 1], [1, 2], [2, 3], [3, 0]]
    expected = {0: (peers, peers), 1: (peers, ring), 2: (peers, ring), 3: (ring, ring)}
    for zero_stage, holders in expected.items():
        found = training_copy_holders(nodes, [0, 1, 0, 1], [0, 0, 1, 1], 2, zero_stage=zero_stage)
        assert (found.parameters, found.optimizer) == holders


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: copy_holders(["a"], 1, policy="moon"),
            r"policy: expected one of mixed, group, ring, previous, got",
        ),
        (lambda: copy_holders(["a", "b", "c"], 2, policy="group"), r"copies: groups of 2 do not divide 3"),
        (lambda: training_copy_holders(["a"], [], [0], 1), r"data_parallel: expected a number for each"),
        (lambda: training_copy_holders(["a"], [0], [0, 0], 1), r"pipeline: expected a number for each"),
        (lambda: training_copy_holders(["a"], [-1], [0], 1), r"data_parallel: expected an integer"),
        (lambda: training_copy_holders(["a"] * 2, [0, 0], [0, 0], 1), r"pipeline: ranks 0 and 1 both"),
        (lambda: training_copy_holders(["a"], [0], [0], 2), r"copies: expected at most 1"),
        (lambda: training_copy_holders(["a"], [0], [0], 0), r"copies: expected 1"),
        (lambda: training_copy_holders(["a"], [0], [0], 1, zero_stage=4), r"zero_stage: expected 0 to 3"),
    ],
)
def test_errors_name_their_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
