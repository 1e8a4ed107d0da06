"""Work between two steps: evaluations that a loss interrupts, generation, long work of one member, stopping."""

import functools

import pytest
import torch
from safetensors.torch import load_file

import evermoe
from evermoe import ElasticSampler
from support import worker
from support.between import BATCHES, logits_loss, scenario
from support.optimizers import make_optimizer
from support.worker import Fault

STEPS = 5


@functools.cache
def expected():
    """Return what one process finds after each step."""
    model, data = worker.make_model(""), worker.dataset()
    session = evermoe.Session(model, make_optimizer("adamw", model), ElasticSampler(worker.SAMPLES, 12))
    found = {}
    for step in session.steps(STEPS):
        with step:
            step.backward(logits_loss(model, data[step.indices]))
        with torch.no_grad():
            found[session.step] = sum(logits_loss(model, batch, "sum").item() for batch in BATCHES)
    return found


def check_evaluated(*workers, steps=range(1, STEPS + 1)):
    for each in workers:
        events = each.events("evaluated")
        assert [event["step"] for event in events] == list(steps)
        for event in events:
            assert event["found"]["loss"] == pytest.approx(expected()[event["step"]], rel=1e-6)
            assert event["found"]["tokens"] == sum(batch[:, 1:].numel() for batch in BATCHES)
            assert event["again"]["tokens"] == BATCHES[0][:, 1:].numel()
            assert event["mode"] is True


@pytest.mark.parametrize(("point", "step"), [("forward", 3), ("evaluated", 3), ("forward", STEPS)])
def test_evaluation_is_repeated_when_a_member_dies_in_it(start_job, point, step):
    job = start_job()
    workers = job.start_all({"b": [Fault(point, step)]}, steps=STEPS, **scenario("evaluate"))
    assert [each.join() for each in workers] == [0, -9, 0]
    check_evaluated(workers[0], workers[2])
    assert [len(each.events("recovered")) for each in workers[::2]] == [2, 2], "uneven batches need no recovery"
    assert sorted(len(each.events("batch", step=2)) for each in workers) == [1, 2, 2]


def test_member_that_has_not_seen_the_end_of_an_evaluation_adopts_its_result(start_job):
    job = start_job(2)
    a, b = job.start_all({}, "ab", steps=STEPS, **scenario("cut"))
    assert [a.join(), b.join()] == [0, 0]
    check_evaluated(a, b)
    assert len(b.events("recovered")) == 2
    batches = [len(each.events("batch", step=3)) for each in (a, b)]
    assert sorted(batches) == [2, 3]  # nothing was computed twice


@pytest.mark.parametrize("steps", [STEPS, 3])
def test_member_that_joins_during_an_evaluation_serves_it(start_job, steps):
    """It comes while a member hangs in the evaluation of step 3, and is taken in when that one is killed."""
    job = start_job()
    workers = job.start_all({"b": [Fault("forward", 3, "hang")]}, steps=steps, **scenario("evaluate"))
    workers[1].wait_for("fault")
    joiner = job.start("d", steps=steps, **scenario("evaluate"))
    joiner.wait_for("phase", phase="agree")
    workers[1].process.kill()
    assert [each.join() for each in workers] == [0, -9, 0]
    assert joiner.join() == 0
    check_evaluated(workers[0], workers[2], steps=range(1, steps + 1))
    assert workers[0].events("recovered")[-1]["members"] == 3
    check_evaluated(joiner, steps=range(4, steps + 1))


def test_generation_of_different_lengths_needs_no_recovery_and_all_members_may_leave_by_break(start_job):
    job = start_job()
    workers = job.start_all({}, steps=20, **scenario("generate"))
    assert [each.join() for each in workers] == [0, 0, 0]
    for each in workers:
        assert [event["broken"] for event in each.events("generated")] == [None] * 3
        assert len(each.events("recovered")) == 1
        assert each.events("done")[-1]["step"] == 4


@pytest.mark.parametrize("name", ["skip", "skip_first"])
def test_member_that_skips_an_evaluation_is_named(start_job, name):
    job = start_job(2, hang_timeout=2.0)
    workers = job.start_all({}, "ab", steps=STEPS, **scenario(name))
    assert [each.join() for each in workers] == [1, 1]
    for each in workers:
        failed = each.events("failed")[-1]
        assert failed["error"] == "UnequalForwards"
        assert "on b did not come to an evaluation in which rank" in failed["message"]


def test_nobody_is_blamed_while_another_member_hangs(start_job):
    """All wait for c, which hangs: b has not come to the evaluation either, and may be about to."""
    job = start_job(3, hang_timeout=2.0)
    workers = job.start_all({"c": [Fault("skip", 2, "hang")]}, "abc", steps=STEPS, **scenario("skip"))
    assert [each.join() for each in workers[:2]] == [0, 0]
    for each in workers[:2]:
        assert each.events("done")[-1]["step"] == STEPS
        assert [found["members"] for found in each.events("recovered")] == [3, 2]


@pytest.mark.parametrize("preset", ["auto", pytest.param("gemini", marks=pytest.mark.long)])
def test_one_member_may_work_for_longer_than_the_hang_timeout(start_job, preset):
    job = start_job(2, hang_timeout=2.0, replication=2, preset=preset)
    replica = job.start("r", session={"role": "replica"}, steps=STEPS, **scenario("alone"))
    replica.wait_for("phase", phase="agree")
    workers = [*job.start_all({}, "ab", steps=STEPS, **scenario("alone")), replica]
    assert [each.join() for each in workers] == [0, 0, 0]
    for each in workers:
        assert each.events("done")[-1]["step"] == STEPS
        assert len(each.events("recovered")) == 1


def test_death_in_long_work_is_noticed_at_once(start_job):
    job = start_job(2, hang_timeout=2.0)
    faults = {name: [Fault("alone", 2)] for name in "ab"}
    workers = job.start_all(faults, "ab", steps=STEPS, **scenario("alone"))
    codes = [each.join() for each in workers]
    assert sorted(codes) == [-9, 0]
    survivor = workers[codes.index(0)]
    assert survivor.events("done")[-1]["step"] == STEPS


@pytest.mark.parametrize(("name", "step"), [("stop_all", 4), ("stop_one", 5), ("stop_inside", 4)])
def test_job_stops_on_all_members_at_one_step(start_job, tmp_path, name, step):
    job = start_job(2, checkpoints=str(tmp_path / "saved"))
    workers = job.start_all({}, "ab", steps=20, **scenario(name))
    assert [each.join() for each in workers] == [0, 0]
    assert [each.events("done")[-1]["step"] for each in workers] == [step] * 2
    assert (tmp_path / "saved" / f"step-{step:08d}" / "manifest.json").exists()
    assert job.arenas() == []
    again = job.start_all({}, "ab", steps=step, **scenario(name))
    assert [each.join() for each in again] == [0, 0]
    losses = {each.events("done")[-1]["loss"] for each in [*workers, *again]}
    assert len(losses) == 1  # also of the job that was over when it started


def test_a_death_while_members_agree_to_stop_leaves_it_to_the_others_to_stop(start_job):
    job = start_job()
    workers = job.start_all({"b": [Fault("stop", 3)]}, steps=20, **scenario("stop_before"))
    assert [each.join() for each in workers] == [0, -9, 0]
    for each in (workers[0], workers[2]):
        assert each.events("done")[-1]["step"] == 3
        assert each.events("recovered")[-1]["members"] == 2


def test_replica_nodes_and_spares_learn_that_a_job_was_stopped(start_job):
    job = start_job(2, replication=2)
    replica = job.start("r", session={"role": "replica"}, steps=20, **scenario("stop_all"))
    spare = job.start("s", session={"role": "spare"}, steps=20, **scenario("stop_all"))
    workers = job.start_all({}, "ab", steps=20, **scenario("stop_all"))
    assert [each.join() for each in workers] == [0, 0]
    assert [each.events("done")[-1]["step"] for each in workers] == [4, 4]
    assert [replica.join(), spare.join()] == [0, 0]


def test_loss_in_an_evaluation_before_a_step_leaves_no_sample_of_that_step_out(start_job):
    """The step was drawn for three members, and two of them are left when it is entered."""
    job = start_job()
    workers = job.start_all({"b": [Fault("forward", 2)]}, steps=4, **scenario("before"))
    assert [each.join() for each in workers] == [0, -9, 0]
    for step in range(4):
        used = [event for each in workers for event in each.events("used", step=step)]
        assert sum(event["weight"] for event in used) == pytest.approx(1)
        assert len({sample for event in used for sample in event["indices"]}) == 12


def test_member_that_joined_adopts_no_result_of_an_evaluation_before_it_came(start_job):
    """The others have finished one evaluation of step 2 when it comes, and one of them dies in the second."""
    job = start_job(replication=3)
    faults = {"b": [Fault("inside", 2, "hang")], "c": [Fault("second", 2)]}
    workers = job.start_all(faults, steps=3, **scenario("twice"))
    workers[1].wait_for("fault")
    joiner = job.start("d", steps=3, **scenario("twice"))
    joiner.wait_for("phase", phase="agree")
    workers[1].process.kill()
    assert [each.join() for each in (*workers, joiner)] == [0, -9, -9, 0]
    found = [each.events("twice")[-1]["found"] for each in (workers[0], joiner)]
    assert found == [["first of a", *["second of a"] * 2], ["second of a"] * 2]  # the last for a step drawn again


def test_block_of_one_member_ends_early_when_its_body_finds_a_member_lost():
    model = worker.make_model("")
    session = evermoe.Session(model, make_optimizer("adamw", model), ElasticSampler(worker.SAMPLES, 12))
    steps = session.steps(1)
    next(steps)
    with session.alone():
        session.group.drop("a member is gone")
        session.full_state_dict()
        pytest.fail("the block continues")
    assert session.group.broken == "a member is gone"
    steps.close()
    session.close()


def test_member_that_joins_takes_part_in_gathering_the_complete_model(start_job):
    """It comes while a member hangs in repeated work, and holds experts when the others gather all of them."""
    job = start_job()
    workers = job.start_all({"b": [Fault("forward", 3, "hang")]}, steps=4, **scenario("save"))
    workers[1].wait_for("fault")
    joiner = job.start("d", steps=4, **scenario("save"))
    joiner.wait_for("phase", phase="agree")
    workers[1].process.kill()
    assert [each.join() for each in (*workers, joiner)] == [0, -9, 0, 0]
    model = worker.make_model("")
    saved = [each.events("saved")[-1]["tensors"] for each in (workers[0], workers[2])]
    assert saved == [len(model.state_dict())] * 2
    folder = job.folder / "complete"
    tensors = [key for file in folder.glob("*.safetensors") for key in load_file(file)]
    assert sorted(tensors) == sorted(model.state_dict())
