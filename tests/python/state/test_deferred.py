"""Models without memory: what is recorded while they are built, and what a state makes of it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import evermoe
from evermoe.errors import CorruptCopy, UnsupportedState
from evermoe.state.building import LARGE
from evermoe.state.deferred import find_deferral
from evermoe.state.training_state import TrainingState
from support.models import OPTIMIZERS, Tied, digests, everyone, read

WIDE = 160
"""So wide that a matrix is large."""


class Wide(nn.Module):
    """All ways in which constructors initialise large tensors."""

    def __init__(self, experts=None):
        super().__init__()
        self.moe = evermoe.MoE(WIDE, 64, 6, gated=True) if experts is None else experts
        self.linear = nn.Linear(WIDE, WIDE)
        nn.init.orthogonal_(self.linear.weight)
        self.ones = nn.Parameter(torch.ones(LARGE))
        self.drawn = nn.Parameter(torch.randn(WIDE, WIDE) * 0.02)
        self.tied = nn.Linear(WIDE, WIDE, bias=False)
        self.tied.weight = self.linear.weight
        self.deep = nn.TransformerEncoderLayer(WIDE, 4, WIDE, batch_first=True)
        angles = torch.outer(torch.arange(200.0), 1.0 / 10 ** torch.linspace(0, 4, WIDE))
        self.register_buffer("mask", torch.tril(torch.ones(200, 200)))
        self.register_buffer("angles", angles.sin(), persistent=False)
        self.register_buffer("table", torch.zeros(200, WIDE), persistent=False)
        self.table[:, ::2] = angles[:, ::2].cos()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.largest = torch.zeros(200, 200).fill_(3).max().item()


def deferred_state(make=Wide, optimizer="adamw-fused", source=None, seed=0):
    with evermoe.deferred(seed=seed):
        model = make()
    steps = OPTIMIZERS[optimizer]([p for p in model.parameters()])
    return model, TrainingState(model, steps, deferral=find_deferral(model, steps, source))


def test_large_tensors_have_no_memory_and_are_as_a_plain_model_has_them():
    with evermoe.deferred():
        model = Wide()
    large = [p for p in model.parameters() if p.numel() >= LARGE]
    assert len(large) > 6
    assert {p.device.type for p in large} == {"meta"}
    model, state = deferred_state()
    assert not state.held()
    assert sum(p.numel() for p in model.parameters()) == 0
    state.begin(everyone(state) | {"moe.experts": [0, 1, 2, 3, 4, 5]})
    plain = Wide()
    for name, value in plain.named_buffers():
        assert torch.equal(value, model.get_buffer(name)), name
    assert (model.rates, model.largest) == ([0.0, 0.5, 1.0], 3.0)
    for name, value in plain.named_parameters():
        own = model.get_parameter(name)
        assert (own.shape, own.requires_grad) == (value.shape, value.requires_grad)
        assert torch.allclose(own.std(), value.std(), rtol=0.2, atol=0.02), name
    weight = model.linear.weight
    assert torch.allclose(weight @ weight.T, torch.eye(WIDE), atol=1e-5)
    assert model.tied.weight is model.linear.weight
    assert bool((model.ones == 1).all())
    assert state.catalog.layout == TrainingState(plain, OPTIMIZERS["adamw-fused"](plain.parameters())).catalog.layout


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adagrad"])
def test_units_have_the_same_bits_wherever_and_whenever_they_are_made(optimizer):
    _, one = deferred_state(Tied, optimizer)
    one.begin(everyone(one) | {"moe.experts": [0, 1, 2, 3]})
    complete = digests(one)
    _, two = deferred_state(Tied, optimizer)
    torch.manual_seed(7)
    two.begin({"moe.experts": [3, 1]})
    held = digests(two)
    assert held == {name: value for name, value in complete.items() if name in held}
    assert set(complete) - set(held) == {"moe.experts.0", "moe.experts.2"}
    two.begin({"moe.experts": [0, 3]})
    assert digests(two).items() <= complete.items()
    _, other = deferred_state(Tied, optimizer, seed=1)
    other.begin({"moe.experts": [0]})
    assert digests(other)["moe.experts.0"] != complete["moe.experts.0"]


def test_float32_masters_start_from_the_parameters_once_these_are_made():
    model, state = deferred_state(lambda: Tied().bfloat16(), "adamw-evermoe")
    state.begin({"moe.experts": [2, 0]})
    state.begin({"moe.experts": [0, 1]})
    for parameter in model.parameters():
        if parameter.requires_grad:
            master = state.optimizer.state[parameter]["master_param"]
            assert master.dtype == torch.float32 and torch.equal(master, parameter.float())
            assert not state.optimizer.state[parameter]["exp_avg"].any()
    assert model.moe.experts.weights.any(1).all()


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-evermoe", "sgd-momentum"])
def test_it_steps_as_a_plain_model_with_its_values_does(optimizer):
    model, state = deferred_state(Tied, optimizer)
    parameters = list(model.parameters())
    state.begin({"moe.experts": [0, 1, 2, 3]})
    assert [a is b for a, b in zip(parameters, model.parameters(), strict=True)].count(False) == 1  # the experts
    plain = Tied()
    plain.load_state_dict(model.state_dict())
    steps = OPTIMIZERS[optimizer](plain.parameters())
    for each, own in ((plain, steps), (model, state.optimizer)):
        for step in range(3):
            own.zero_grad()
            each(torch.arange(6) + step).backward()
            own.step()
    for name, value in plain.named_parameters():
        assert torch.equal(value, model.get_parameter(name)), name


def test_state_of_others_is_taken_over_without_values_of_its_own():
    _, one = deferred_state(Tied)
    one.begin({"moe.experts": [0, 1, 2, 3]})
    _, two = deferred_state(Tied)
    given = read(one)
    short = {name: data for name, data in given.items() if name != "norm"}
    with pytest.raises(KeyError, match="norm"):
        two.adopt({"moe.experts": [2]}, short)
    assert not two.held()
    two.adopt({"moe.experts": [2]}, given)
    assert digests(two).items() <= digests(one).items()
    assert "moe.experts.2" in digests(two)
    assert set(given) == {"moe.experts.0", "moe.experts.1", "moe.experts.3"}  # the rest has been let go


class Stacked(nn.Module):
    """Experts as transformers has them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.empty(6, 64, 50))
        self.down = nn.Parameter(torch.empty(6, 50, 64))
        for weight in (self.up, self.down):
            nn.init.trunc_normal_(weight, std=0.02)


def converted():
    stacked, experts = Stacked(), evermoe.Experts(evermoe.Expert(50, 64), 6)
    with torch.no_grad():
        experts.weights[:, :3200].copy_(stacked.up.flatten(1))
        experts.weights[:, 3200:6400].unflatten(1, (50, 64)).copy_(stacked.down)
        nn.init.eye_(experts.weights[2, :3200].view(64, 50))
    return nn.ModuleList([experts]).bfloat16()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            self.elements = max(self.elements, result.numel())
        return result


def test_experts_that_are_made_from_other_stacks_are_made_row_by_row():
    model, state = deferred_state(converted, "adamw")
    with Largest() as largest:
        state.begin({"0": [1, 2]})
    assert 6400 <= largest.elements <= 2 * 6400
    first = digests(state)["0.2"]
    assert torch.equal(model[0].weights[1, :3200].view(64, 50), torch.eye(64, 50).bfloat16())
    assert 0.017 < model[0].weights[0].float().std() < 0.023
    assert model[0].weights.dtype == torch.bfloat16
    state.begin({"0": [5, 2, 0]})
    assert digests(state)["0.2"] == first


def test_a_model_on_meta_is_initialised_by_its_modules_or_by_a_function():
    def make(source=None):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 8), evermoe.Experts(evermoe.Expert(8, 8), 3), nn.BatchNorm1d(8))
        optimizer = torch.optim.AdamW(model.parameters())
        return model, TrainingState(model, optimizer, deferral=find_deferral(model, optimizer, source))

    (one, state), (two, other) = make(), make()
    state.begin({"1": [0, 1, 2]})
    other.begin({"1": [2]})
    assert torch.equal(one[1].weights[2], two[1].weights[0])
    assert torch.equal(one[0].weight, two[0].weight)
    assert one[0].weight.abs().max() <= 0.5
    assert bool((one[2].running_var == 1).all())

    def constant(module):
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 3.0)

    model, state = make(constant)
    state.begin({"1": [1]})
    assert {value for p in model.parameters() for value in p.unique().tolist()} == {3.0}


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Angles(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("inverse", torch.ones(4), persistent=False)


def test_what_would_be_lost_silently_is_refused():
    def refused(model, match, optimizer=torch.optim.AdamW):
        steps = optimizer(model.parameters())
        with pytest.raises(UnsupportedState, match=match):
            find_deferral(model, steps)

    with torch.device("meta"):
        bare, angles = Bare(), Angles()
    refused(bare, r"Bare\) has parameters on meta and no reset_parameters")
    refused(angles, "inverse has no values")
    with evermoe.deferred():
        changed, part = Wide(), nn.Linear(WIDE, WIDE)
    nn.init.zeros_(changed.linear.weight)
    refused(changed, r"linear.weight was changed after evermoe.deferred\(\)")
    refused(nn.Sequential(part, nn.Linear(4, 4)), r"1.weight was not made in evermoe.deferred\(\)")
    refused(part, "Adagrad has state of parameters that have no values", torch.optim.Adagrad)
    plain = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="this one has values"):
        find_deferral(plain, torch.optim.AdamW(plain.parameters()), nn.init.zeros_)
    with evermoe.deferred():
        mixed = evermoe.Experts(evermoe.Expert(100, 100), 4)
        mixed.weights.data.cumsum_(0)
    steps = torch.optim.AdamW(mixed.parameters())
    state = TrainingState(nn.ModuleList([mixed]), steps, deferral=find_deferral(nn.ModuleList([mixed]), steps))
    with pytest.raises(UnsupportedState, match="aten::cumsum_ changes the weights of all experts of a layer together"):
        state.begin({"0": [0]})


# ---- read from files


def test_first_weights_from_a_folder_of_safetensors(tmp_path):
    torch.manual_seed(1)
    shapes = {"up": (64, WIDE), "gate": (64, WIDE), "down": (WIDE, 64)}
    experts = {f"moe.experts.{e}.{n}.weight": torch.randn(s).bfloat16() for e in range(6) for n, s in shapes.items()}
    dense = {k: v for k, v in Wide().state_dict().items() if "experts" not in k and k != "tied.weight"}
    save_file(experts, tmp_path / "experts.safetensors")
    save_file(dense, tmp_path / "dense.safetensors")
    index = dict.fromkeys(experts, "experts.safetensors") | dict.fromkeys(dense, "dense.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    def matrices(files, path, expert):
        return (files.tensor(f"{path}.{expert}.{name}.weight") for name in ("gate", "up", "down"))

    model, state = deferred_state(source=evermoe.FolderWeights(tmp_path, matrices))
    state.begin({"moe.experts": [4, 1]})
    for key, value in dense.items():
        assert torch.equal(model.state_dict()[key], value), key
    expected = torch.cat([experts[f"moe.experts.4.{name}.weight"].flatten() for name in ("gate", "up", "down")])
    assert torch.equal(model.moe.experts.weights[0], expected.float())
    files = evermoe.FolderWeights(tmp_path).files
    assert torch.equal(files.tensor("moe.experts.4.up.weight", 3), experts["moe.experts.4.up.weight"][3])
    with pytest.raises(CorruptCopy, match="has no tensor 'other'"):
        files.tensor("other")
    _, state = deferred_state(source=evermoe.FolderWeights(tmp_path, lambda files, path, expert: [torch.ones(5)]))
    with pytest.raises(CorruptCopy, match=r"expert 0 of moe.experts belongs to another model: expected 30720"):
        state.begin({"moe.experts": [0]})
    with pytest.raises(CorruptCopy, match="expected safetensors files"):
        evermoe.FolderWeights(tmp_path / "none")


def test_first_weights_from_a_checkpoint(tmp_path):
    from evermoe.data.sampler import ElasticSampler

    model = nn.ModuleList([Tied()])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    session = evermoe.Session(model, optimizer, ElasticSampler(12, 6), checkpoints=tmp_path)
    for step in session.steps(2):
        with step:
            step.backward(model[0](step.indices))
    source = evermoe.CheckpointWeights(tmp_path / "step-00000002")
    other, state = deferred_state(lambda: nn.ModuleList([Tied()]), "sgd", source)
    state.begin({"0.moe.experts": [1, 3]})
    for name, value in model.state_dict().items():
        if "experts" not in name:
            assert torch.equal(other.state_dict()[name], value), name
    assert torch.equal(other[0].moe.experts.weights, model[0].moe.experts.weights[[1, 3]])
