"""Parameters in bfloat16 with float32 masters, in a session that loses workers: gradients or states are sent."""

from __future__ import annotations

import pytest

from support import worker
from support.harness import FEWEST
from support.history import check_history, check_recovered
from support.optimizers import make_optimizer
from support.worker import Fault

STEPS = 12


def plain_losses(optimizer):
    """Of the same steps in one process without a session, on the complete batches."""
    import evermoe

    model, data = worker.Model().bfloat16(), worker.dataset()
    stepper = make_optimizer(optimizer, model)
    sampler = evermoe.ElasticSampler(worker.SAMPLES, 12)
    losses = []
    for _ in range(STEPS):
        loss = model(data[sampler.share(0, 1).indices])
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        sampler.advance()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", ["masters", "evermoe"])
def test_worker_is_killed_and_the_masters_are_recovered(start_job, optimizer):
    job = start_job(3, **FEWEST)
    workers = job.start_all({"b": [Fault("vote", 6)]}, optimizer=optimizer, dtype="bfloat16", steps=STEPS)
    assert [each.join() for each in workers] == [0, -9, 0], workers[0].log()
    a, _, c = workers
    check_history(workers)
    recovered = check_recovered(workers, a)
    assert (recovered["members"], recovered["steps_lost"], recovered["digests_mismatched"]) == (2, 0, 0)
    assert {each.events("verified")[-1]["digests_mismatched"] for each in (a, c)} == {0}
    committed = {event["step"]: event["loss"] for event in a.events("commit")}
    assert [committed[step] for step in sorted(committed)] == pytest.approx(plain_losses(optimizer), rel=2e-2)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.3}], ids=["plain", "clipped"])
def test_owner_of_modules_with_masters_dies_and_its_newest_step_is_not_taken_back(start_job, options):
    workers = start_job(3, shard_optimizer=True, **options).start_all(
        {"b": [Fault("update", 6)]}, optimizer="evermoe", dtype="bfloat16", steps=STEPS
    )
    assert [each.join() for each in workers] == [0, -9, 0], workers[0].log()
    a, b, c = workers
    owned = {"embedding", "first.router", "second.router", "head"}
    assert owned & set(b.events("copy")[-1]["digests"]), "it owns some"
    check_history(workers)
    recovered = a.events("recovered")[-1]
    assert (recovered["members"], recovered["steps_lost"], recovered["digests_mismatched"]) == (2, 0, 0)
    assert recovered["step"] == 7, "the others have taken the step, and so have the replicas of what it owned"
    assert {each.events("verified")[-1]["digests_mismatched"] for each in (a, c)} == {0}


@pytest.mark.long
def test_masters_are_resumed_from_shared_memory_when_all_workers_crash(start_job):
    job = start_job(2)
    options = {"optimizer": "evermoe", "dtype": "bfloat16", "steps": STEPS}
    crashed = job.start_all({name: [Fault("forward", 6)] for name in "ab"}, "ab", **options)
    assert [each.join() for each in crashed] == [-9, -9]
    again = job.start_all({}, "ab", **options)
    assert [each.join() for each in again] == [0, 0], again[0].log()
    check_history([*crashed, *again])
    assert min(event["step"] for event in again[0].events("begin")) == 6
    assert {each.events("verified")[-1]["digests_mismatched"] for each in again} == {0}
