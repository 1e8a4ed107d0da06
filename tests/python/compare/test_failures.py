"""Schedules of failures: from flags, at random, and from traces."""

from __future__ import annotations

import json
import statistics

import pytest

from benches.compare.failures import Change, at_steps, from_trace, poisson
from evermoe._native import read_bamboo

TRACE = """\
0,add,a
0,add,b
0,add,c
1000,remove,c
2000,remove,a

3000,add,d
3000,add,e
5000,remove,e
6000,remove,d
7000,remove,b
"""


def trace(text=TRACE, **options):
    events = json.loads(read_bamboo(text))["events"]
    return from_trace(events, **({"workers": 2, "least": 1} | options))


def test_node_whose_removal_was_left_out_is_not_ours_when_it_comes_back():
    schedule = trace("0,add,a\n0,add,b\n0,add,x\n1000,remove,a\n2000,remove,b\n3000,add,c\n4000,add,b\n5000,remove,b")
    assert schedule.changes == (Change("kill", 0, seconds=1.0), Change("join", 2, seconds=3.0))
    assert schedule.left_out == 1


def test_trace_kills_and_joins_where_its_nodes_are_ours():
    schedule = trace()
    assert schedule.changes == (
        Change("kill", 0, seconds=2.0),
        Change("join", 2, seconds=3.0),
        Change("kill", 2, seconds=6.0),
    )
    assert schedule.left_out == 1
    assert schedule.describe() == "2 kills and 1 join; 1 removal left out, as too few workers would be left"


def test_trace_is_sped_up_from_where_it_starts():
    schedule = trace(speedup=4.0, start=1.0)
    assert [change.seconds for change in schedule.changes] == [0.25, 0.5, 1.25]


def test_trace_never_leaves_fewer_than_the_least_nor_has_more_than_the_workers():
    lines, alive = [f"0,add,n{n}" for n in range(6)], {f"n{n}" for n in range(6)}
    for turn in range(60):
        name = sorted(alive)[turn % len(alive)]
        lines += [f"{turn * 10 + 5},remove,{name}", f"{turn * 10 + 9},add,m{turn}"]
        alive = (alive - {name}) | {f"m{turn}"}
    schedule = trace("\n".join(lines), workers=4, least=2)
    now, used = set(range(4)), set(range(4))
    for change in schedule.changes:
        if change.action == "kill":
            now.remove(change.worker)
        else:
            assert change.worker not in used
            now.add(change.worker)
            used.add(change.worker)
        assert 2 <= len(now) <= 4
    assert len(schedule.changes) > 10


@pytest.mark.parametrize("start", [0.0, 0.015])
def test_trace_with_fewer_nodes_than_workers_at_its_start_is_refused(start):
    with pytest.raises(ValueError, match=f"--trace: expected at least 3 nodes at second {start:g}, .* got [12]"):
        trace("0,add,a\n10,add,b\n20,add,c", workers=3, start=start)


def test_random_failures_have_the_mean_time_that_was_asked_for():
    options = {"replace_after": 1.0, "workers": 8, "least": 2, "until": 50_000.0}
    schedule = poisson(mtbf=50.0, seed=3, **options)
    kills = [change.seconds for change in schedule.changes if change.action == "kill"]
    gaps = [after - before for before, after in zip(kills, kills[1:], strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(50, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(50, rel=0.15)  # exponential: as large as the mean
    assert poisson(mtbf=50.0, seed=3, **options) == schedule
    assert poisson(mtbf=50.0, seed=4, **options) != schedule


def test_random_failures_are_replaced_and_leave_the_least():
    schedule = poisson(mtbf=2.0, replace_after=5.0, workers=4, least=3, seed=0, until=200.0)
    now, seconds = set(range(4)), 0.0
    for change in schedule.changes:
        assert change.seconds >= seconds
        seconds = change.seconds
        if change.action == "kill":
            now.remove(change.worker)
        else:
            now.add(change.worker)
        assert 3 <= len(now) <= 4
    assert schedule.left_out > 10
    killed = [change.seconds for change in schedule.changes if change.action == "kill"]
    joined = [change.seconds for change in schedule.changes if change.action == "join"]
    assert [at + 5.0 for at in killed][: len(joined)] == pytest.approx(joined)


def test_flags_give_deaths_at_steps():
    schedule = at_steps({1: 30, 2: 20}, 25, 4)
    assert schedule.deaths == {1: 30, 2: 20}
    assert [(change.action, change.worker) for change in schedule.changes] == [("kill", 2), ("join", 4), ("kill", 1)]
