"""Experts that `pec` copies at each of its levels, and its report of tokens that no saved copy has."""

from __future__ import annotations

import numpy as np
import pytest

from evermoe.planning.ledger import TokenLedger
from evermoe.planning.selection import select_experts, select_per_rank
from support.harness import FEWEST
from support.history import check_history
from support.saving import SavingWorker

LAYERS = {"first.experts": 6, "second.experts": 4}
STEPS, SAVE_EVERY = 14, 2
SAVED, SNAPSHOT = 1, 2
"""Experts of each layer at a time."""


@pytest.mark.parametrize("order", ["load-aware", "sequential"])
def test_tokens_at_risk_are_those_since_each_expert_was_saved(start_job, tmp_path, order):
    sizes = {"experts_per_save": SAVED, "experts_per_snapshot": SNAPSHOT, "save_interval": SAVE_EVERY}
    options = {"checkpoints": str(tmp_path / "saved"), "expert_selection": order, "rebalance_interval": 0}
    job = start_job(2, preset="pec", **sizes, **options, **FEWEST)
    workers = [job.start(name, kind=SavingWorker, steps=STEPS) for name in "ab"]
    assert [each.join() for each in workers] == [0, 0]
    check_history(workers)
    counted = count(workers[0])
    assert max(waiting for _, waiting in counted) > 1, "an expert was passed over more than once"
    for each in workers:
        told = [(event["plt_at_risk"], event["starvation"]) for event in each.events("measured")]
        assert len(told) == STEPS
        for step, (expected, found) in enumerate(zip(counted, told, strict=True)):
            assert found == (pytest.approx(expected[0]), expected[1]), step
    for each in workers:
        check_choice(each, order, "saving", SAVED, SAVE_EVERY)
        check_choice(each, order, "snapshotting", SNAPSHOT, 1)


def check_choice(worker, order, event, each, every):
    """A level's experts are those that the planner chooses by this level's own K and tokens at risk: K of each layer.

    From the tokens that the worker has counted and a ledger of the test's own.
    """
    tokens = {found["step"]: found["tokens"] for found in worker.events("copy", after="update")}
    copied = {found["step"]: found["units"] for found in worker.events(event) if found["step"]}
    active = worker.events("protection_planned")[0]["active"]
    most = max(LAYERS.values())
    ranks_LE = [
        [active[f"{path}.{e}"][0] if e < number else -1 for e in range(most)] for path, number in LAYERS.items()
    ]
    ledger = TokenLedger(len(LAYERS), most, experts_per_layer=each)
    ledger.copied([range(number) for number in LAYERS.values()])  # all of them, before the first step
    for step in range(1, STEPS):
        ledger.add([tokens[step][path] + [0] * (most - number) for path, number in LAYERS.items()])
        if step % every:
            continue
        if order == "sequential":
            rows = select_experts("sequential", ledger.at_risk, ledger.checkpoint, experts_per_layer=each)
            chosen = [[e for e in row if e < number] for row, number in zip(rows, LAYERS.values(), strict=True)]
        else:
            chosen = select_per_rank(
                ledger.at_risk, ledger.checkpoint, ledger.waiting, ranks_LE, experts_per_layer=each
            )
            assert [len(row) for row in chosen] == [each, each], "K of each layer"
        names = [f"{path}.{e}" for path, row in zip(LAYERS, chosen, strict=True) for e in row]
        assert copied[step] == sorted(names), (event, step)
        ledger.copied(chosen)


def count(worker):
    """After each step the portion of tokens that no saved copy has, and the saves that passed over who waits longest.

    Of what the worker has counted and saved, without its ledger.
    """
    tokens = {event["step"]: event["tokens"] for event in worker.events("copy", after="update")}
    saved = {event["step"]: event["units"] for event in worker.events("saving")}
    assert [step for step in saved if step] == [*range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)]
    at_risk = {f"{path}.{expert}": 0 for path, experts in LAYERS.items() for expert in range(experts)}
    waits, seen, found = dict.fromkeys(at_risk, 0), dict.fromkeys(LAYERS, 0), []
    for step in range(1, STEPS + 1):
        for path, of_layer in tokens[step].items():
            seen[path] += sum(of_layer)
            for expert, number in enumerate(of_layer):
                at_risk[f"{path}.{expert}"] += number
        for unit in at_risk if step in saved else ():
            if unit in saved[step]:
                at_risk[unit] = waits[unit] = 0
            else:
                waits[unit] += at_risk[unit] > 0
        portions = [
            sum(at_risk[f"{path}.{e}"] for e in range(experts)) / seen[path] for path, experts in LAYERS.items()
        ]
        found.append((float(np.mean(portions)), max(waits[unit] for unit in at_risk if at_risk[unit])))
    return found
