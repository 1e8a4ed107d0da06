"""Float32 masters of parameters in bfloat16 and float16: `evermoe.optim`'s own, and those of others as state."""

import copy
import pickle

import pytest
import torch
from torch import nn

import evermoe
from evermoe.errors import UnsupportedState
from evermoe.optim import SGD, AdamW
from evermoe.state.training_state import TrainingState
from support.masters import MasterAdam

OPTIMIZERS = {
    "adamw": lambda p: AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: SGD(p, lr=1e-2),
}
HALF = [torch.bfloat16, torch.float16]


def parameters(dtype, device="cpu"):
    random = torch.Generator().manual_seed(0)
    shapes = (), (7,), (37, 5)
    return [nn.Parameter(torch.randn(shape, generator=random).to(device, dtype)) for shape in shapes]


def give_gradients(tensors, step):
    random = torch.Generator().manual_seed(step)
    for number, tensor in enumerate(tensors):
        drawn = torch.randn(tensor.shape, generator=random)
        tensor.grad = None if (step, number) == (3, 1) else drawn.to(tensor.device, tensor.dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_master_takes_the_float32_step_and_the_parameter_is_its_rounding(name, dtype, device):
    halves = parameters(dtype, device)
    fulls = [nn.Parameter(half.detach().float()) for half in halves]
    ours, reference = OPTIMIZERS[name](halves), OPTIMIZERS[name](fulls)
    for step in range(40):
        give_gradients(halves, step)
        for half, full in zip(halves, fulls, strict=True):
            full.grad = None if half.grad is None else half.grad.float()
        ours.step()
        reference.step()
        for half, full in zip(halves, fulls, strict=True):
            master = ours.state[half]["master_param"]
            assert torch.equal(master, full) and master.dtype == torch.float32
            assert torch.equal(half, full.to(dtype))
            kept = {key: value for key, value in ours.state[half].items() if key != "master_param"}
            assert all(torch.equal(value, reference.state[full][key]) for key, value in kept.items())
    assert not torch.equal(halves[2].float(), fulls[2]), "the master is finer than the parameter"


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dict_keeps_the_bits_of_the_masters(name, dtype):
    trained = parameters(dtype)
    optimizer = OPTIMIZERS[name](trained)
    for step in range(5):
        give_gradients(trained, step)
        optimizer.step()
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    resumed = [nn.Parameter(each.detach().clone()) for each in trained]
    again = OPTIMIZERS[name](resumed)
    again.load_state_dict(saved)
    for step in range(5, 9):
        for tensors, each in ((trained, optimizer), (resumed, again)):
            give_gradients(tensors, step)
            each.step()
    for one, two in zip(trained, resumed, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(optimizer.state[one]["master_param"], again.state[two]["master_param"])
    assert saved["state"][0]["master_param"] is not again.state[resumed[0]]["master_param"]


def test_parameters_of_several_types_have_one_optimizer():
    tensors = [*parameters(torch.bfloat16), *parameters(torch.float32)]
    optimizer = AdamW(tensors)
    give_gradients(tensors, 0)
    optimizer.step()
    assert ["master_param" in optimizer.state[tensor] for tensor in tensors] == [True] * 3 + [False] * 3


def test_other_types_are_refused_by_name():
    with pytest.raises(ValueError, match="expected contiguous tensors in float32, bfloat16 or float16"):
        AdamW([nn.Parameter(torch.zeros(3, dtype=torch.float64))])


def mixed_model():
    """Experts and a matrix in bfloat16, a norm in float32: several types in one group."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), evermoe.MoE(8, 16, 4)).bfloat16()
    return model.append(nn.LayerNorm(8))


class Doubled(MasterAdam):
    """Its state starts from neither zeros nor the parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p].setdefault("twice", 2 * p.detach().float())


@pytest.mark.parametrize("make", [MasterAdam, AdamW, SGD], ids=["recipe", "adamw", "sgd"])
def test_state_before_the_first_step_has_the_masters(make):
    model = mixed_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = make(model.parameters(), lr=1e-2)
    state = TrainingState(model, optimizer)
    name = "master_weights" if make is MasterAdam else "master_param"
    for parameter in model.parameters():
        kept = optimizer.state[parameter]
        assert (name in kept) == (parameter.dtype == torch.bfloat16)
        for key, value in kept.items():
            assert torch.equal(value, parameter.float()) if key == name else not value.any()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    specs = {spec.name: spec.dtype for spec in state.catalog.by_name["1.experts.0"].specs}
    assert specs["weights"] == torch.bfloat16
    assert {dtype for key, dtype in specs.items() if key != "weights"} == {torch.float32}


def test_state_that_starts_otherwise_is_refused():
    model = mixed_model()
    with pytest.raises(UnsupportedState, match=r"Doubled .*starts from other state than zeros or the parameter"):
        TrainingState(model, Doubled(model.parameters()))


@pytest.mark.parametrize("make", [MasterAdam, AdamW])
def test_restacked_experts_keep_their_masters_and_a_prepared_optimizer_trains_like_a_plain_one(make):
    models = mixed_model(), mixed_model()
    optimizers = [make(model.parameters(), lr=1e-2) for model in models]
    state = TrainingState(models[0], optimizers[0])
    (path,) = state.layers
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            model[2](model[1](model[0](x.bfloat16())).float()).square().mean().backward()
            optimizer.step()
        if step == 2:  # leave with one half of the experts, come back with all of them
            lost = {}
            for expert in (2, 3):
                name = f"{path}.{expert}"
                lost[name] = torch.empty(state.catalog.by_name[name].nbytes, dtype=torch.uint8)
                state.read(name, lost[name])
            state.adopt({path: [0, 1]}, {})
            state.adopt({path: [0, 1, 2, 3]}, lost)
    for ours, plain in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, plain)
        for key, value in optimizers[1].state[plain].items():
            assert torch.equal(optimizers[0].state[ours][key], value), key
