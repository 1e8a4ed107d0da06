"""SGD's op against `torch.optim.SGD`, bit for bit, on the CPU and, where there is one, on a GPU."""

import itertools

import pytest
import torch

from evermoe.ops.optim import adamw_step, sgd_, sgd_step
from evermoe.optim import SGD
from support.floats import KINDS, normal, same_bits

PLAIN = {"lr": 0.1}
SETTINGS = {
    "plain": PLAIN,
    "plain with decay": PLAIN | {"weight_decay": 0.01},
    "momentum": PLAIN | {"momentum": 0.9},
    "nesterov": PLAIN | {"momentum": 0.9, "nesterov": True, "weight_decay": 0.03},
    "odd": {"lr": 0.0313, "momentum": 0.37, "dampening": 0.71, "weight_decay": 0.13},
    "maximize": {"lr": 1e-3, "momentum": 0.99, "maximize": True, "weight_decay": 1e-4},
    "large": {"lr": 10.0, "momentum": 1.5, "dampening": -0.5},
}
raw = torch.ops.evermoe


class Torch:
    """Torch's own SGD of one parameter, on the CPU."""

    def __init__(self, p, settings, **kind):
        self.p = torch.nn.Parameter(p.clone())
        self.optimizer = torch.optim.SGD([self.p], **settings, **kind)

    def step(self, gradient):
        self.p.grad = gradient.clone()
        self.optimizer.step()

    def equals(self, p, buffer):
        theirs = self.optimizer.state[self.p].get("momentum_buffer")
        same_buffer = theirs is None if buffer is None else same_bits(buffer.cpu(), theirs)
        return same_buffer and same_bits(p.cpu(), self.p.detach())


def fresh_state(p, settings):
    """The buffer holds NaNs, which the first step must not read."""
    return p.clone(), torch.full_like(p, torch.nan) if settings.get("momentum") else None


def numbers(settings, firsts, **more):
    return torch.stack([sgd_step(is_first=is_first, **settings, **more) for is_first in firsts])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("variant", "arithmetic", "sizes"),
    [
        ({"fused": True}, "evermoe", (8, 4096 + 8, 70_000)),
        ({"fused": True}, "torch_cpu_fused", (1, 7, 71, 2048 + 5, 70_003)),
        ({"foreach": True}, "evermoe", (1, 71, 4099)),
        ({"foreach": False}, "evermoe", (1, 71, 4099)),
    ],
)
@pytest.mark.few(37)
def test_equals_torch_bit_for_bit(settings, kind, variant, arithmetic, sizes, device):
    random = torch.Generator().manual_seed(0)
    for size in sizes:
        start = normal(size, random)
        theirs, ours = Torch(start, settings, **variant), fresh_state(start.to(device), settings)
        for t in range(20):
            gradient = KINDS[kind](size, random)
            theirs.step(gradient)
            sgd_(*ours, [gradient.to(device)], numbers(settings, [t == 0], arithmetic=arithmetic))
            assert theirs.equals(*ours), (size, t)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.few(2)
@pytest.mark.full
def test_equals_torch_over_a_thousand_steps(settings, device):
    """With a learning rate that changes, and batches of five steps, some of them without a gradient's bytes."""
    random = torch.Generator().manual_seed(1)
    start = normal(523, random)
    theirs, ours = Torch(start, settings, fused=True), fresh_state(start.to(device), settings)
    kinds = itertools.cycle(KINDS[kind] for kind in ("normal", "log_uniform", "some_zero", "subnormal"))
    for first in range(1, 1001, 5):
        gradients, rows = [], []
        for t in range(first, first + 5):
            rate = settings["lr"] / t**0.5
            theirs.optimizer.param_groups[0]["lr"] = rate
            gradient = torch.zeros(523) if t % 7 == 0 else next(kinds)(523, random)
            theirs.step(gradient)
            gradients.append(None if t % 7 == 0 else gradient.to(device))
            rows.append(numbers(settings | {"lr": rate}, [t == 1], arithmetic="torch_cpu_fused")[0])
        sgd_(*ours, gradients, torch.stack(rows))
        assert theirs.equals(*ours), first


@pytest.mark.parametrize("size", [0, 1, 7, 63, 2047, 2049, 10_007])
@pytest.mark.parametrize("settings", [SETTINGS["plain with decay"], SETTINGS["nesterov"]], ids=["plain", "nesterov"])
def test_batched_steps_equal_single_steps(size, settings, device):
    random = torch.Generator().manual_seed(size)
    start = normal(size, random).to(device)
    at_once, one_by_one = fresh_state(start, settings), fresh_state(start, settings)
    gradients = [normal(size, random).to(device) for _ in range(11)]
    gradients[3], gradients[10], gradients[5] = None, None, gradients[5].bfloat16()
    steps = numbers(settings, [t == 0 for t in range(11)])
    steps[4] = numbers(settings, [False], loss_scale=1024.0, clip=0.3, arithmetic="torch_cpu_fused")[0]
    sgd_(*at_once, gradients, steps)
    for gradient, step in zip(gradients, steps, strict=True):
        sgd_(*one_by_one, [gradient], step[None])
    kept = slice(None) if settings.get("momentum") else slice(1)
    for one, two in zip(at_once[kept], one_by_one[kept], strict=True):
        assert same_bits(one, two)
    assert size == 0 or not same_bits(at_once[0], start)


def test_loss_scale_divides_then_clip_multiplies_then_maximize_negates(device):
    random = torch.Generator().manual_seed(3)
    start, gradient = normal(1000, random).to(device), normal(1000, random)
    settings = SETTINGS["nesterov"]
    ours, plain = fresh_state(start, settings), fresh_state(start, settings)
    sgd_(*ours, [gradient.to(device)], numbers(settings, [True], loss_scale=3.0, clip=0.7, maximize=True))
    scaled = -((gradient / 3.0) * 0.7)  # on the CPU: torch multiplies by 1 / 3 on a GPU
    sgd_(*plain, [scaled.to(device)], numbers(settings, [True]))
    assert all(same_bits(one, two) for one, two in zip(ours, plain, strict=True))


def test_the_documented_example(device):
    p, buffer = torch.tensor([4.0], device=device), torch.tensor([6.0], device=device)
    step = sgd_step(is_first=False, lr=0.5, momentum=0.5, weight_decay=0.25)
    assert step.tolist() == [0, 1, 1, 0.25, 0.5, 1, 0.5, 0, 0]
    sgd_(p, buffer, [torch.tensor([2.0], device=device)], step[None])
    assert (p.item(), buffer.item()) == (1.0, 6.0)


@pytest.mark.parametrize("with_buffer", [True, False])
def test_opcheck(with_buffer, device):
    settings = SETTINGS["nesterov" if with_buffer else "plain"]
    p, _ = fresh_state(torch.ones(5, 3, device=device), settings)
    buffer = torch.zeros_like(p) if with_buffer else None
    arguments = (p, buffer, [torch.ones(5, 3, device=device), None], numbers(settings, [True, False]), None)
    results = torch.library.opcheck(raw.sgd_.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


def test_autograd_learns_that_the_buffer_changed(device):
    p, buffer = fresh_state(torch.ones(4, device=device), SETTINGS["momentum"])
    versions = p._version, buffer._version
    sgd_(p, buffer, [None], numbers(SETTINGS["momentum"], [True]))
    assert (p._version, buffer._version) == (versions[0] + 1, versions[1] + 1)


def refusals(device):
    p, buffer = torch.ones(4, 6, device=device), torch.zeros(4, 6, device=device)
    gradient, steps = torch.ones_like(p), numbers(SETTINGS["momentum"], [True])
    wrong = steps.clone()
    wrong[0, 7] = 0.5
    adamw = adamw_step(t=1, lr=1.0, arithmetic="torch_cuda_foreach")[None, :9]
    yield "p: expected float32 of shape", lambda: sgd_(p.double(), buffer, [gradient], steps)
    yield r"buffer: expected float32 of shape \[4, 6\]", lambda: sgd_(p, buffer[:3], [None], steps)
    yield "buffer: expected one for a step with momentum 0.9, got None", lambda: sgd_(p, None, [None], steps)
    yield "buffer: expected memory of its own, got .* overlaps p", lambda: sgd_(p, p, [None], steps)
    yield "gradients: .* overlaps buffer", lambda: sgd_(p, buffer, [buffer], steps)
    yield "gradients: expected float32 or bfloat16", lambda: sgd_(p, buffer, [gradient.half()], steps)
    yield r"steps: expected float32 of shape \[2, 9\]", lambda: sgd_(p, buffer, [None, None], steps)
    yield "steps: expected 0 or 1 for is_first", lambda: sgd_(p, buffer, [None], wrong)
    yield "steps: expected rows that begin with the number of an arithmetic", lambda: sgd_(p, buffer, [None], adamw)


@pytest.mark.parametrize("index", range(9))
def test_refusals_say_what_was_expected_and_change_nothing(index, device):
    message, call = list(refusals(device))[index]
    with pytest.raises(RuntimeError, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("momentum", -0.1),
        ("dampening", float("nan")),
        ("weight_decay", float("inf")),
        ("nesterov", True),
        ("loss_scale", 0.0),
        ("clip", -1.0),
        ("arithmetic", "torch_cuda_fused"),
    ],
)
def test_numbers_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected"):
        sgd_step(**PLAIN | {"is_first": True} | {name: value})


def parameters(seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=random)) for shape in ((8, 16), (24,), ())]


def train(optimizer, params, steps, start=0):
    for step in range(start, start + steps):
        random = torch.Generator().manual_seed(step)
        for number, parameter in enumerate(params):
            skipped = number == 1 and step % 3 == 1
            parameter.grad = None if skipped else torch.randn(parameter.shape, generator=random)
        optimizer.step()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_class_trains_like_torchs_and_takes_its_state(settings):
    ours, theirs = parameters(), parameters()
    optimizers = SGD(ours, **settings), torch.optim.SGD(theirs, **settings)
    train(optimizers[0], ours, 5)
    train(optimizers[1], theirs, 5)
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
    swapped = SGD(theirs, **settings), torch.optim.SGD(ours, **settings)
    swapped[0].load_state_dict(optimizers[1].state_dict())
    swapped[1].load_state_dict(optimizers[0].state_dict())
    train(swapped[0], theirs, 5, start=5)
    train(swapped[1], ours, 5, start=5)
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], parameters()[0])


def test_class_without_momentum_keeps_no_state():
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    train(optimizer, params, 2)
    assert not any(optimizer.state[parameter] for parameter in params)


@pytest.mark.parametrize(
    ("name", "options"), [("lr", {"lr": -1.0}), ("momentum", {"momentum": -1.0}), ("nesterov", {"nesterov": True})]
)
def test_class_refuses_wrong_options(name, options):
    with pytest.raises(ValueError, match=f"{name}: expected"):
        SGD(parameters(), **options)
