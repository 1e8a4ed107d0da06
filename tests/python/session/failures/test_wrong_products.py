"""A wrong product of a member is found by another one, which computes it again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import evermoe
from evermoe.session import recorded_call
from evermoe.session.recorded_call import RecordedCall, differing, from_bytes, repeat, to_bytes
from support.history import check_history

STEPS = 200
OFTEN = 1e9
"""Part of a step that makes a call in each eighth step be repeated."""


def start(start_job, names, wrong, where, **session):
    sizes = {"preset": "lazarus", "replication": len(names), "expert_slots": 10, "min_replicas": len(names)}
    job = start_job(len(names), **sizes, rebalance_interval=0, join_interval=1000, **session)
    return [job.start(name, steps=STEPS, call_share=OFTEN, wrong=where if name == wrong else "") for name in names]


@pytest.mark.parametrize("where", ["head", "expert"])
@pytest.mark.quick("a worker computes wrong products")
def test_of_three_the_member_that_computes_wrongly_is_named_and_leaves(start_job, where):
    """A repeated step is wrong again: what is stuck does not go away."""
    workers = start(start_job, "abc", "b", where)
    assert [each.join() for each in workers] == [0, 1, 0]
    for each in workers:
        first, again = each.events("corruption_found")
        assert [first["action"], again["action"]] == ["repair", "evict"]
        assert first["nodes"] == again["nodes"] == ["b"]
        assert first["step"] == again["step"]
        assert all(unit == "head" if where == "head" else unit.startswith("first.experts.") for unit in first["units"])
    assert "of a call of" in workers[1].log()
    check_history(workers)


def test_of_two_neither_is_named_and_the_job_stops(start_job):
    workers = start(start_job, "ab", "b", "head")
    assert [each.join() for each in workers] == [1, 1]
    for each in workers:
        assert [event["ranks"] for event in each.events("corruption_found")] == [[], []]
        assert [event["action"] for event in each.events("corruption_found")] == ["repair", "stop"]
    check_history(workers)


def test_right_products_are_never_found_wrong(start_job):
    workers = start(start_job, "abc", "", "")
    assert [each.join() for each in workers] == [0, 0, 0]
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
RESULTS = {
    "embedding": {"output", "gradient of weight"},
    "moe.experts": {"output", "gradient of input", "gradient of weights"},
}


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
    assert found.keys() == RESULTS.get(path, {"output", "gradient of input", "gradient of weight", "gradient of bias"})
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


def test_of_several_calls_the_first_is_recorded_without_the_gradient_of_weights():
    linear = nn.Linear(4, 4)
    call = RecordedCall(linear, None)
    x = torch.randn(3, 4, requires_grad=True)
    linear(linear(x)).sum().backward()
    record = call.end()
    assert record["tensors"].keys() == {"input", "output", "gradient of output", "gradient of input"}
    assert torch.equal(record["tensors"]["input"], x)
    assert differing(record, repeat(linear, None, record)) == []
