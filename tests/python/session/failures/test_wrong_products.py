"""A wrong product of a member is found by another one, which computes it again."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import evermoe
from evermoe.session import recorded_call
from evermoe.session.call_checks import subjects
from evermoe.session.recorded_call import RecordedCall, differing, from_bytes, repeat, to_bytes
from evermoe.state.training_state import TrainingState
from support.history import check_history

STEPS = 400
PATIENCE = 300.0
OFTEN = 1e9
"""Part of a step that makes a call in each eighth step be repeated."""


def start(start_job, names, wrong, where, **session):
    sizes = {"preset": "lazarus", "replication": len(names), "expert_slots": 10, "min_replicas": len(names)}
    job = start_job(len(names), **sizes, rebalance_interval=0, join_interval=1000, **session)
    return [job.start(name, steps=STEPS, call_share=OFTEN, wrong=where if name == wrong else "") for name in names]


@pytest.mark.parametrize("where", ["head", "expert"])
@pytest.mark.quick("a worker computes wrong products")
def test_of_three_the_member_that_computes_wrongly_is_named_and_leaves(start_job, where):
    """It leaves when it has been named in a third step, and no other member has."""
    workers = start(start_job, "abc", "b", where)
    assert [each.join(PATIENCE) for each in workers] == [0, 1, 0]
    for each in workers:
        found = each.events("corruption_found")
        assert [event["action"] for event in found] == ["repair", "repair", "evict"]
        assert [event["nodes"] for event in found] == [["b"]] * 3
        units = {unit for event in found for unit in event["units"]}
        assert units == {"head"} if where == "head" else all(unit.startswith("first.experts.") for unit in units)
    assert "of a call of" in workers[1].log()
    check_history(workers)


@pytest.mark.long
def test_of_two_neither_is_named_and_calls_are_not_repeated_any_more(start_job):
    workers = start(start_job, "ab", "b", "head")
    assert [each.join(PATIENCE) for each in workers] == [0, 0]
    for each in workers:
        found = each.events("corruption_found")
        assert [(event["ranks"], event["action"]) for event in found] == [([], "repair")] * 3
    assert "calls of other members are not repeated any more" in workers[0].log(20_000)
    check_history(workers)


@pytest.mark.long
def test_a_newcomer_learns_that_calls_are_not_repeated(start_job):
    job = start_job(2, preset="lazarus", expert_slots=10, min_replicas=2, rebalance_interval=0, join_interval=1)
    job.open_gate(STEPS)
    workers = [
        job.start(name, steps=STEPS + 40, call_share=OFTEN, wrong="head" * (name == "b"), gated=True) for name in "ab"
    ]
    for each in workers:
        each.wait_for("corruption_found", PATIENCE, count=3)
        each.wait_for("gate", PATIENCE, step=STEPS)
    workers.append(job.start("c", steps=STEPS + 40, call_share=OFTEN, gated=True))
    job.take_in(workers[2], until=STEPS + 40)
    assert [each.join(PATIENCE) for each in workers] == [0, 0, 0]
    assert not workers[2].events("corruption_found")
    assert len(workers[2].events("commit")) > 16
    check_history(workers)


@pytest.mark.parametrize(
    "options", [{"poison": dict.fromkeys(range(60), "penalty")}, {"compiled": True}], ids=["penalty", "compiled"]
)
@pytest.mark.few(2)
def test_habits_of_scripts_are_no_faults(start_job, options):
    """The gradient of a weight has parts of a penalty, too; and a graph must not have a recorder in it."""
    job = start_job(3, rebalance_interval=0, join_interval=1000)
    workers = [job.start(name, steps=60, call_share=OFTEN, **options) for name in "abc"]
    assert [each.join(PATIENCE) for each in workers] == [0, 0, 0]
    assert not any(each.events("corruption_found") for each in workers)
    assert len(workers[0].events("recovered")) == 1, "the start alone"
    check_history(workers)


@pytest.mark.long
def test_right_products_are_never_found_wrong(start_job):
    workers = start(start_job, "abc", "", "")
    assert [each.join(PATIENCE) for each in workers] == [0, 0, 0]
    assert not any(each.events("corruption_found") for each in workers)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 32)
        self.norm = nn.LayerNorm(32)
        self.linear = nn.Linear(32, 32)
        self.moe = evermoe.MoE(32, 64, 4, top_k=2, gated=True)
        self.convolution = nn.Conv1d(32, 32, 3)

    def forward(self, ids):
        x = self.norm(self.embedding(ids))
        x = x + self.linear(x)  # so that the gradient of what the module gets has other parts, too
        x = x + self.moe(x.flatten(0, 1)).view_as(x)
        return self.convolution(x.transpose(1, 2)).square().mean()


SUBJECTS = {"embedding": None, "norm": None, "linear": None, "convolution": None, "moe.experts": 2}


def recorded(model, path, autocast=False, number=0):
    call = RecordedCall(model.get_submodule(path), SUBJECTS[path], number)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(torch.arange(40).view(4, 10) % 20).backward()
    return call.end()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("path", SUBJECTS)
def test_a_call_is_repeated_from_its_record_alone(path, autocast):
    model = Mixed()
    other = copy.deepcopy(model)
    record = from_bytes(to_bytes(recorded(model, path, autocast)), torch.device("cpu"))
    found = repeat(other.get_submodule(path), SUBJECTS[path], record)
    assert differing(record, found) == []
    assert found.keys() == {"output", *(["gradient of input"] if path != "embedding" else [])}
    assert other.linear.weight.grad is None, "a repeated call leaves no gradients"
    assert not model.linear._forward_hooks and not model.linear.weight._backward_hooks, "nothing is left behind"
    for name in found:
        spoilt = {**record, "tensors": {**record["tensors"], name: record["tensors"][name].clone()}}
        spoilt["tensors"][name].view(-1)[-1] += 1
        assert differing(spoilt, found) == [name]
        spoilt["tensors"][name].view(-1)[-1] = torch.nan
        assert differing(spoilt, found) == [name]


@pytest.mark.parametrize("path", ["embedding", "norm", "linear", "moe.experts"])
def test_of_large_calls_some_rows_are_recorded(monkeypatch, path):
    monkeypatch.setattr(recorded_call, "MAX_BYTES", 2048)
    model, seen = Mixed(), []
    for number in range(40):
        record = recorded(model, path, number=number)
        tensors = record["tensors"]
        assert {name for name in tensors if name.startswith("gradient")} <= {"gradient of input", "gradient of output"}
        assert tensors["output"].shape == tensors["gradient of output"].shape
        assert 2 * (tensors["input"].nbytes + tensors["output"].nbytes) <= 2048
        assert differing(record, repeat(model.get_submodule(path), SUBJECTS[path], record)) == []
        seen.append(tensors["output"].flatten()[0].item())
    assert len(set(seen)) > 3, "other rows in other steps"


def test_subjects_are_the_same_whatever_is_frozen():
    """Newcomers do not know yet what the script of the others has frozen or thawed."""
    model = Mixed()
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    modules = dict(model.named_modules())
    found = subjects(modules, state, 2)
    assert {each.path for each in found} >= {"embedding", "norm", "linear", "convolution"}
    assert subjects({name: each.requires_grad_(False) for name, each in modules.items()}, state, 2) == found


def test_of_large_calls_that_mix_rows_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(recorded_call, "MAX_BYTES", 2048)
    assert recorded(Mixed(), "convolution") == {}


def test_buffers_stay_as_they_are():
    norm = nn.BatchNorm1d(4)
    call = RecordedCall(norm, None)
    norm(torch.randn(8, 4, requires_grad=True)).square().sum().backward()
    record, before = call.end(), norm.running_mean.clone()
    assert differing(record, repeat(norm, None, record)) == []
    assert torch.equal(norm.running_mean, before)


def test_nothing_is_recorded_without_gradients():
    model = Mixed()
    call = RecordedCall(model.linear, None)
    with torch.no_grad():
        model(torch.arange(20).view(2, 10))
    assert call.end() == {}


def test_of_several_calls_the_first_is_recorded():
    linear = nn.Linear(4, 4)
    call = RecordedCall(linear, None)
    x = torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        first = linear(x)
    linear(first.float()).sum().backward()
    record = call.end()
    assert record["tensors"].keys() == {"input", "output", "gradient of output", "gradient of input"}
    assert torch.equal(record["tensors"]["input"], x)
    assert differing(record, repeat(linear, None, record)) == []


def hooked(linear, x):
    linear.register_forward_hook(lambda module, args, output: 2 * output)
    return linear(x).sum()


def own_forward(linear, x):
    linear.forward = lambda given: 2 * nn.Linear.forward(linear, given)
    return linear(x).sum()


def hooked_backward(linear, x):
    linear.register_full_backward_hook(lambda module, given, result: (2 * given[0],))
    return linear(x).sum()


def two_backwards(linear, x):
    y = linear(x).square().sum()
    torch.autograd.grad(y, linear.weight, retain_graph=True)
    return y


def gradient_penalty(linear, x):
    (gradient,) = torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)
    return gradient.square().sum()


def vectorised(linear, x):
    return torch.func.vmap(linear)(x).sum()


def nested(linear, x):
    return linear(torch.nested.nested_tensor([x[:1], x[1:]], requires_grad=True)).to_padded_tensor(0.0).sum()


UNFIT = [hooked, own_forward, hooked_backward, two_backwards, gradient_penalty, vectorised, nested]


@pytest.mark.parametrize("habit", UNFIT, ids=lambda habit: habit.__name__)
def test_of_habits_that_no_other_member_can_repeat_nothing_is_recorded(habit):
    linear, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    call = RecordedCall(linear, None)
    habit(linear, x).backward()
    record = call.end()
    assert record == {}


def test_compiled_calls_are_neither_recorded_nor_broken():
    model = nn.Sequential(nn.Linear(4, 4))
    call = RecordedCall(model[0], None)
    torch.compile(model, fullgraph=True, backend="aot_eager")(torch.randn(3, 4)).sum().backward()
    assert call.end() == {}


def test_copies_and_files_of_a_model_have_no_recorder():
    model = nn.Sequential(nn.Linear(4, 4))
    call = RecordedCall(model[0], None)
    model(torch.randn(3, 4)).sum().backward()
    other = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    found = call.end()
    other(torch.randn(3, 4)).sum().backward()
    assert found["tensors"].keys() == {"input", "output", "gradient of output"}


def test_a_call_in_training_is_repeated_so_by_a_module_that_evaluates():
    norm = nn.BatchNorm1d(4)
    call = RecordedCall(norm, None)
    norm(torch.randn(8, 4, requires_grad=True)).square().sum().backward()
    record = call.end()
    assert differing(record, repeat(norm.eval(), None, record)) == []
    assert not norm.training


def test_sums_that_cancel_may_differ():
    norm, x = nn.LayerNorm(64), torch.randn(8, 64, requires_grad=True)
    call = RecordedCall(norm, None)
    norm(x).sum().backward()  # of which the gradient is zero, but for rounding
    record = call.end()
    found = repeat(norm, None, record)
    found["gradient of input"] = found["gradient of input"] * 1.5
    assert differing(record, found) == []
