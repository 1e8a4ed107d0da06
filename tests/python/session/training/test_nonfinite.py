"""A loss or gradient that is not a number on one worker: all of them stop with the state as it is, or skip the step."""

import math

import pytest

from support.harness import FEWEST
from support.history import check_history, check_recovered
from support.worker import Fault


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0, "preset": "gemini"}], ids=["auto", "clipped"])
def test_all_members_stop_and_name_the_step_and_the_member(start_job, kind, options):
    """A replica node, too. `test_gradients.py` has the other messages."""
    job = start_job(**options)
    replica = job.start("r", session={"role": "replica"})
    replica.wait_for("phase", phase="agree")
    workers = [job.start(name, poison={5: kind} if name == "b" else {}) for name in "abc"]
    assert [each.join() for each in (*workers, replica)] == [1, 1, 1, 1]
    rank = workers[1].events("share")[-1]["rank"]
    for each in (*workers, replica):
        failed = each.events("failed")[0]
        assert failed["error"] == "NonFiniteLoss"
        assert (
            f"step 5: the loss or a gradient is infinite or not a number, from rank {rank} on b." in failed["message"]
        )
    assert [each.events("update")[-1]["step"] for each in workers] == [4, 4, 4]
    again = job.start_all({})
    assert [each.join() for each in again] == [0, 0, 0]
    check_history([*workers, *again])
    for each in again:
        assert check_recovered([*workers, *again], each)["step"] == 5


@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 1.0}, {"preset": "gemini"}], ids=["auto", "clipped", "gemini"]
)
def test_all_members_skip_the_update_and_replicas_do_so_too(start_job, options):
    kind = "gradient" if options else "loss"
    job = start_job(on_nonfinite="skip", **options, **FEWEST)
    faults = {"b": [Fault("forward", 8)]}
    workers = [job.start(n, *faults.get(n, []), poison={5: kind} if n == "a" else {}, steps=12) for n in "abc"]
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    for each in workers:
        [skipped] = each.events("skipped")
        reported = {event["step"]: event["loss"] for event in each.events("commit")}
        assert {step for step, loss in reported.items() if math.isnan(loss)} == ({5} if kind == "loss" else set())
        assert (skipped["step"], skipped["rank"]) == (5, workers[0].events("share", step=5)[0]["rank"])
        assert [event["step"] for event in each.events("update")][:6] == [0, 1, 2, 3, 4, 6]
        before, after = (each.events("copy", after="update", step=step)[0]["digests"] for step in (5, 6))
        changed = {unit for unit in before if before[unit] != after[unit]}
        assert changed == {"session"}, "the sampler moves on, and the model stays"
    for survivor in (workers[0], workers[2]):
        recovered = check_recovered(workers, survivor)
        assert recovered["steps_lost"] == 0
        # Copies of `gemini` travel in the windows of the next step, which may come after the kill.
        assert recovered["step"] in ((7, 8) if "preset" in options else (8,))


@pytest.mark.parametrize("point", ["vote", "skipped", "copy"])
@pytest.mark.long
def test_death_in_a_skipped_step(start_job, point):
    job = start_job(on_nonfinite="skip", **FEWEST)
    faults = {"b": [Fault(point, 6 if point == "copy" else 5)]}
    workers = [job.start(n, *faults.get(n, []), poison={5: "gradient"} if n == "a" else {}, steps=10) for n in "abc"]
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    before = {}
    for each in workers:
        before |= each.events("copy", step=5)[-1]["digests"]
    for survivor in (workers[0], workers[2]):
        recovered = survivor.events("recovered")[-1]
        assert (recovered["step"], recovered["steps_lost"]) == (5 if point == "vote" else 6, 0)
        assert {event["step"] for event in survivor.events("skipped")} == {5}
        found = [e for e in survivor.events("copy", after="phase") if e["time"] <= recovered["time"]][-1]["digests"]
        assert all(before[unit] == value for unit, value in found.items() if unit != "session")
