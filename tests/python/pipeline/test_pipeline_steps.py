"""Steps of a pipeline on 2 stages of 2 ranks: the losses of one process, through deaths; mistakes are named."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import evermoe
from evermoe.errors import UnsupportedState
from support.pipeline_worker import PEERS, STAGES, Stage, batch, counted_rows, sum_loss
from support.pipelines import RANKS, Pipeline

STEPS, RATE, WIDTH = 9, 1e-3, 96
SCALER = {"init_scale": 2.0**127, "growth_factor": 4.0, "backoff_factor": 2.0**-20, "growth_interval": 3}
WAYS = {
    "means": {"attempts": "means", "parts": 2},
    "interleaved": {"attempts": "counts", "parts": 2, "chunks": 2},
    "counts": {"attempts": "counts", "parts": 2, "copies": {"max_grad_norm": 0.5}},
    "scaler": {"attempts": "means", "scaler": SCALER, "factor": 1024.0, "copies": {"max_grad_norm": 0.5}},
    "counts and scaler": {"attempts": "counts", "parts": 2, "scaler": SCALER, "factor": 1024.0},
}


def plain(attempts, parts=1, scaler=None, copies=None, factor=1.0, chunks=1):
    """Losses, the weights' sums, rank by rank, and the scale of one process, whose batch is that of both peers."""
    model = nn.Sequential(*(Stage(number, WIDTH, 0) for number in range(STAGES * chunks)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    scaling = torch.amp.GradScaler("cpu", enabled=bool(scaler), **scaler or {})
    norm, losses = (copies or {}).get("max_grad_norm"), []
    for step in range(STEPS):
        inputs, target = torch.cat([batch(step, peer, WIDTH, parts) for peer in range(PEERS)], 1)
        if attempts == "counts":
            loss = sum_loss(model(inputs), target) / counted_rows(target).sum()
        else:
            loss = nn.functional.mse_loss(model(inputs), target)
        optimizer.zero_grad()
        scaling.scale(loss * factor).backward()
        scaling.unscale_(optimizer)
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        scaling.step(optimizer)
        scaling.update()
        losses.append(loss.item())
    stages = [model[number] for stage in range(STAGES) for number in range(stage, len(model), STAGES)]
    weights = [parameter.double().sum().item() for part in stages for parameter in part.parameters()]
    return losses, weights, scaling.get_scale()


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_one_process_through_two_deaths(start_job, way):
    losses, weights, scale = plain(**WAYS[way])
    options = copy.deepcopy(WAYS[way])
    pipeline = Pipeline(start_job(RANKS), steps=STEPS, rate=RATE, **options)
    started = [pipeline.start(rank, kill_in_step={3: 3, 0: 6}.get(rank)) for rank in range(RANKS)]
    for victim in (3, 0):
        pipeline.lose(started[victim])
        pipeline.start(victim)
    done = pipeline.finish()
    for each in pipeline.ranks:
        for event in each.events("step"):
            assert event["loss"] == pytest.approx(losses[event["step"] - 1], abs=1e-5)
    assert {event["step"] for event in pipeline.ranks[1].events("step")} == set(range(1, STEPS + 1))
    found = [value for rank in range(0, RANKS, PEERS) for value in done[rank]["weights"]]
    assert found == pytest.approx(weights, abs=1e-3)  # sums of up to 9216 numbers
    assert [each["different"] for each in done] == [[]] * RANKS
    assert {each["scale"] for each in done} == {scale}
    if "scaler" in WAYS[way]:
        assert 1 < scale < SCALER["init_scale"]  # it has overflowed, and the newcomers know


MISTAKES = {
    "schedule.step": "UnsupportedState: a loss of session.loss_function was computed outside of step.run",
    "no loss function": "UnsupportedState: step 0: 0 ranks have computed a loss that the session knows, expected 2",
    "no run": "UnsupportedState: step.run(...) was not called inside `with step:`",
    "count without loss": "ValueError: step.run: count was given on a rank that has computed no loss",
    "some counts": "ValueError: 1 of 2 members gave count, the others did not",
    "optimizer.step": "UnsupportedState: optimizer.step() was called inside `with step:`",
    "unequal runs": "UnequalForwards: step 0: rank 0 of the pipeline ran 2 schedules, rank 2 ran 1",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_step_is_named(start_job, mistake):
    """By the ranks that make it; those that have lost them before they came to it wait for others, and end."""
    limit = 20.0 if mistake == "unequal runs" else 5.0  # all ranks meet again, each once its own wait is over
    pipeline = Pipeline(
        start_job(RANKS), attempts=mistake, steps=2, copies={"hang_timeout": 3.0, "quorum_timeout": limit}
    )
    for each in range(RANKS):
        pipeline.start(each)
    assert [each.join() for each in pipeline.ranks] == [1] * RANKS
    assert any(MISTAKES[mistake] in each.log() for each in pipeline.ranks)


PLACE = {"stage": 0, "stages": 2, "membership": evermoe.Membership(lighthouse="http://localhost:1", job="x")}


@pytest.fixture
def session():
    module = nn.Linear(2, 2)
    made = evermoe.PipelineSession(module, torch.optim.SGD(module.parameters()), lambda session: None, **PLACE)
    yield made
    made.close()


def begin(session, schedule=None):
    """A step of a session that is not connected."""
    loop = session._loop
    loop.schedule = schedule
    loop.current = loop.new_step()
    return loop.current.__enter__()


class Schedule:
    """As far as a step knows one: a run computes the loss of each microbatch once."""

    scale_grads = True

    def __init__(self, compute, outputs):
        self.compute, self.outputs = compute, outputs

    def step(self, losses, return_outputs):
        assert not self.scale_grads
        assert not return_outputs
        found = [self.compute(output, None) for output in self.outputs]
        for loss in found:
            loss.backward()
        losses += found


def test_what_a_schedule_does_itself_is_refused_by_name(session):
    step = begin(session)
    with pytest.raises(UnsupportedState, match="schedule runs the backward passes of its microbatches itself"):
        step.backward(torch.ones(1, requires_grad=True))
    with pytest.raises(ValueError, match="expected n to be a whole number, >= 1, got 0"):
        step.micro_batches(0)
    (part,) = step.micro_batches(1)
    with pytest.raises(ValueError, match="expected count to be a number of 0 or more"):
        part.run(count=-1)
    with pytest.raises(ValueError, match="expected rows that 3 parts divide evenly, got 4"):
        next(step.micro_batches(3)).of(torch.zeros(4, 2))
    assert [part.of(torch.arange(4)).tolist() for part in step.micro_batches(2)] == [[0, 1], [2, 3]]
    with pytest.raises(UnsupportedState, match="outside of `with step:`"):
        session._loop.new_step().run()


def test_losses_that_cannot_be_weighed_are_refused(session):
    weight = torch.ones(1, requires_grad=True)
    compute = session.loss_function(lambda output, target: output)
    with pytest.raises(UnsupportedState, match="a loss was computed outside of a step"):
        compute(weight * 2, None)
    schedule = Schedule(compute, [torch.ones(1)])
    step = begin(session, schedule)
    for wrong, found in ((torch.ones(1), "without a gradient"), (torch.ones(2, requires_grad=True), r"shape \[2\]")):
        schedule.outputs = [wrong]
        with pytest.raises(ValueError, match=rf"loss_function: expected the loss, .* {found}"):
            step.run()
    schedule.outputs = [weight * 2, weight * 3]
    assert step.run(count=4) == [2, 3]
    assert schedule.scale_grads
    runs = step.runs
    assert (weight.grad.item(), runs.loss.item(), runs.count, runs.losses) == (5, 5, 4, 2)
    schedule.outputs = [weight * 1]
    with pytest.raises(ValueError, match="count was given in some runs of this step"):
        step.run()


def test_a_loss_that_a_scaler_has_scaled_is_refused(session):
    weight, scaler = torch.ones(1, requires_grad=True), torch.amp.GradScaler("cpu")
    compute = session.loss_function(lambda output, target: scaler.scale(output))
    with pytest.raises(UnsupportedState, match=r"scaled by a torch.amp.GradScaler"):
        begin(session, Schedule(compute, [weight * 2])).run()


def test_a_scaler_for_parameters_in_float16_is_refused():
    module = nn.Linear(2, 2, dtype=torch.float16)
    with pytest.raises(UnsupportedState, match="cannot scale back gradients in float16"):
        refused(module, scaler=torch.amp.GradScaler("cpu"))


def refused(module, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(module.parameters())
    return evermoe.PipelineSession(module, optimizer, lambda session: None, **PLACE | options)


def test_several_optimizers_are_refused_by_name():
    stage = torch.nn.Linear(2, 2)
    optimizers = [torch.optim.Muon([stage.weight]), torch.optim.AdamW([stage.bias])]
    with pytest.raises(UnsupportedState, match="PipelineSession: expected one optimizer, got 2: Muon, AdamW"):
        refused(stage, optimizers)


def test_routers_that_follow_the_load_are_refused_by_name():
    router = evermoe.Router(8, 4, 2, balance_rate=1e-3)
    stage = torch.nn.Sequential(evermoe.MoE.of(router, evermoe.Experts(evermoe.Expert(8, 16), 4)))
    with pytest.raises(evermoe.errors.UnsupportedState, match=r"layer 0\.experts expects the load of all ranks"):
        refused(stage)


def test_tensor_parallel_stages_are_refused_by_name(tmp_path):
    marked = nn.Linear(2, 2)
    marked.weight.tensor_model_parallel = True
    with pytest.raises(UnsupportedState, match="parameter weight is divided among tensor-parallel ranks"):
        refused(marked)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        divided = parallelize_module(nn.Sequential(nn.Linear(2, 2)), mesh, {"0": ColwiseParallel()})
        with pytest.raises(UnsupportedState, match=r"parameter 0\.weight is divided among tensor-parallel ranks"):
            refused(divided)
        with pytest.raises(UnsupportedState, match="DistributedDataParallel, at the top of the model"):
            refused(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    finally:
        dist.destroy_process_group()


def test_what_is_no_scheduler_is_refused():
    with pytest.raises(
        ValueError, match=r"expected scheduler to be a torch.optim.lr_scheduler.LRScheduler, got 'cosine'"
    ):
        refused(nn.Linear(2, 2), scheduler="cosine")
