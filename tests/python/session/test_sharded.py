"""With dense="sharded" the optimizer's state of what is not an expert has one owner: the same training, less memory."""

import functools
import math
import tempfile
from pathlib import Path

import pytest

from evermoe import Session
from support.harness import FEWEST, Job
from support.history import check_history, check_recovered, committed_steps
from support.worker import Fault, Model, make_optimizer

FAULT = 5
"""The step in which things go wrong."""
POINTS = ["begin", "forward", "reduce", "send", "confirm", "vote", "update", "copy", "gather", "commit"]
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
    assert {step for step, _ in losses} == set(range(len(expected)))
    for step, loss in losses:
        assert math.isclose(loss, expected[step], rel_tol=tolerance), (step, loss, expected[step])


def check_verified(workers):
    """All copies are equal at the end, and so are the weights that owners have sent."""
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
    workers = start_job(dense="sharded", **options).start_all({}, optimizer=optimizer, schedule=schedule)
    assert [each.join() for each in workers] == [0, 0, 0]
    check_history(workers)
    check_losses(workers, replicated(optimizer, schedule, **options))
    check_verified(workers)
    held = [owned(each.events("done")[0]) for each in workers]
    assert set.union(*held) == {"embedding", "first.router", "second.router", "head"}
    assert sum(map(len, held)) == 4, "each has one owner"


@pytest.mark.parametrize(
    ("point", "preset"),
    [
        pytest.param(point, preset, marks=() if preset == "auto" or point in ("vote", "copy", "gather") else pytest.mark.long)
        for preset in ("auto", "gemini", "baft")
        for point in POINTS
    ],
)
def test_an_owner_is_killed_at(start_job, point, preset):
    workers = start_job(dense="sharded", preset=preset).start_all({"b": [at(point)]})
    a, b, c = workers
    assert [each.join() for each in workers] == [0, -9, 0]
    assert owned(b.events("copy", step=1)[-1]), "it owns something"
    check_history(workers)
    for survivor in (a, c):
        recovered = check_recovered(workers, survivor)
        assert FAULT - (preset != "auto") <= recovered["step"] <= FAULT + 1 + (point == "commit")
        assert recovered["step"] >= committed_steps([b])
        assert recovered["sources"].get("disk", 0) == recovered["digests_mismatched"] == 0
    check_verified([a, c])
    check_losses([a, c], replicated())
    assert owned(a.events("done")[0]) | owned(c.events("done")[0]) == {
        "embedding", "first.router", "second.router", "head"
    }  # fmt: skip
