"""`pec` tells after each step how many tokens are in no saved copy, and how long an expert has waited for one."""

from __future__ import annotations

import numpy as np
import pytest

from support.harness import FEWEST
from support.history import check_history
from support.saving import SavingWorker

LAYERS = {"first.experts": 6, "second.experts": 4}
STEPS, SAVE_EVERY = 14, 2


@pytest.mark.parametrize("order", ["load-aware", "sequential"])
def test_tokens_at_risk_are_those_since_each_expert_was_saved(start_job, tmp_path, order):
    sizes = {"experts_per_save": 1, "experts_per_snapshot": 2, "save_every": SAVE_EVERY}
    options = {"checkpoint_dir": str(tmp_path / "saved"), "expert_selection": order, "rebalance_every": 0}
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
