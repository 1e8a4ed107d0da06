"""Who keeps copies of what, from plain data."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict

import pytest

from evermoe.planning.protection import (
    LOGGED_STEPS,
    OWN_VERSIONS,
    RECORD_BYTES,
    RankInfo,
    UnitInfo,
    plan_protection,
    survival,
)

GRADIENT_BYTES = 1000


def members(trainers, replicas=0, **options):
    roles = [True] * trainers + [False] * replicas
    return [RankInfo(f"node{rank}", 1 << 40, trains, **options) for rank, trains in enumerate(roles)]


def experts(number, ranks):
    return [UnitInfo(f"e{e}", 3 * GRADIENT_BYTES, GRADIENT_BYTES, (e % ranks,), 10.0, True) for e in range(number)]


@pytest.mark.parametrize("link", [None, (5e-5, 1e9)])
def test_the_plan_uses_what_ranks_report(link):
    (rank,) = members(1, link=link)
    told = RankInfo.from_json(json.loads(json.dumps(asdict(rank))))
    assert told == rank
    plan_protection("auto", experts(2, 2), [told, *members(1)], replication=2, budget=0.01)


@pytest.mark.parametrize("preset", ["auto", "gemini", "moetion"])
@pytest.mark.parametrize("copies", [2, 3, 4])
@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_each_copy_is_on_another_rank(preset, copies, replicas):
    plan = plan_protection(preset, experts(6, 3), members(3, replicas), replication=copies, budget=0.01)
    nodes = set(range(3, 3 + replicas))
    for each in plan.units:
        assert len({each.primary, *each.holders}) == 1 + len(each.holders), each
        assert len(nodes & {*each.holders}) == min(replicas, len(each.holders)), each


@pytest.mark.parametrize(
    ("trainers", "peers"),
    [(4, [[1], [0], [3], [2]]), (5, [[1], [0], [3], [4], [2]]), (6, [[1], [0], [3], [2], [5], [4]])],
)
def test_gemini_copies_in_groups_and_the_rest_in_a_ring(trainers, peers):
    """Gemini, Algorithm 1: more pairs of lost nodes are survived than with one ring of all nodes."""
    plan = plan_protection("gemini", experts(trainers, trainers), members(trainers), replication=2, budget=0.01)
    assert [list(each.holders) for each in plan.units] == peers


@pytest.mark.parametrize("trainers, copies, is_sharded", list(itertools.product([2, 3, 4, 5], [2, 3], [False, True])))
def test_moetion_copies_what_peers_lack_to_all_of_them(trainers, copies, is_sharded):
    """As ZeRO has it: parts of the state that one rank alone has, or what all have anyway."""
    everyone = tuple(range(trainers))
    units = [
        UnitInfo(f"dense.{rank}", 12, 4, (rank,) if is_sharded else everyone, 0.0, rank > 0, may_lag=False)
        for rank in everyone
    ]
    plan = plan_protection("moetion", units, members(trainers), replication=copies, budget=0.01)
    nodes = [{*unit.active, *each.holders} for unit, each in zip(units, plan.units, strict=True)]
    assert all(len(each) >= min(copies, trainers) for each in nodes)
    received = [sum(rank in each.holders for each in plan.units) for rank in everyone]
    assert set(received) == {(min(copies, trainers) - 1) * is_sharded}
    kinds = [each.kind for each in plan.units]
    assert kinds == (["snapshot", *["replayed"] * (trainers - 1)] if is_sharded else ["active"] * trainers)


@pytest.mark.parametrize("copies", [2, 3, 4])
@pytest.mark.parametrize("seed", range(20))
def test_moetion_sends_a_unit_to_as_many_nodes_as_it_lacks(copies, seed):
    """Counted from who trains it: what peers hold anyway is not copied, and of a unit on two nodes of three one copy is
    made, not two.
    """
    draw = random.Random(seed)
    nodes = draw.randint(2, 6)
    ranks = [RankInfo(f"node{rank % nodes}", 1 << 40) for rank in range(draw.randint(nodes, 2 * nodes))]
    active = [tuple(sorted(draw.sample(range(len(ranks)), draw.randint(1, len(ranks))))) for _ in range(12)]
    units = [UnitInfo(f"e{number}", 300, 100, held, 10.0, True) for number, held in enumerate(active)]
    plan = plan_protection("moetion", units, ranks, replication=copies, budget=0.01)
    for held, each in zip(active, plan.units, strict=True):
        on = {ranks[rank].node for rank in held}
        assert len(each.holders) == max(0, min(copies, nodes) - len(on)), each
        assert len(on | {ranks[rank].node for rank in each.holders}) == max(len(on), min(copies, nodes))
        assert (each.kind == "active") == (not each.holders)


@pytest.mark.parametrize("fitting", [0, 1, 2])
def test_units_that_do_not_fit_into_the_logs_are_followed_by_snapshots(fitting):
    room = fitting * LOGGED_STEPS * (GRADIENT_BYTES + RECORD_BYTES)
    plan = plan_protection("auto", experts(6, 3), members(3, log_bytes=room), replication=2, budget=0.01)
    kept = [each for each in plan.units if each.kind == "replayed"]
    for rank in range(3):
        assert sum(rank in each.holders for each in kept) <= fitting
    assert len(kept) == (0, 3, 6)[fitting]
    assert {(each.kind, each.period) for each in plan.units if each not in kept} <= {("snapshot", 1)}
    assert ("too large for replay_log_bytes" in plan.summary) == (fitting < 2)


@pytest.mark.parametrize("preset", ["auto", "gemini", "baft", "lazarus"])
@pytest.mark.parametrize(
    "trainers, copies, per_node", [(1, 2, 1), (2, 2, 1), (4, 2, 1), (4, 3, 1), (5, 2, 1), (6, 2, 2)]
)
def test_survival_counts_the_losses_that_leave_every_unit(preset, trainers, copies, per_node):
    ranks = [RankInfo(f"node{rank // per_node}", 1 << 40) for rank in range(trainers)]
    units = experts(6, trainers)
    plan = plan_protection(preset, units, ranks, replication=copies, budget=0.01)
    active = {unit.name: unit.active for unit in units}
    held = [{ranks[rank].node for rank in (*active[each.unit], *each.holders)} for each in plan.units]
    nodes = sorted({rank.node for rank in ranks})
    for failures, found in zip((1, 2), survival(plan, active, ranks), strict=True):
        losses = list(itertools.combinations(nodes, failures)) if failures < len(nodes) else [nodes]
        survived = [all(each - {*lost} for each in held) for lost in losses]
        assert found == pytest.approx(sum(survived) / len(losses)), failures


@pytest.mark.parametrize("left, copied", [(0, 0), (1 << 20, 6)])
def test_own_snapshots_come_before_copies_of_others(left, copied):
    """Each rank has two experts, of which it keeps two versions itself."""
    own = OWN_VERSIONS * 2 * 3 * GRADIENT_BYTES
    ranks = [RankInfo(f"node{rank}", own + left) for rank in range(3)]
    plan = plan_protection("auto", experts(6, 3), ranks, replication=2, budget=0.01)
    assert sum(bool(each.holders) for each in plan.units) == copied


def test_auto_computes_with_the_slowest_measured_link():
    def planned(*links):
        ranks = [RankInfo(f"node{rank}", 1 << 40, True, 0.1, 0.01, link=link) for rank, link in enumerate(links)]
        units = [UnitInfo(f"e{e}", 30_000, 10_000, (e % 3,), 10.0, e % 2 == 0) for e in range(12)]
        plan = plan_protection("auto", units, ranks, replication=2, budget=0.01)
        return [(each.kind, each.period) for each in plan.units]

    fast, slow = (1e-5, 1e9), (1e-4, 1e7)  # 30,000 bytes take 40 µs, or 3.1 ms
    assert planned(fast, fast, fast) == planned(None, None, None)
    assert max(period for _, period in planned(fast, fast, fast)) == 1
    assert max(period for _, period in planned(fast, slow, None)) == 2


def test_auto_computes_with_the_slowest_measured_host_link():
    def planned(*speeds):
        ranks = [
            RankInfo(f"node{rank}", 1 << 40, True, 0.1, 0.1, link=(1e-5, 1e10), host_speed=speed)
            for rank, speed in enumerate(speeds)
        ]
        units = [UnitInfo(f"e{e}", 300_000_000, 10_000, (e % 3,), 10.0, False) for e in range(3)]
        plan = plan_protection("auto", units, ranks, replication=2, budget=0.01)
        return max(each.period for each in plan.units)

    assert planned(5e10, 5e10, 5e10) == 1  # 300 MB take 6 ms of a step of 100
    assert planned(None, None, None) == planned(1e9, 1e9, 1e9) == 3  # 300 ms, as is assumed before one is measured
    assert planned(5e10, 1e9, None) == 3


@pytest.mark.parametrize("replayable", [False, True])
def test_state_of_one_rank_that_training_needs_is_copied_whatever_it_costs(replayable):
    """An owner's unit: an expert in its place would be left without a copy where there is no time for any."""
    slow = {"step_seconds": 1e-3, "network_seconds": 1e-9, "link": (1e-3, 1e3)}
    nbytes = 3 * GRADIENT_BYTES
    units = [
        UnitInfo("expert", nbytes, GRADIENT_BYTES, (0,), 10.0, replayable),
        UnitInfo("owned", nbytes, GRADIENT_BYTES, (1,), 0.0, replayable, may_lag=False),
        UnitInfo("everywhere", nbytes, GRADIENT_BYTES, (0, 1, 2), 0.0, may_lag=False),
    ]
    plan = plan_protection("auto", units, members(3, **slow), replication=2, budget=1e-6)
    expert, owned, everywhere = (plan.by_unit[unit.name] for unit in units)
    assert not expert.holders or expert.period > 1
    assert (owned.kind, owned.primary, owned.period, len(owned.holders)) == ("snapshot", 1, 1, 1)
    assert (everywhere.kind, everywhere.holders) == ("active", ())
    assert "snapshots of 1 more essential units, beyond the budget" in plan.summary
    plan = plan_protection("auto", units, members(3), replication=2, budget=0.01)
    assert plan.by_unit["owned"].kind == ("replayed" if replayable else "snapshot")
    assert "beyond the budget" not in plan.summary
