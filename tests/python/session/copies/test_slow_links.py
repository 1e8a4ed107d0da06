"""`moetion` on links of a known speed: it follows as many experts as bandwidth × time of a step has room for."""

from __future__ import annotations

import numpy as np
import pytest

from evermoe.planning.load import LoadAverage
from evermoe.planning.selection import select_experts
from evermoe.state.expert_load import LOAD_HALF_LIFE
from support.harness import FEWEST
from support.history import check_history
from support.slow_links import RATE, SlowLinkWorker

LAYERS = {"first.experts": 6, "second.experts": 4}
MEMBERS, STEPS = 3, 20


def tokens_by_step(each):
    """[L, E] tokens of each step, as a worker counted them after its update."""
    found = {}
    for event in each.events("copy", after="update"):
        found[event["step"] - 1] = [(row := event["tokens"][path]) + [0] * (6 - len(row)) for path in LAYERS]
    return found


@pytest.mark.long
def test_experts_are_followed_as_the_measured_budget_has_room(start_job):
    job = start_job(MEMBERS, preset="moetion", profile_steps=10, **FEWEST, rebalance_interval=0)
    workers = [job.start(name, kind=SlowLinkWorker, steps=STEPS) for name in "abc"]
    assert [each.join() for each in workers] == [0] * MEMBERS
    check_history(workers)
    sizes, copied = check_choices(workers)
    assert sizes, "links were measured"
    assert max(sizes) < copied, "not all have room"
    check_budgets(workers)


def check_choices(workers):
    """Numbers of experts that were followed by a measured budget, and of those that have copies."""
    told = [each.events("followed") for each in workers]
    assert [len(each) for each in told] == [STEPS] * MEMBERS
    holders = workers[0].events("protection_planned")[-1]["holders"]
    is_copied = np.array([[holders.get(f"{path}.{e}", ["none"])[0] == "replayed" for e in range(6)] for path in LAYERS])
    tokens, at_risk = tokens_by_step(workers[0]), np.zeros((2, 6), np.int64)
    waiting, seen = np.zeros_like(at_risk), np.zeros_like(at_risk)
    average, sizes = LoadAverage(2, 6, half_life=LOAD_HALF_LIFE), []
    for step in range(STEPS):
        (units,) = {tuple(each[step]["units"]) for each in told}
        (budget,) = {each[step]["budget"] for each in told}
        expected_LE = np.maximum(np.rint(average.loads), 1).astype(np.int64)
        if budget is None:
            assert len(units) == 1, "an eighth of ten experts"
        else:
            expected = select_experts(
                "budget",
                is_copied * (at_risk + expected_LE),
                budget_bytes=budget,
                expert_bytes=told[0][step]["expert_bytes"],
            )
            names = [f"{path}.{e}" for path, row in zip(LAYERS, expected, strict=True) for e in row]
            assert sorted(names) == sorted(units), (step, budget)
            sizes.append(len(units))
        average.add(tokens[step])
        at_risk += np.array(tokens[step])
        for unit in units:
            path, _, expert = unit.rpartition(".")
            at_risk[[*LAYERS].index(path), int(expert)] = waiting[[*LAYERS].index(path), int(expert)] = 0
        waiting[at_risk > 0] += 1
        seen += np.array(tokens[step])
        portions = (is_copied * at_risk).sum(1) / seen.sum(1)
        hungry = waiting[is_copied & (at_risk > 0)]
        for each in workers:
            (told_risk,) = each.events("measured", step=step)
            assert told_risk["plt_at_risk"] == pytest.approx(portions.mean())
            assert told_risk["starvation"] == (hungry.max() if len(hungry) else 0)
    return sizes, is_copied.sum()


def check_budgets(workers):
    """Each is the time of the slowest member's step times what all links, or all hosts, carry: to the byte."""
    plans = list(zip(*[list(measured(each)) for each in workers], strict=True))
    assert any(each[0]["budgets"][1] is not None for each in plans)
    for plan in plans:
        slowest = max(each["step_seconds"] for each in plan)
        for kind, speeds in enumerate(([each["link"] for each in plan], [each["host"] for each in plan])):
            known = [speed for speed in speeds if speed is not None]
            full = [min(known, default=None) if speed is None else speed for speed in speeds]
            expected = int(slowest * sum(full)) if known else None
            assert {each["budgets"][kind] for each in plan} == {expected}
        remote = plan[0]["budgets"][0]
        assert remote is None or 0.5 < remote / (MEMBERS * RATE * slowest) < 1.5, "bandwidth x time of a step"
    for each in workers:
        begins = [event["time"] for event in each.events("begin")]
        assert 0.5 < plans[-1][0]["step_seconds"] / np.median(np.diff(begins)[1:10]) < 1.5


def measured(worker):
    """The budgets of a worker, each with the speed of the latest capture before it."""
    host = None
    for event in worker.events():
        if event["event"] == "captured":
            host = event["nbytes"] / event["seconds"]
        elif event["event"] == "budgeted":
            yield event | {"host": host}
