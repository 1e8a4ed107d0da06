"""Who keeps copies of what, from plain data."""

from __future__ import annotations

import pytest

from evermoe.planning.protection import LOGGED_STEPS, RECORD_BYTES, RankInfo, UnitInfo, plan_protection

GRADIENT_BYTES = 1000


def members(trainers, replicas=0, **options):
    roles = [True] * trainers + [False] * replicas
    return [RankInfo(f"node{rank}", 1 << 40, trains, **options) for rank, trains in enumerate(roles)]


def experts(number, ranks):
    return [UnitInfo(f"e{e}", 3 * GRADIENT_BYTES, GRADIENT_BYTES, (e % ranks,), 10.0, True) for e in range(number)]


@pytest.mark.parametrize("preset", ["auto", "gemini", "moetion"])
@pytest.mark.parametrize("copies", [2, 3, 4])
@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_each_copy_is_on_another_rank(preset, copies, replicas):
    plan = plan_protection(preset, experts(6, 3), members(3, replicas), copies=copies, budget=0.01)
    nodes = set(range(3, 3 + replicas))
    for each in plan.units:
        assert len({each.primary, *each.holders}) == 1 + len(each.holders), each
        assert len(nodes & {*each.holders}) == min(replicas, len(each.holders)), each


@pytest.mark.parametrize("fitting", [0, 1, 2])
def test_units_that_do_not_fit_into_the_logs_are_followed_by_snapshots(fitting):
    room = fitting * LOGGED_STEPS * (GRADIENT_BYTES + RECORD_BYTES)
    plan = plan_protection("auto", experts(6, 3), members(3, log_bytes=room), copies=2, budget=0.01)
    kept = [each for each in plan.units if each.kind == "replayed"]
    for rank in range(3):
        assert sum(rank in each.holders for each in kept) <= fitting
    assert len(kept) == (0, 3, 6)[fitting]
    assert {(each.kind, each.period) for each in plan.units if each not in kept} <= {("snapshot", 1)}
    assert ("too large for replay_log_bytes" in plan.summary) == (fitting < 2)
