"""`adamw_all_` and `sgd_all_`: a step of each of many parameters in one call, the bits of a call for each."""

import pytest
import torch

from evermoe import ops
from evermoe.ops.optim import adamw_all_, adamw_step, sgd_, sgd_all_, sgd_step
from support.floats import normal, same_bits

ADAMW = {"lr": 0.3, "betas": (0.9, 0.97), "eps": 1e-9, "weight_decay": 0.2}
SGD = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.2}
SIZES = [1, 7, 0, 8, 2049, 64, 70_001, 15]
COUNT = 150  # more than two launches take
PLAIN = sgd_step(is_first=False, lr=0.5)
raw = torch.ops.evermoe


def rows(op, count):
    """Of three steps in turn; AdamW's of two arithmetics."""
    if count == 0:
        return torch.empty(0, 10 if op == "adamw" else 9)
    if op == "adamw":
        arithmetics = ["evermoe", "torch_cpu_fused"]
        return torch.stack([adamw_step(t=i % 3 + 1, arithmetic=arithmetics[i % 2], **ADAMW) for i in range(count)])
    return torch.stack([sgd_step(is_first=i % 3 == 0, **SGD) for i in range(count)])


def parameters(count, arrays, device):
    """For each array one list of tensors; every third is not aligned to packs."""
    random = torch.Generator().manual_seed(count)

    def one(number):
        start = int(number % 3 == 2)
        return normal(SIZES[number % len(SIZES)] + start, random).to(device)[start:].abs()

    return [[one(number) for number in range(count)] for _ in range(arrays)]


def gradients_of(p):
    """float32, bfloat16, not contiguous, or none."""
    kinds = [torch.Tensor.sin, lambda t: t.cos().bfloat16(), lambda t: torch.stack([t, t], 1)[:, 1], lambda t: None]
    return [kinds[number % 4](tensor) for number, tensor in enumerate(p)]


@pytest.mark.parametrize("count", [0, 1, 5, COUNT])
@pytest.mark.parametrize("op", ["adamw", "sgd"])
def test_equals_a_call_for_each(op, count, device):
    ours = parameters(count, 3 if op == "adamw" else 2, device)
    theirs = [[tensor.clone() for tensor in array] for array in ours]
    gradients, steps = gradients_of(ours[0]), rows(op, count)
    getattr(ops.optim, f"{op}_all_")(*ours, gradients, steps)
    for *state, gradient, step in zip(*theirs, gradients, steps, strict=True):
        getattr(ops.optim, f"{op}_")(*state, [gradient], step[None])
    for array, other in zip(ours, theirs, strict=True):
        assert all(same_bits(one, two) for one, two in zip(array, other, strict=True))
    assert count == 0 or not torch.equal(ours[0][0], parameters(count, 1, device)[0][0])


def test_parameters_without_momentum_have_no_buffer(device):
    (ours, buffers), (theirs, again) = parameters(4, 2, device), parameters(4, 2, device)
    steps = torch.stack([sgd_step(is_first=False, **SGD | {"momentum": 0.9 * (i % 2)}) for i in range(4)])
    gradients = gradients_of(ours)
    sgd_all_(ours, buffers[1::2], gradients, steps)
    for p, buffer, gradient, step in zip(theirs, again, gradients, steps, strict=True):
        sgd_(p, buffer, [gradient], step[None])
    for one, two in zip(ours + buffers, theirs + again, strict=True):
        assert same_bits(one, two)


def test_parameters_that_share_memory_are_stepped_in_their_order(device):
    """And a gradient that is another's parameter."""
    memories = [torch.linspace(-1, 1, 40, device=device) for _ in range(2)]
    ours, theirs = ([memory[:30], memory[10:], memory[:8]] for memory in memories)
    gradients = [[torch.ones(30, device=device), None, memory[20:28]] for memory in memories]
    steps = torch.stack([sgd_step(is_first=False, lr=0.3, weight_decay=0.5)] * 3)
    sgd_all_(ours, [], gradients[0], steps)
    for p, gradient, step in zip(theirs, gradients[1], steps, strict=True):
        sgd_(p, None, [gradient], step[None])
    assert same_bits(*memories)


def test_parameters_may_be_on_two_devices(device):
    parameters = [torch.ones(9), torch.ones(9, device=device)]
    gradients = [torch.ones(9), torch.ones(9, device=device)]
    sgd_all_(parameters, [], gradients, torch.stack([PLAIN] * 2))
    assert torch.equal(parameters[0], torch.full([9], 0.5))
    assert torch.equal(parameters[1].cpu(), parameters[0])


@pytest.mark.parametrize("count", [5, COUNT])
@pytest.mark.parametrize("op", ["adamw", "sgd"])
def test_rounded_weights_are_written_in_the_same_pass(op, count, device):
    """Weights of both types and none, in turn, with the bits of a copy; the masters' bits stay the same."""
    ours = parameters(count, 3 if op == "adamw" else 2, device)
    theirs = [[tensor.clone() for tensor in array] for array in ours]
    kinds = torch.bfloat16, None, torch.float16
    rounded = [
        None if (kind := kinds[n % 3]) is None else torch.zeros_like(p, dtype=kind) for n, p in enumerate(ours[0])
    ]
    gradients, steps = gradients_of(ours[0]), rows(op, count)
    getattr(ops.optim, f"{op}_all_")(*ours, gradients, steps, rounded)
    getattr(ops.optim, f"{op}_all_")(*theirs, gradients, steps)
    for array, other in zip(ours, theirs, strict=True):
        assert all(same_bits(one, two) for one, two in zip(array, other, strict=True))
    for weights, master in zip(rounded, ours[0], strict=True):
        assert weights is None or same_bits(weights.float(), master.to(weights.dtype).float())
        assert weights is None or weights._version == 1


@pytest.mark.parametrize("op", ["adamw", "sgd"])
def test_opcheck(op, device):
    state = [[torch.ones(5, 3, device=device), torch.ones(4, device=device)] for _ in range(3 if op == "adamw" else 2)]
    arguments = (*state, [torch.ones(5, 3, device=device), None], rows(op, 2))
    for rounded in ([], [torch.ones(4, device=device).bfloat16()]):
        results = torch.library.opcheck(getattr(raw, f"{op}_all_").default, (*arguments, rounded, [1][: len(rounded)]))
        assert set(results.values()) == {"SUCCESS"}


def test_opcheck_without_buffers(device):
    arguments = ([torch.ones(4, device=device)], [], [torch.ones(4, device=device)], PLAIN[None], [], [])
    assert set(torch.library.opcheck(raw.sgd_all_.default, arguments).values()) == {"SUCCESS"}


def test_compiled_step(device):
    def train(p, q, steps):
        sgd_all_([p, q], [], [p * 2, q * 3], steps)
        return p + q

    steps = torch.stack([PLAIN] * 2)
    eager, traced = ([torch.linspace(-1, 1, 40, device=device) * k for k in (1, 2)] for _ in range(2))
    result = train(*eager, steps)
    compiled = torch.compile(train, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*traced, steps), result)
    assert all(same_bits(one, two) for one, two in zip(eager, traced, strict=True))


def test_autograd_learns_that_the_buffer_changed(device):
    state = parameters(3, 3, device)
    versions = [tensor._version for array in state for tensor in array]
    adamw_all_(*state, [None] * 3, rows("adamw", 3))
    assert [tensor._version for array in state for tensor in array] == [version + 1 for version in versions]


def refusals(p, m, v):
    device = p[0].device
    gradients, steps = [torch.ones_like(tensor) for tensor in p], rows("adamw", 5)

    def change(tensors, index, value):
        return [value if number == index else tensor for number, tensor in enumerate(tensors)]

    def adamw(p=p, m=m, v=v, gradients=gradients, steps=steps, rounded=()):
        return lambda: adamw_all_(p, m, v, gradients, steps, rounded)

    narrow, short = gradients[4].half(), m[3][:4]
    yield "parameter 4: gradients: expected float32 or bfloat16", adamw(gradients=change(gradients, 4, narrow))
    yield r"parameter 3: m: expected float32 of shape \[8\], got .*\[4\]", adamw(m=change(m, 3, short))
    yield "parameter 1: v: expected memory of its own", adamw(v=change(v, 1, p[1]))
    yield "v: expected one for each of the 5 parameters, got 4", adamw(v=v[:4])
    yield "gradients: expected one for each of the 5 parameters, got 6", adamw(gradients=[*gradients, None])
    yield r"steps: expected float32 of shape \[5, 10\]", adamw(steps=steps[:4])
    freed = torch.ones(2049, device=device)
    freed.untyped_storage().resize_(0)
    yield "parameter 4: expected tensors with memory", adamw(gradients=change(gradients, 4, freed))
    yield "no gradient", adamw(p=change(p, 2, p[2].clone().requires_grad_()))
    weights = [tensor.bfloat16() for tensor in p]
    wide, late = change(weights, 2, p[2].clone()), m[4].view(torch.bfloat16)[: len(p[4])]
    yield "parameter 2: rounded: expected bfloat16 or float16", adamw(rounded=wide)
    yield r"parameter 1: rounded: .* of shape \[7\], got .*\[6\]", adamw(rounded=change(weights, 1, weights[1][:6]))
    yield "parameter 4: rounded: expected memory of its own, .* overlaps m", adamw(rounded=change(weights, 4, late))
    yield "rounded: expected one for each of the 5 parameters, got 4", adamw(rounded=weights[:4])
    short = v[:3] + v[3:4] * 2
    yield (
        r"parameter 4: buffer: expected float32 of shape \[2049\], got .*\[8\]",
        lambda: sgd_all_(p, short, gradients, rows("sgd", 5)),
    )
    yield (
        "buffers: expected one for each of the 5 parameters whose step has momentum, got 1",
        lambda: sgd_all_(p, v[:1], gradients, rows("sgd", 5)),
    )


@pytest.mark.parametrize("index", range(14))
def test_refusals_name_the_parameter_and_change_nothing(index, device):
    state = parameters(5, 3, device)
    message, call = list(refusals(*state))[index]
    with pytest.raises(RuntimeError, match=message):
        call()
    for ours, untouched in zip(state, parameters(5, 3, device), strict=True):
        assert all(same_bits(one, two) for one, two in zip(ours, untouched, strict=True))
