"""Losses of nodes that take the last copy of a unit: compared with all sets of one and two nodes."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from evermoe.planning.protection import MAX_FATAL, ProtectionPlan, RankInfo, UnitProtection, fatal_losses, survival


def lost_with(holders, nodes, gone):
    """Units of which all holders are on nodes that are gone."""
    return {unit for unit, ranks in holders.items() if {nodes[rank] for rank in ranks} <= set(gone)}


@pytest.mark.parametrize("seed", range(40))
def test_they_are_those_that_lose_units(seed):
    random = np.random.default_rng(seed)
    ranks = int(random.integers(2, 9))
    nodes = [f"n{random.integers(0, 5)}" for _ in range(ranks - 1)] + ["other"]
    holders = {
        f"u{number}": set(random.choice(ranks, random.integers(1, 4)).tolist())
        for number in range(random.integers(1, 9))
    }
    found = fatal_losses(holders, nodes)
    if len(set(nodes)) == 1:
        nodes = [f"rank {rank}" for rank in range(ranks)]
    single = {node for node in nodes if lost_with(holders, nodes, [node])}
    pairs = {
        pair
        for pair in combinations(sorted(set(nodes)), 2)
        if not single & set(pair) and lost_with(holders, nodes, pair)
    }
    assert found.keys() == single | {" + ".join(pair) for pair in pairs}
    for names, units in found.items():
        assert units == len(lost_with(holders, nodes, names.split(" + ")))
    plan = ProtectionPlan(
        [UnitProtection(unit, "snapshot", min(held), tuple(held)) for unit, held in holders.items()], ""
    )
    distinct = len(set(nodes))
    one, _ = survival(plan, {unit: () for unit in holders}, [RankInfo(node, 1) for node in nodes])
    assert one == pytest.approx(1 - len(single) / distinct)


def test_a_single_machine_loses_ranks_and_the_worst_come_first():
    assert fatal_losses({"u": [0, 1]}, ["x", "x", "x"]) == {"rank 0 + rank 1": 1}
    nodes = [f"{number:03}" for number in range(100)]
    holders = {f"u{number}": [number // 2, 99 - number // 3] for number in range(100)}
    found = fatal_losses(holders, nodes)
    assert len(found) == MAX_FATAL
    assert list(found.values()) == sorted(found.values(), reverse=True)
