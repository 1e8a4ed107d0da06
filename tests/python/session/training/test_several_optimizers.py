"""Several optimizers in one session: each steps its parameters, and any parameter is in exactly one."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, ReduceLROnPlateau

import evermoe
from evermoe.copies.replay.replayable import find_arithmetics
from evermoe.copies.replay.sender import GradientSender
from evermoe.copies.replay.source import GradientRecord
from evermoe.errors import UnsupportedState
from evermoe.optim.combined import as_one
from evermoe.session.gradients import step_optimizer
from evermoe.state import loop_state
from evermoe.state.loop_state import LoopParts
from evermoe.state.lr_schedule import as_one_schedule
from support.flat_options import grouped
from support.habits import DATA, SAMPLES, SHARDED, STEPS, Model, elastic, mean_loss, muon_and_adamw, plain
from support.history import check_history
from support.worker import Fault

MUON_AND_ADAMW = muon_and_adamw(torch.optim.Muon)


@pytest.mark.parametrize("kind", SHARDED)
@pytest.mark.parametrize("names", ["abc", "abr"])
@pytest.mark.few(2)
def test_sharded_equals_plain_training_through_a_death(start, kind, names):
    """`r` is a replica node. Steps of AdamW are repeated, and states of Muon sent: each unit in its own way.

    Muon multiplies in bfloat16: where sums of gradients are rounded in another way, a loss may change by 2e-5.
    """
    expected = plain(kind)
    found, logs = start(elastic, names, kind)
    for name in names.translate({ord("b"): None, ord("r"): None}):
        steps = {event["step"]: event for event in found[name] if event["event"] == "commit"}
        assert list(steps) == list(range(STEPS)), logs[name][-3000:]
        for step, values in enumerate(expected):
            for key, value in values.items():
                assert steps[step][key] == pytest.approx(value, abs=1e-4), (step, key)
        checked = [event for event in found[name] if event["event"] in ("recovered", "verified")]
        assert {event["event"] for event in checked} == {"recovered", "verified"}
        assert {event["digests_mismatched"] for event in checked} == {0}
        assert "copies of what Muon steps are snapshots of the state" in logs[name]


@pytest.mark.parametrize("dense", ["replicated", "sharded"])
@pytest.mark.few(1)
def test_a_worker_joins_and_another_one_dies(start_job, dense):
    """All members have equal bits at equal versions."""
    job = start_job(2, shard_optimizer=dense == "sharded")
    job.open_gate(6)
    workers = job.start_all({"b": [Fault("reduce", 24)]}, "ab", gated=True, steps=30, optimizer="muon")
    workers[0].wait_for("gate", step=6)
    workers.append(job.start("c", steps=30, optimizer="muon"))
    job.take_in(workers[2], until=30)
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers, undone=True)
    assert workers[2].events("recovered")[0]["sources"]["peer"] > 0
    for each in (workers[0], workers[2]):
        assert each.events("verified")[0]["digests_mismatched"] == 0


# ---- one process


def session_of(model, optimizer, folder, **options):
    sampler = evermoe.ElasticSampler(SAMPLES, 12)
    membership = options.pop("membership", None) or evermoe.Membership(memory_dir=str(folder))
    return evermoe.Session(model, optimizer, sampler, membership=membership, **options)


def train(session, model, steps):
    """The numbers of the steps that were taken."""
    taken = []
    for step in session.steps(steps):
        with step:
            step.backward(mean_loss(model, DATA[step.indices]))
        taken.append(step.number)
    return taken


def of_model(names):
    """Optimizers of the parameters with these names, and of all others."""

    def make(model):
        first = [p for name, p in model.named_parameters() if name in names]
        others = [p for name, p in model.named_parameters() if name not in names]
        return [torch.optim.SGD(first, lr=0.1), torch.optim.AdamW(others, fused=True)]

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda model: [torch.optim.Muon([model.head.weight]), torch.optim.AdamW(model.parameters())],
            r"parameter head.weight is in Muon \(number 0\) and AdamW \(number 1\): expected each parameter in one",
        ),
        (
            lambda model: [torch.optim.Muon([model.head.weight]), torch.optim.AdamW([model.head.bias])],
            "parameter embedding.weight is in none of the optimizers Muon, AdamW: add it to one of them, or freeze it",
        ),
        (
            lambda model: [torch.optim.SGD(model.parameters(), lr=0.1), None],
            r"expected optimizer to be a torch.optim.optimizer.Optimizer, got \['SGD', 'NoneType'\]",
        ),
        (lambda model: [], r"expected optimizer to be a torch.optim.optimizer.Optimizer, got \[\]"),
        (
            lambda model: [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(Model().parameters(), lr=0.1)],
            r"the optimizer's group 0 has a parameter of shape \[16, 8\] that is not the model's",
        ),
    ],
    ids=["twice", "never", "no optimizer", "none", "another model"],
)
def test_each_trainable_parameter_is_in_exactly_one(tmp_path, make, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        session_of(model, make(model), tmp_path)


def test_frozen_parameters_may_be_in_none(tmp_path):
    model = Model()
    model.embedding.requires_grad_(False)
    others = [p for name, p in model.named_parameters() if not name.startswith(("embedding", "head"))]
    optimizers = torch.optim.AdamW(others, fused=True), torch.optim.SGD(model.head.parameters(), lr=0.1)
    session = session_of(model, optimizers, tmp_path)
    assert session.optimizer is optimizers and session.learning_rate == 1e-3
    train(session, model, 2)


def test_scheduler_of_an_optimizer_that_the_session_does_not_step_is_refused(tmp_path):
    model = Model()
    optimizers = MUON_AND_ADAMW(model)
    stray = ExponentialLR(torch.optim.SGD(model.parameters(), lr=0.1), 0.5)
    for scheduler in (stray, [ExponentialLR(optimizers[0], 0.5), stray]):
        with pytest.raises(ValueError, match="scheduler ExponentialLR is of another SGD than the session's"):
            session_of(model, optimizers, tmp_path, scheduler=scheduler)


def test_several_experts_of_one_layer_are_not_one_matrix(tmp_path):
    model = Model()
    stack = model.first.experts.weights
    others = [p for p in model.parameters() if p is not stack]
    with pytest.raises(UnsupportedState, match=r"Muon mixes the rows of a parameter(?s:.)*evermoe\.optim\.Muon steps"):
        session_of(model, [torch.optim.Muon([stack]), torch.optim.AdamW(others)], tmp_path)


def test_steps_of_one_are_repeated_and_states_of_another_sent(caplog):
    model = Model()
    optimizers = MUON_AND_ADAMW(model)
    found = find_arithmetics(as_one(optimizers))
    assert [(each, arithmetic.variant) for each, arithmetic in found.items()] == [(optimizers[1], "evermoe")]
    assert "copies of what Muon steps are snapshots of the state" in caplog.text


def test_a_unit_of_two_optimizers_is_sent_as_state_if_one_cannot_be_repeated():
    """Replicas would otherwise have one parameter of it before the step, and another after it."""
    layer, other = torch.nn.Linear(8, 4), torch.nn.Parameter(torch.randn(4))
    optimizer = as_one([torch.optim.Muon([layer.weight]), evermoe.optim.AdamW([layer.bias, other])])
    units = {"both": dict(layer.named_parameters()), "one": {"p": other}}
    sender = GradientSender(optimizer, units, arithmetics=find_arithmetics(optimizer), is_hooked=False)
    for parameter in (layer.weight, layer.bias, other):
        parameter.grad = torch.randn_like(parameter)
    kinds = {unit: [type(record) for record in sender.next_step_records(1, unit)] for unit in units}
    assert GradientRecord not in kinds["both"] and GradientRecord in kinds["one"]


def test_hook_of_an_optimizer_whose_steps_are_not_repeated_is_allowed(start_job):
    """And one of another is refused, as with one optimizer."""
    job, model, calls = start_job(1), Model(), []
    optimizers = MUON_AND_ADAMW(model)
    optimizers[0].register_step_post_hook(lambda *_: calls.append(1))
    session = session_of(model, optimizers, None, **grouped(job.session, lighthouse=job.address))
    calls.clear()  # the session steps once with zeros, to create the state
    with pytest.raises(UnsupportedState, match="register_step_post_hook"):
        for step in session.steps(4):
            if step.number == 2:
                optimizers[1].register_step_post_hook(lambda *_: None)
            with step:
                step.backward(mean_loss(model, DATA[step.indices]))
    assert (session.step, len(calls)) == (2, 2)


@pytest.mark.parametrize("names", [("head.weight",), ("first.experts.weights", "head.bias")])
def test_checkpoint_has_the_state_of_all(tmp_path, names):
    """A job that resumes after a restart equals one that was not interrupted, to the bit."""
    weights = []
    for stops in ([6], [3, 6]):
        folder = tmp_path / f"{len(stops)}"
        for until in stops:
            model = Model()
            optimizers = of_model(names)(model)
            scheduler = [CosineAnnealingLR(optimizers[0], 9), ReduceLROnPlateau(optimizers[1], patience=0)]
            checkpoints = evermoe.Checkpoints(folder, interval=3)
            session = session_of(model, optimizers, tmp_path / "memory", scheduler=scheduler, checkpoints=checkpoints)
            assert train(session, model, until) == list(range(until - stops[0] if until > 3 else 0, until))
        rates = [group["lr"] for each in optimizers for group in each.param_groups]
        weights.append([*(p.detach() for p in model.parameters()), torch.tensor(rates)])
    assert all(torch.equal(*both) for both in zip(*weights, strict=True))


# ---- schedules


def loop(gammas, lrs=(0.1, 0.2), patience=3):
    """A loop with two optimizers: of the first an exponential schedule, of the other one that follows the loss."""
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=lr) for lr in lrs]
    kinds = [ExponentialLR(optimizers[0], gammas), ReduceLROnPlateau(optimizers[1], patience=patience, factor=0.5)]
    return LoopParts(None, as_one(optimizers), as_one_schedule(kinds))


def rates_after(parts, losses):
    for loss in losses:
        loop_state.advance(parts.scheduler, loss)
    return [group["lr"] for group in parts.optimizer.param_groups]


def stored(parts):
    return json.loads(loop_state.encoded(loop_state.collect(parts)))


LOSSES = [3.0, 2.0, *[2.1] * 5]


def test_schedules_of_a_job_continue():
    straight, resumed = loop(0.5), loop(0.9, lrs=(0.3, 0.4), patience=1)
    assert rates_after(straight, LOSSES) == [0.1 * 0.5**7, 0.1]
    loop_state.restore(stored(straight), resumed)
    assert rates_after(resumed, [2.1] * 4) == rates_after(straight, [2.1] * 4) == [0.1 * 0.5**11, 0.05]


def test_schedules_of_the_script_are_named_and_taken():
    job, script = loop(0.5), loop(0.25, lrs=(0.3, 0.4), patience=1)
    rates_after(job, LOSSES)
    settings = loop_state.settings_of(script, is_used=True)
    assert loop_state.differences(stored(job), settings) == {
        "scheduler's [0].gamma": (0.25, 0.5),
        "scheduler's [0].base_lrs": ([0.3], [0.1]),
        "scheduler's [1].patience": (1, 3),
    }
    loop_state.restore_with(settings, stored(job), script, 7)
    assert [group["lr"] for group in script.optimizer.param_groups] == [pytest.approx(0.3 * 0.25**7), 0.1]


def test_a_rate_without_a_schedule_is_named_next_to_one_with():
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=lr) for lr in (0.1, 0.2)]
    parts = LoopParts(None, as_one(optimizers), ExponentialLR(optimizers[0], 0.5))
    settings = loop_state.settings_of(parts, is_used=False)
    for group in parts.optimizer.param_groups:
        group["lr"] = 0.7
    assert loop_state.differences(stored(parts), settings) == {"optimizer's lr": (0.2, 0.7)}


@pytest.mark.parametrize("kinds", [1, 3])
def test_another_number_of_schedulers_is_refused(kinds):
    state, parts = stored(loop(0.5)), loop(0.5)
    optimizer = parts.optimizer.optimizers[0]
    others = parts._replace(scheduler=as_one_schedule([ExponentialLR(optimizer, 0.5) for _ in range(kinds)]))
    with pytest.raises(UnsupportedState, match=r"the job was trained with the scheduler .*, and this script has"):
        loop_state.restore(state, others)


def test_a_step_that_replicas_repeat_has_their_bits_whatever_code_runs_in_another_optimizers():
    """They multiply gradients of 16 bits in float32; the script's code sees gradients that are multiplied."""
    found = {}
    for has_own_code in (False, True):
        torch.manual_seed(0)
        first, second = (torch.nn.Parameter(torch.randn(64, 64).bfloat16()) for _ in range(2))
        optimizers = [evermoe.optim.AdamW([each], lr=0.1) for each in (first, second)]
        first.grad, second.grad = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
        expected = second.grad * 0.37
        state = SimpleNamespace(dense=[first, second], layers={})
        repeated = optimizers[:1]
        step_optimizer(as_one(optimizers), state, 0.37, has_own_code=has_own_code, repeated=repeated)
        found[has_own_code] = first.detach().clone(), optimizers[0].state[first]["exp_avg"].clone()
        assert torch.equal(second.grad, expected) == has_own_code
    assert all(map(torch.equal, *found.values()))
