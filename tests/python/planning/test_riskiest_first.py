"""The order in which missing copies are made: compared with what is chosen one unit at a time."""

from __future__ import annotations

import numpy as np
import pytest

from evermoe.planning.protection import riskiest_first


def nodes_with(unit, holders, nodes):
    """Nodes that have a unit; ranks, where all are on one node."""
    return {nodes[rank] if len(set(nodes)) > 1 else rank for rank in holders[unit]}


@pytest.mark.parametrize("seed", range(40))
def test_no_unit_comes_after_one_that_more_nodes_have(seed):
    random = np.random.default_rng(seed)
    ranks, count = int(random.integers(1, 9)), int(random.integers(0, 12))
    nodes = [f"n{random.integers(0, 4)}" for _ in range(ranks)]
    names = [f"u{number}" for number in random.permutation(count)]
    holders = {name: set(random.choice(ranks, random.integers(1, ranks + 1)).tolist()) for name in names}
    tokens = {name: float(random.integers(0, 3)) for name in names}
    order = riskiest_first(holders, tokens, nodes)
    left = set(names)
    for unit in order:
        fewest = min(len(nodes_with(other, holders, nodes)) for other in left)
        most = max(tokens[other] for other in left if len(nodes_with(other, holders, nodes)) == fewest)
        equal = [o for o in left if len(nodes_with(o, holders, nodes)) == fewest and tokens[o] == most]
        assert unit == min(equal)
        left.remove(unit)
    assert not left
    others = dict(sorted(holders.items()))
    assert riskiest_first(others, tokens, nodes) == order, "whatever the order in which units are named"
