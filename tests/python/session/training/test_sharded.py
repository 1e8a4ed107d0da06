"""With shard_optimizer the optimizer's state of what is not an expert has one owner: the same training, less memory."""

import functools
import math
import tempfile
from pathlib import Path

import pytest

from evermoe import ElasticSampler, Session
from support.harness import FEWEST, Job
from support.history import check_history, check_recovered, committed_steps
from support.optimizers import make_optimizer
from support.worker import Fault, Model

FAULT = 5
"""The step in which things go wrong."""
POINTS = ["begin", "forward", "reduce", "send", "confirm", "vote", "update", "gather", "copy", "commit"]
NOT_SHARDED = {"session", "norm"}
"""Units that no optimizer steps."""


def at(point, action="kill", step=FAULT):
    """The events of copying name the step that they complete."""
    return Fault(point, step + (point in ("copy", "confirm", "send", "gather")), action)


@functools.cache
def replicated(optimizer="adamw", schedule=None, **options):
    """Losses by step of a run on three workers without owners, to which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), 3, **options)
        try:
            workers = job.start_all({}, optimizer=optimizer, schedule=schedule)
            assert [each.join() for each in workers] == [0, 0, 0]
            return [event["loss"] for event in workers[0].events("commit")]
        finally:
            job.close()


def check_losses(workers, expected, tolerance=1e-6):
    losses = [(event["step"], event["loss"]) for each in workers for event in each.events("commit")]
    for step, loss in losses:
        assert math.isclose(loss, expected[step], rel_tol=tolerance), (step, loss, expected[step])


def check_verified(workers):
    """All steps are taken; all copies are equal at the end, and so are the weights that owners have sent."""
    for each in workers:
        [verified] = each.events("verified")
        assert verified["digests_mismatched"] == 0, verified["units"]


def owned(event):
    """Units of an event with digests that are no experts and have owners."""
    return {unit for unit in event["digests"] if "experts" not in unit} - NOT_SHARDED


@pytest.mark.parametrize(
    ("optimizer", "schedule", "options"),
    [
        ("adamw", None, {}),
        ("evermoe", "warmup", {"max_grad_norm": 0.5}),
        ("sgd", "cosine", {"preset": "gemini"}),
        ("sgd-fused", None, {"preset": "baft", "max_grad_norm": 0.5}),
    ],
)
def test_losses_are_those_of_a_replicated_optimizer(start_job, optimizer, schedule, options):
    workers = start_job(shard_optimizer=True, **options).start_all({}, optimizer=optimizer, schedule=schedule)
    assert [each.join() for each in workers] == [0, 0, 0]
    check_history(workers)
    check_losses(workers, replicated(optimizer, schedule, **options))
    check_verified(workers)
    held = [owned(each.events("done")[0]) for each in workers]
    assert set.union(*held) == {"embedding", "first.router", "second.router", "head"}
    assert sum(map(len, held)) == 4, "each has one owner"


def test_two_workers_compute_the_same_bits(start_job):
    losses, weights = [], []
    for dense in ("replicated", "sharded"):
        workers = start_job(2, shard_optimizer=dense == "sharded").start_all({}, "ab")
        assert [each.join() for each in workers] == [0, 0]
        losses.append([event["loss"] for event in workers[0].events("commit")])
        done = [each.events("done")[0]["digests"] for each in workers]
        every = {unit: value for each in done for unit, value in each.items()}
        weights.append({unit: value for unit, value in every.items() if unit != "session"})  # it has the last norm
    assert losses[0] == losses[1]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("point", "preset"),
    [
        pytest.param(
            point, preset, marks=() if preset == "auto" or point in ("vote", "copy", "gather") else pytest.mark.long
        )
        for preset in ("auto", "gemini", "baft", "moetion")
        for point in POINTS
    ],
)
def test_an_owner_is_killed_at(start_job, point, preset):
    workers = start_job(shard_optimizer=True, preset=preset).start_all({"b": [at(point)]})
    a, b, c = workers
    assert [each.join() for each in workers] == [0, -9, 0]
    assert owned(b.events("copy", step=1)[-1]), "it owns something"
    check_history(workers)
    for survivor in (a, c):
        if point in ("update", "gather", "commit") and preset in (
            "auto",
            "moetion",
        ):  # its replicas alone have seen what becomes of its units
            recovered = survivor.events("recovered")[-1]
        else:
            recovered = check_recovered(workers, survivor)
        assert FAULT - (preset in ("gemini", "baft")) <= recovered["step"] <= FAULT + 1 + (point == "commit")
        assert recovered["step"] >= committed_steps([b])
        assert recovered["sources"].get("disk", 0) == recovered["digests_mismatched"] == 0
    check_verified([a, c])
    check_losses([a, c], replicated())
    assert owned(a.events("done")[0]) | owned(c.events("done")[0]) == {
        "embedding", "first.router", "second.router", "head"
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0, "preset": "gemini"}], ids=["auto", "clipped"])
def test_a_skipped_update_changes_nothing_anywhere(start_job, options):
    job = start_job(on_nonfinite="skip", shard_optimizer=True, **options)
    faults = {"b": [Fault("forward", 8)]}
    workers = [job.start(n, *faults.get(n, []), poison={5: "gradient"} if n == "a" else {}, steps=12) for n in "abc"]
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    for each in workers:
        assert not each.events("gather", step=6)
        before, after = (each.events("copy", after="update", step=step)[0]["digests"] for step in (5, 6))
        assert {unit for unit in before if before[unit] != after[unit]} == {"session"}
    for survivor in workers[::2]:
        # Copies of `gemini` travel in the windows of the next step, which may come after the kill.
        assert check_recovered(workers, survivor)["step"] in ((7, 8) if "preset" in options else (8,))
    check_verified(workers[::2])


def test_owners_follow_the_members(start_job):
    """Two die, one after the other, and two come; the last one alone owns everything meanwhile."""
    job = start_job(shard_optimizer=True)
    job.open_gate(5)
    a, b, c = job.start_all({}, gated=True, steps=30)
    for step, dying in ((5, b), (8, c)):
        for each in job.workers:
            if each.process.is_alive():
                each.wait_for("gate", step=step)
        dying.signal(9)
        job.open_gate(step + 3)
        dying.join()
    a.wait_for("gate", step=11)
    assert owned(a.events("copy")[-1]) == {"embedding", "first.router", "second.router", "head"}
    d, e = (job.start(name, gated=True, steps=30) for name in "de")
    job.take_in(d, e, until=30)
    assert [each.join() for each in (a, d, e)] == [0, 0, 0]
    check_history(job.workers)
    assert sum(len(owned(each.events("done")[0])) for each in (a, d, e)) == 4
    check_verified([a, d, e])


@pytest.mark.parametrize(("first", "then"), [("sharded", "replicated"), ("replicated", "sharded")])
@pytest.mark.parametrize("place", ["checkpoint", "memory"])
def test_a_job_resumes_with_the_other_kind(start_job, tmp_path, first, then, place):
    """Units are the same in both: in checkpoints, and in the memory that a crashed job leaves behind."""
    saved = {"checkpoints": str(tmp_path / "saved"), "checkpoint_interval": 5} if place == "checkpoint" else {}
    job = start_job(**saved)
    crash = [Fault("forward", 6)]
    workers = [job.start(name, *crash, session={"shard_optimizer": first == "sharded"}) for name in "abc"]
    assert [each.join() for each in workers] == [-9, -9, -9]
    if place == "checkpoint":
        for name in "abc":
            job.lose_node(name)
    again = [job.start(name, session={"shard_optimizer": then == "sharded"}) for name in "abc"]
    assert [each.join() for each in again] == [0, 0, 0]
    check_history([*workers, *again], undone=True)
    for each in again:
        recovered = each.events("recovered")[0]
        assert recovered["step"] == (5 if place == "checkpoint" else 6)
    check_losses([*workers, *again], replicated())
    check_verified(again)


@pytest.mark.parametrize("point", ["vote", "update"])
@pytest.mark.long
def test_an_owner_is_killed_in_a_job_with_a_replica_node(start_job, point):
    job = start_job(2, shard_optimizer=True, **FEWEST)
    replica = job.start("y", session={"role": "replica"})
    replica.wait_for("phase", phase="agree")
    a, b = job.start_all({"b": [at(point)]}, "ab")
    assert [each.join() for each in (a, b, replica)] == [0, -9, 0], replica.log()
    check_history([a, b])
    recovered = a.events("recovered")[-1]
    assert (recovered["step"], recovered["steps_lost"]) == (FAULT + (point == "update"), 0)
    check_verified([a, replica])
    check_losses([a], replicated())


def test_a_session_alone(start_job):
    [worker] = start_job(1, shard_optimizer=True).start_all({}, "a")
    assert worker.join() == 0
    check_losses([worker], replicated())


@pytest.mark.parametrize("preset", ["lazarus"])
def test_presets_that_do_not_copy_each_step_are_refused(tmp_path, preset):
    model = Model()
    with pytest.raises(
        ValueError, match=rf"the preset {preset} makes no copies .* use preset gemini or pec or baft or moetion or auto"
    ):
        Session(
            model,
            make_optimizer("adamw", model),
            ElasticSampler(4, 2),
            preset=preset,
            checkpoints=tmp_path,
            shard_optimizer=True,
        )


@pytest.mark.parametrize("point", ["vote", "update", "copy"])
def test_a_module_with_buffers_is_copied_as_it_is(start_job, point):
    """Its steps cannot be repeated from gradients: its state is copied after each, and all may go back by a step."""
    workers = start_job(shard_optimizer=True, **FEWEST).start_all({"c": [at(point)]}, model="balance")
    assert [each.join() for each in workers] == [0, 0, -9]
    assert "first.router" in owned(workers[2].events("copy", step=1)[-1])
    check_history(workers)
    for survivor in workers[:2]:
        recovered = check_recovered(workers, survivor)
        assert FAULT - 1 <= recovered["step"] <= FAULT + 1
        assert recovered["step"] >= committed_steps([workers[2]])
    check_verified(workers[:2])


def test_a_deferred_model_has_owners(start_job):
    workers = start_job(shard_optimizer=True).start_all({"b": [at("update")]}, deferred=True)
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    check_verified([workers[0], workers[2]])
    held = [owned(each.events("done")[0]) for each in (workers[0], workers[2])]
    assert set.union(*held) == {"embedding", "first.router", "second.router", "head"} and sum(map(len, held)) == 4
