"""Units: every byte of model, optimizer and loop in exactly one unit, read and taken over bit for bit."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from evermoe import ElasticSampler, Session
from evermoe.errors import UnsupportedState
from evermoe.state.loop_state import PROGRESS_BYTES
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit
from support.models import OPTIMIZERS, Tied, digests, everyone, make, read, train


def test_names_and_order_of_the_units():
    _, _, state = make("adamw")
    assert [unit.name for unit in state.catalog.units] == [
        "session", "model", "embedding", "moe.router", "norm", "frozen", *(f"moe.experts.{e}" for e in range(4))
    ]  # fmt: skip
    assert state.held() == [unit.name for unit in state.catalog.units]
    specs = {unit.name: [spec.name for spec in unit.specs] for unit in state.catalog.units}
    assert specs["embedding"] == ["weight", "weight/exp_avg", "weight/exp_avg_sq", "weight/step"]
    assert specs["model"] == ["scale", "scale/exp_avg", "scale/exp_avg_sq", "scale/step", "steps"]
    assert specs["norm"][-3:] == ["running_mean", "running_var", "num_batches_tracked"]
    assert specs["moe.experts.2"] == ["weights", "weights/exp_avg", "weights/exp_avg_sq", "weights/step"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_tensor_is_in_exactly_one_unit(name):
    model, optimizer, state = make(name)
    tensors = {id(t): t for t in [*model.parameters(), *model.state_dict(keep_vars=True).values()]}
    kept = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    expected = sum(t.nbytes for t in [*tensors.values(), *kept])
    # the optimizer counts an MoE layer's steps once, its units do once per expert
    weights = model.moe.experts.weights
    repeated = sum(3 * s["step"].nbytes for p, s in optimizer.state.items() if p is weights and "step" in s)
    loop = state.loop.progress.nbytes + state.expert_load.average.nbytes + state.expert_load.tokens.nbytes
    assert sum(unit.nbytes for unit in state.catalog.units) == expected + repeated + loop


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reading_and_adopting_brings_the_same_bits_and_the_same_training(name):
    model, optimizer, state = make(name, steps=3)
    state.loop.store({"consumed": 7})
    model.moe.experts.count.add(np.arange(model.moe.num_experts), is_counted=True)
    state.expert_load.add_step()
    other_model, other_optimizer, other = make(name)
    assert digests(other) != digests(state)
    other.adopt(everyone(other), read(state))
    assert digests(other) == digests(state)
    assert other.loop.load() == {"consumed": 7}
    assert np.array_equal(other.expert_load.mean_LE, state.expert_load.mean_LE) and state.expert_load.mean_LE.any()
    train(model, optimizer, 3, start=3)
    train(other_model, other_optimizer, 3, start=3)
    assert digests(other) == digests(state)
    assert other_model.head.weight is other_model.embedding.weight


def test_making_the_state_changes_no_parameter():
    before = copy.deepcopy(Tied().state_dict())
    model, optimizer, _ = make("adamw-fused")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2}
    assert all(float(state["step"]) == 0 for state in optimizer.state.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_first_step_is_that_of_a_fresh_optimizer(name):
    model, _, state = make(name, steps=2)
    plain = Tied()
    optimizer = OPTIMIZERS[name](plain.parameters())
    train(plain, optimizer, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)), (
        state.catalog.units
    )


def test_state_of_an_optimizer_that_has_run_already_is_kept():
    model = Tied()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 2)
    before = optimizer.state[model.scale]["exp_avg"].clone()
    TrainingState(model, optimizer)
    assert torch.equal(optimizer.state[model.scale]["exp_avg"], before)
    assert float(optimizer.state[model.scale]["step"]) == 2


def test_giving_experts_away_and_taking_them_back():
    _, optimizer, state = make("adamw-fused", steps=2)
    layer, data_of, before = state.layers["moe.experts"], read(state), digests(state)
    state.adopt({"moe.experts": [1, 3]}, {})
    assert layer.weights.shape[0] == 2
    assert layer.ids == [1, 3]
    assert [p is layer.weights for p in optimizer.param_groups[0]["params"]].count(True) == 1
    assert len(optimizer.state) == len(optimizer.param_groups[0]["params"])  # none is left of the old weights
    assert digests(state) == {n: d for n, d in before.items() if n not in ("moe.experts.0", "moe.experts.2")}
    missing = {expert_unit("moe.experts", e): data_of[expert_unit("moe.experts", e)] for e in (0, 2)}
    state.adopt({"moe.experts": [0, 2, 3]}, missing)
    assert digests(state) == {n: d for n, d in before.items() if n != "moe.experts.1"}
    state.adopt({"moe.experts": []}, {})
    assert layer.weights.shape[0] == 0
    state.adopt(everyone(state), dict(data_of))
    assert digests(state) == before


def test_a_layer_whose_experts_stay_keeps_its_memory():
    _, optimizer, state = make("adamw-fused", steps=2)
    layer, data_of, before = state.layers["moe.experts"], read(state), digests(state)
    weights, address = layer.weights, layer.weights.data_ptr()
    with torch.no_grad():
        layer.weights.zero_()
        optimizer.state[layer.weights]["exp_avg"].zero_()
    state.adopt({"moe.experts": layer.ids}, {expert_unit("moe.experts", 1): data_of[expert_unit("moe.experts", 1)]})
    assert layer.weights is weights
    assert layer.weights.data_ptr() == address
    after = digests(state)
    assert {name for name in before if before[name] == after[name]} == before.keys() - {
        expert_unit("moe.experts", expert) for expert in (0, 2, 3)
    }


def test_the_optimizers_state_is_made_a_few_parameters_at_a_time():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with_gradients = []
    optimizer.register_step_pre_hook(
        lambda *_: with_gradients.append(sum(p.nbytes for p in model.parameters() if p.grad is not None))
    )
    state = TrainingState(model, optimizer)
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(with_gradients) == total
    assert max(with_gradients) <= total / 10
    assert all("exp_avg" in state.optimizer.state[parameter] for parameter in model.parameters())


def test_an_expert_that_is_neither_held_nor_fetched_changes_nothing():
    _, _, state = make("adamw")
    state.adopt({"moe.experts": [0, 1]}, {})
    before = digests(state)
    with pytest.raises(KeyError):
        state.adopt(
            {"moe.experts": [0, 1, 2]}, {"embedding": torch.zeros(state.catalog.by_name["embedding"].nbytes).byte()}
        )
    assert digests(state) == before


def test_an_odd_layout_is_read_right():
    """An 8-byte piece after a 1-byte one, and a unit that starts anywhere."""
    model = nn.Module()
    model.register_buffer("flag", torch.tensor([True]))
    model.register_buffer("numbers", torch.arange(3))
    model.weight = nn.Parameter(torch.zeros(1))
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    padded = torch.full((state.catalog.by_name["model"].nbytes + 5,), 255, dtype=torch.uint8)
    data = padded[5:]
    state.read("model", data)
    model.numbers.zero_()
    model.flag.zero_()
    state.adopt({}, {"model": data})
    assert model.numbers.tolist() == [0, 1, 2]
    assert model.flag.item()


class Shampooish(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["factor"] = torch.eye(3)


def test_state_of_another_shape_is_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(UnsupportedState, match=r"Shampooish keeps 'factor' as \(3, 3\) .*Use an elementwise optimizer"):
        TrainingState(model, Shampooish(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="Shampooish"):
        Session(model, Shampooish(model.parameters(), lr=0.1), ElasticSampler(4, 2))


def test_progress_that_is_too_large_or_no_json_is_refused():
    _, _, state = make("sgd")
    with pytest.raises(UnsupportedState, match=f"at most {PROGRESS_BYTES} fit"):
        state.loop.store({"text": "x" * PROGRESS_BYTES})
    with pytest.raises(UnsupportedState, match="must be JSON"):
        state.loop.store({"text": object()})
    assert state.loop.load() == {}
    state.loop.store({"text": "ü" * 100})
    state.loop.store({"text": "short"})
    assert state.loop.load() == {"text": "short"}
