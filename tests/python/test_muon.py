"""evermoe.optim.Muon: torch's bits for matrices, and each expert as if it were alone."""

import copy

import pytest
import torch
from torch import nn

import evermoe
from evermoe.copies.replay.calibrate import calibrate
from evermoe.errors import NotReplayable
from evermoe.optim.muon import orthogonalized

OPTIONS = [
    {},
    {"nesterov": False, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8, "ns_steps": 3},
    {"adjust_lr_fn": "original", "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
    {"lr": torch.tensor(0.03)},
]


def step(optimizer, gradients, **options):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step(**options)


def drawn(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("options", OPTIONS)
def test_dense_matrices_have_torchs_bits(options):
    shapes = [(24, 8), (8, 24), (16, 16), (1, 5)]
    ours, theirs = ([nn.Parameter(value) for value in drawn(shapes, 0)] for _ in range(2))
    pair = evermoe.optim.Muon(ours, **{"lr": 0.02, **options}), torch.optim.Muon(theirs, **{"lr": 0.02, **options})
    for number in range(4):
        for optimizer in pair:
            step(optimizer, drawn(shapes, number + 1))
    assert all(torch.equal(*both) for both in zip(ours, theirs, strict=True))
    first, second = (optimizer.state_dict() for optimizer in pair)
    assert first["param_groups"] == second["param_groups"]
    for number, state in first["state"].items():
        assert state.keys() == second["state"][number].keys() == {"momentum_buffer"}
        assert torch.equal(state["momentum_buffer"], second["state"][number]["momentum_buffer"])
    pair[0].load_state_dict(second)
    pair[1].load_state_dict(first)


EXPERTS = {
    "plain": evermoe.Expert(8, 16),
    "gated": evermoe.Expert(8, 16, gated=True),
    "fused": evermoe.Expert(8, 16, gated=True, layout="fused"),
    "interleaved": evermoe.Expert(8, 16, gated=True, layout="interleaved"),
    "transposed": evermoe.Expert(8, 16, gated=True, layout="fused", transposed=True),
}


def parts(expert, views):
    """Each expert's matrices `[outputs, inputs]`, as the published models name them."""
    find = {name: view.transpose(1, 2) if expert.transposed else view for name, view in views.items()}
    if "gate_up" in find:
        both = find.pop("gate_up")
        gate, up = both.chunk(2, 1) if expert.layout == "fused" else (both[:, ::2], both[:, 1::2])
        find |= {"gate": gate, "up": up}
    return {name: view.detach().clone() for name, view in find.items()}


@pytest.mark.parametrize("kind", EXPERTS)
def test_each_matrix_of_each_expert_is_stepped_as_torch_steps_it_alone(kind):
    expert = EXPERTS[kind]
    layer = evermoe.Experts(expert, 3)
    before = parts(expert, expert.views(layer.weights))
    alone = {(name, e): nn.Parameter(value[e].clone()) for name, value in before.items() for e in range(3)}
    ours, theirs = evermoe.optim.Muon([layer.weights], lr=0.02), torch.optim.Muon(list(alone.values()), lr=0.02)
    for number in range(3):
        (gradient,) = drawn([layer.weights.shape], number)
        step(ours, [gradient])
        given = parts(expert, expert.views(gradient))
        step(theirs, [given[name][e].contiguous() for name, e in alone])
    after = parts(expert, expert.views(layer.weights))
    for (name, e), matrix in alone.items():
        assert torch.allclose(after[name][e], matrix, rtol=0, atol=1e-4), name
        assert (after[name][e] - before[name][e]).abs().max() > 1e-2, name
    assert after.keys() == ({"gate", "up", "down"} if expert.gated else {"up", "down"})


def test_experts_have_the_same_bits_in_any_stack():
    expert = evermoe.Expert(24, 40, gated=True)
    full = evermoe.Experts(expert, 5)
    places = [3, 0]
    part = evermoe.Experts(expert, 2)
    part.weights = nn.Parameter(full.weights.detach()[places].clone())
    optimizers = [evermoe.optim.Muon([layer.weights], lr=0.02) for layer in (full, part)]
    for number in range(3):
        (gradient,) = drawn([full.weights.shape], number)
        step(optimizers[0], [gradient])
        step(optimizers[1], [gradient[places]])
    assert torch.equal(full.weights[places], part.weights)
    states = [optimizer.state_dict()["state"][0]["momentum_buffer"] for optimizer in optimizers]
    assert torch.equal(states[0][places], states[1])


def test_a_copied_layer_is_one_of_experts_too():
    layer = copy.deepcopy(evermoe.Experts(evermoe.Expert(8, 16), 3))
    plain = nn.Parameter(layer.weights.detach().clone())
    (gradient,) = drawn([layer.weights.shape], 0)
    for weights in (layer.weights, plain):
        step(evermoe.optim.Muon([weights], lr=0.02), [gradient])
    assert not torch.allclose(layer.weights, plain, atol=1e-3)


def test_singular_values_come_near_one():
    (matrix,) = drawn([(32, 12)], 0)
    found = orthogonalized(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert found.dtype == torch.bfloat16 and found.shape == matrix.shape
    values = torch.linalg.svdvals(found.float())
    assert values.min() > 0.6 and values.max() < 1.3


def test_the_factor_multiplies_gradients_and_leaves_them():
    ours, theirs = (nn.Parameter(drawn([(8, 12)], 0)[0]) for _ in range(2))
    (gradient,) = drawn([(8, 12)], 1)
    step(evermoe.optim.Muon([ours], lr=0.02, eps=2.0), [gradient], factor=0.25)
    step(evermoe.optim.Muon([theirs], lr=0.02, eps=2.0), [gradient * 0.25])
    assert torch.equal(ours, theirs) and torch.equal(ours.grad, gradient)
    for factor in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="factor: expected a finite number, 0 or more"):
            evermoe.optim.Muon([ours]).step(factor=factor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_masters(dtype):
    start = drawn([(8, 12)], 0)[0].to(dtype)
    half, full = nn.Parameter(start.clone()), nn.Parameter(start.float())
    optimizers = [evermoe.optim.Muon([each], lr=1e-3) for each in (half, full)]
    for number in range(3):
        gradient = drawn([(8, 12)], number + 1)[0].to(dtype)
        step(optimizers[0], [gradient])
        step(optimizers[1], [gradient.float()])
    master = optimizers[0].state[half]["master_param"]
    assert torch.equal(master, full) and torch.equal(half, full.to(dtype))
    resumed = evermoe.optim.Muon([half], lr=1e-3)
    resumed.load_state_dict(optimizers[0].state_dict())
    assert torch.equal(resumed.state[half]["master_param"], master)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr: expected a finite number, 0 or more, got -1.0"),
        ({"weight_decay": -0.1}, "weight_decay: expected a finite number"),
        ({"momentum": -0.1}, "momentum: expected a finite number"),
        ({"adjust_lr_fn": "moonshot"}, "adjust_lr_fn: expected one of .*, got 'moonshot'"),
        ({"ns_steps": 100}, "ns_steps: expected a whole number from 0 to 99, got 100"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients: expected three numbers"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        evermoe.optim.Muon([nn.Parameter(torch.ones(2, 2))], **options)


def test_what_is_no_matrix_is_refused_by_name():
    with pytest.raises(ValueError, match=r"expected matrices, got number 1 of the group with shape \(4,\)"):
        evermoe.optim.Muon(nn.Linear(2, 4).parameters())
    layer = evermoe.Experts(evermoe.Expert(8, 16, bias=True), 2)
    with pytest.raises(ValueError, match="number 0 of the group has the weights of experts with biases"):
        evermoe.optim.Muon([layer.weights])
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = evermoe.optim.Muon([weight])
    weight.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="expected dense gradients"):
        optimizer.step()


def test_its_steps_are_not_repeated():
    with pytest.raises(NotReplayable, match="Muon multiplies matrices, whose products round differently on other"):
        calibrate(evermoe.optim.Muon([nn.Parameter(torch.ones(2, 2))]))
