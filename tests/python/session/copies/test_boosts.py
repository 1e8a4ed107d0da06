"""Experts that lost tokens count more when replicas are allotted, until they have got as many again."""

from __future__ import annotations

import pytest

from evermoe.copies.loss_ledger import BOOST
from support.harness import FEWEST
from support.history import check_history
from support.placements import PlacingWorker
from support.worker import Fault


def tokens_of(workers, unit, first, last):
    """Tokens that an expert got in steps `first` (exclusive) to `last`, as the workers counted them."""
    layer, expert = unit.rsplit(".", 1)
    copies = [event for each in workers for event in each.events("copy", after="update")]
    by_step = {event["step"]: event["tokens"][layer][int(expert)] for event in copies}
    return sum(tokens for step, tokens in by_step.items() if first < step <= last)


@pytest.mark.parametrize("second", [6, 11])
@pytest.mark.long
def test_the_next_placement_weighs_experts_that_lost_tokens(start_job, second):
    """Soon after a loss, and later, when some have got as many tokens again."""
    options = {"preset": "moetion", "remote_bytes_per_step": 30_000, "profile_steps": 0, **FEWEST}
    job = start_job(4, **options, rebalance_interval=0, join_interval=50)
    faults = {"b": [Fault("vote", 5)], "c": [Fault("vote", second)]}
    workers = [job.start(name, *faults.get(name, []), kind=PlacingWorker, steps=13) for name in "abcd"]
    assert [each.join() for each in workers] == [0, -9, -9, 0]
    check_history(workers)
    report = workers[0].events("recovered")[1]
    assert report["step"] == 5
    lost = {unit: tokens for unit, tokens in report["lost_tokens"].items() if tokens}
    assert lost
    owed = {unit for unit, tokens in lost.items() if tokens_of(workers, unit, 5, second) < tokens}
    for each in workers[::3]:
        start, first, last = each.events("placed")[-3:]
        assert start["boosts"] == first["boosts"] == {}
        weighed = {
            f"{path}.{expert}": factor
            for path, factors in last["boosts"].items()
            for expert, factor in enumerate(factors)
            if factor != 1.0
        }
        assert weighed == dict.fromkeys(owed, BOOST)
        assert last["as_weighed"]
