"""Gradients go to replicas while backward computes others, in real sessions; members are lost meanwhile."""

import pytest

from support.harness import FEWEST
from support.history import check_history, check_recovered, committed_steps
from support.worker import Fault

FAULT = 5


@pytest.mark.parametrize(
    ("nth", "names", "worker", "session"),
    [
        (1, "ab", {}, FEWEST),
        (1, "ab", {"parts": 3}, {"max_grad_norm": 0.5} | FEWEST),
        (2, "ab", {}, {"shard_optimizer": True} | FEWEST),
        (1, "ab", {}, {"shard_optimizer": True, "expert_slots": 4}),
    ],
    ids=["one backward", "micro-batches", "sharded", "with experts of several members"],
)
@pytest.mark.few(3)
def test_a_member_is_lost_while_its_gradients_are_sent(start_job, nth, names, worker, session):
    """At its n-th bucket of the step: the others may be in backward, or at the vote."""
    workers = start_job(len(names), **session).start_all({"a": [Fault("gradients", FAULT, nth=nth)]}, names, **worker)
    lost, *survivors = workers
    assert [each.join() for each in workers] == [-9, *(0 for _ in survivors)]
    assert lost.events("fault"), "it came to this bucket"
    check_history(workers)
    for survivor in survivors:
        recovered = check_recovered(workers, survivor)
        assert (recovered["step"], recovered["steps_lost"]) == (FAULT, 0), "the step was not taken by anybody"
        assert recovered["step"] >= committed_steps([lost])
        [verified] = survivor.events("verified")
        assert verified["digests_mismatched"] == 0, verified["units"]
