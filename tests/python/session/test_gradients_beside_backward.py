"""Gradients go to replicas while backward computes others, in real sessions; members are lost meanwhile."""

import pytest

from support.harness import FEWEST
from support.history import check_history, check_recovered, committed_steps
from support.worker import Fault

FAULT = 5


@pytest.mark.parametrize(
    ("nth", "worker", "session"),
    [
        (1, {}, {}),
        (1, {"parts": 3}, {"max_grad_norm": 0.5}),
        (2, {}, {"dense": "sharded"}),
    ],
    ids=["one backward", "micro-batches", "sharded"],
)
def test_a_member_is_lost_while_its_gradients_are_sent(start_job, nth, worker, session):
    """At its n-th bucket of the step: the other one may be in backward, or at the vote."""
    workers = start_job(2, **FEWEST, **session).start_all({"b": [Fault("gradients", FAULT, nth=nth)]}, "ab", **worker)
    a, b = workers
    assert [each.join() for each in workers] == [0, -9]
    assert b.events("fault"), "it came to this bucket"
    check_history(workers)
    recovered = check_recovered(workers, a)
    assert (recovered["step"], recovered["steps_lost"]) == (FAULT, 0), "the step was not taken by anybody"
    assert recovered["step"] >= committed_steps([b])
    [verified] = a.events("verified")
    assert verified["digests_mismatched"] == 0, verified["units"]
