"""`moetion` on links of a known speed: it follows as many experts as bandwidth × time of a step has room for."""

from __future__ import annotations

import numpy as np

from evermoe.planning import select_experts
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


def test_experts_are_followed_as_the_measured_budget_has_room(start_job):
    job = start_job(MEMBERS, preset="moetion", profile_steps=10, **FEWEST, rebalance_every=0)
    workers = [job.start(name, kind=SlowLinkWorker, steps=STEPS) for name in "abc"]
    assert [each.join() for each in workers] == [0] * MEMBERS
    check_history(workers)
    told = [each.events("followed") for each in workers]
    assert [len(each) for each in told] == [STEPS] * MEMBERS
    holders = workers[0].events("arranged")[-1]["holders"]
    is_copied = np.array([[holders.get(f"{path}.{e}", ["none"])[0] == "replayed" for e in range(6)] for path in LAYERS])
    tokens, at_risk = tokens_by_step(workers[0]), np.zeros((2, 6), np.int64)
    sizes = []
    for step in range(STEPS):
        (units,) = {tuple(each[step]["units"]) for each in told}
        (budget,) = {each[step]["budget"] for each in told}
        at_risk += is_copied * np.array(tokens[step])
        expert_bytes = told[0][step]["expert_bytes"]
        if budget is None:
            assert len(units) == 1, "an eighth of ten experts"
        else:
            expected = select_experts("budget", at_risk, budget_bytes=budget, expert_bytes=expert_bytes)
            names = [f"{path}.{e}" for path, row in zip(LAYERS, expected, strict=True) for e in row]
            assert sorted(names) == sorted(units), (step, budget)
            slowest = max(each[step]["step_seconds"] for each in told)
            assert 0.5 < budget / (MEMBERS * RATE * slowest) < 1.5, "bandwidth x time of a step"
            sizes.append(len(units))
        for unit in units:
            path, _, expert = unit.rpartition(".")
            at_risk[[*LAYERS].index(path), int(expert)] = 0
    assert sizes, "links were measured"
    assert max(sizes) < is_copied.sum(), "not all have room"
