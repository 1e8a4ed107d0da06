"""AdamW's op against `torch.optim.AdamW(fused=True)`, bit for bit, on the CPU and, where there is one, on a GPU."""

import itertools

import pytest
import torch

from evermoe.copies.replay.calibrate import powers
from evermoe.ops.cache import has_cuda_kernels
from evermoe.ops.optim import adamw_, adamw_step
from support.floats import KINDS, log_uniform, normal, same_bits, subnormal

STEP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
SETTINGS = {
    "defaults": STEP,
    "no decay": STEP | {"weight_decay": 0.0},
    "odd": {"lr": 0.37, "betas": (0.83, 0.971), "eps": 3e-7, "weight_decay": 0.31},
    "other end": {"lr": 10.0, "betas": (0.3, 0.5), "eps": 0.0, "weight_decay": 0.1},
    "maximize": STEP | {"maximize": True},
}
raw = torch.ops.evermoe


class Torch:
    """Torch's own fused AdamW of one parameter, on the CPU."""

    def __init__(self, p, settings):
        self.p = torch.nn.Parameter(p.clone())
        self.optimizer = torch.optim.AdamW([self.p], fused=True, **settings)

    def step(self, gradient):
        self.p.grad = gradient.clone()
        self.optimizer.step()

    def equals(self, state):
        moments = self.optimizer.state[self.p]
        theirs = (self.p.detach(), moments["exp_avg"], moments["exp_avg_sq"])
        return all(same_bits(ours.cpu(), other) for ours, other in zip(state, theirs, strict=True))


def fresh_state(p):
    return p.clone(), torch.zeros_like(p), torch.zeros_like(p)


def numbers(settings, steps, **more):
    return torch.stack([adamw_step(t=t, **settings, **more) for t in steps])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arithmetic", "sizes"), [("evermoe", (8, 4096 + 8, 70_000)), ("torch_cpu_fused", (1, 7, 71, 2048 + 5, 70_003))]
)
@pytest.mark.few(17)
def test_equals_torch_bit_for_bit(settings, kind, arithmetic, sizes, device):
    random = torch.Generator().manual_seed(0)
    for size in sizes:
        start = normal(size, random)
        theirs, ours = Torch(start, settings), fresh_state(start.to(device))
        for t in range(1, 31):
            gradient = KINDS[kind](size, random)
            theirs.step(gradient)
            adamw_(*ours, [gradient.to(device)], numbers(settings, [t], arithmetic=arithmetic))
            assert theirs.equals(ours), (size, t)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.few(2)
@pytest.mark.full
def test_equals_torch_over_a_thousand_steps(settings, device):
    """With a learning rate that changes, and batches of five steps, some of them without a gradient's bytes."""
    random = torch.Generator().manual_seed(1)
    start = normal(512, random)
    theirs, ours = Torch(start, settings), fresh_state(start.to(device))
    kinds = itertools.cycle(KINDS[kind] for kind in ("normal", "log_uniform", "some_zero", "subnormal"))
    for first in range(1, 1001, 5):
        gradients, rows = [], []
        for t in range(first, first + 5):
            rate = settings["lr"] / t**0.5
            theirs.optimizer.param_groups[0]["lr"] = rate
            gradient = torch.zeros(512) if t % 7 == 0 else next(kinds)(512, random)
            theirs.step(gradient)
            gradients.append(None if t % 7 == 0 else gradient.to(device))
            rows.append(adamw_step(t=t, **settings | {"lr": rate}))
        adamw_(*ours, gradients, torch.stack(rows))
        assert theirs.equals(ours), first


@pytest.mark.parametrize("size", [0, 1, 7, 63, 2047, 2049, 10_007])
def test_batched_steps_equal_single_steps(size, device):
    random = torch.Generator().manual_seed(size)
    start = normal(size, random).to(device)
    at_once, one_by_one = fresh_state(start), fresh_state(start)
    gradients = [normal(size, random).to(device) for _ in range(11)]
    gradients[3], gradients[10], gradients[5] = None, None, gradients[5].bfloat16()
    steps = numbers(SETTINGS["odd"], range(1, 12))
    steps[4] = adamw_step(t=5, loss_scale=1024.0, clip=0.3, maximize=True, **SETTINGS["odd"])
    adamw_(*at_once, gradients, steps)
    for gradient, step in zip(gradients, steps, strict=True):
        adamw_(*one_by_one, [gradient], step[None])
    assert all(same_bits(one, two) for one, two in zip(at_once, one_by_one, strict=True))
    assert size == 0 or not same_bits(at_once[0], start)


def test_bfloat16_gradients_are_their_values(device):
    random = torch.Generator().manual_seed(2)
    start, gradient = normal(1000, random).to(device), log_uniform(1000, random).bfloat16().to(device)
    narrow, wide = fresh_state(start), fresh_state(start)
    adamw_(*narrow, [gradient], numbers(STEP, [1]))
    adamw_(*wide, [gradient.float()], numbers(STEP, [1]))
    assert all(same_bits(one, two) for one, two in zip(narrow, wide, strict=True))


def test_loss_scale_divides_then_clip_multiplies_then_maximize_negates(device):
    random = torch.Generator().manual_seed(3)
    start, gradient = normal(1000, random).to(device), normal(1000, random)
    ours, plain = fresh_state(start), fresh_state(start)
    step = adamw_step(t=1, loss_scale=3.0, clip=0.7, maximize=True, **STEP)
    adamw_(*ours, [gradient.to(device)], step[None])
    scaled = -((gradient / 3.0) * 0.7)  # on the CPU: torch multiplies by 1 / 3 on a GPU
    adamw_(*plain, [scaled.to(device)], numbers(STEP, [1]))
    assert all(same_bits(one, two) for one, two in zip(ours, plain, strict=True))


def test_subnormals_are_kept_whatever_the_thread_does():
    random = torch.Generator().manual_seed(4)
    state, gradient = fresh_state(normal(200_000, random)), subnormal(200_000, random)
    flushed = fresh_state(state[0])
    adamw_(*state, [gradient], numbers(STEP, [1]))
    torch.set_flush_denormal(True)
    try:
        adamw_(*flushed, [gradient], numbers(STEP, [1]))
        still_flushes = bool((gradient[:100] * 0.5 == 0).all())
    finally:
        torch.set_flush_denormal(False)
    assert still_flushes
    assert bool((state[1] != 0).any())
    assert all(same_bits(one, two) for one, two in zip(state, flushed, strict=True))


def test_bits_do_not_depend_on_threads():
    random = torch.Generator().manual_seed(5)
    start, gradient = normal(300_001, random), normal(300_001, random)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(fresh_state(start))
            adamw_(*results[-1], [gradient], numbers(STEP, [1]))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(same_bits(one, two) for one, two in zip(results[0], other, strict=True))


def test_the_documented_example(device):
    p, m, v = fresh_state(torch.tensor([4.0], device=device))
    step = adamw_step(t=1, lr=0.5, betas=(0.5, 0.75), eps=0.0, weight_decay=0.5)
    adamw_(p, m, v, [torch.tensor([2.0], device=device)], step[None])
    assert (p.item(), m.item(), v.item()) == (2.5, 1.0, 1.0)
    step = adamw_step(t=1, lr=0.5, betas=(0.5, 0.75), eps=0.25, weight_decay=0.5)
    assert step.tolist() == [0, 1, 1, 0.75, 0.5, 0.25, 0.75, 1, 0.5, 0.25]


def test_gradients_need_not_be_contiguous(device):
    gradient = torch.arange(12.0, device=device).view(3, 4).t()
    ours, plain = fresh_state(torch.ones(4, 3, device=device)), fresh_state(torch.ones(4, 3, device=device))
    adamw_(*ours, [gradient], numbers(STEP, [1]))
    adamw_(*plain, [gradient.contiguous()], numbers(STEP, [1]))
    assert all(same_bits(one, two) for one, two in zip(ours, plain, strict=True))


def test_opcheck(device):
    gradients = [torch.ones(5, 3, device=device), None]
    arguments = (*fresh_state(torch.ones(5, 3, device=device)), gradients, numbers(STEP, [1, 2]))
    for rounded in (None, torch.ones(5, 3, device=device).bfloat16()):
        results = torch.library.opcheck(raw.adamw_.default, (*arguments, rounded))
        assert set(results.values()) == {"SUCCESS"}


def test_compiled_step(device):
    def train(p, m, v, gradient, step):
        adamw_(p, m, v, [gradient * 2], step)
        return p + 1

    start = torch.linspace(-1, 1, 40, device=device)
    eager, traced = fresh_state(start), fresh_state(start)
    result = train(*eager, start, numbers(STEP, [1]))
    assert torch.equal(
        torch.compile(train, fullgraph=True, backend="aot_eager")(*traced, start, numbers(STEP, [1])), result
    )
    assert all(same_bits(one, two) for one, two in zip(eager, traced, strict=True))


def test_autograd_learns_that_the_buffer_changed(device):
    state = fresh_state(torch.ones(4, device=device))
    versions = [tensor._version for tensor in state]
    adamw_(*state, [None], numbers(STEP, [1]))
    assert [tensor._version for tensor in state] == [version + 1 for version in versions]


def refusals(device):
    p, m, v = fresh_state(torch.ones(4, 6, device=device))
    gradient, steps, memory = torch.ones_like(p), numbers(STEP, [1]), torch.ones(100, device=device)
    leaf = p.clone().requires_grad_()
    yield "p: expected float32 of shape", lambda: adamw_(p.double(), m, v, [gradient], steps)
    yield r"m: expected float32 of shape \[4, 6\], got bfloat16", lambda: adamw_(p, m.bfloat16(), v, [None], steps)
    yield r"v: expected float32 of shape \[4, 6\], got .*\[3, 6\]", lambda: adamw_(p, m, v[:3], [None], steps)
    yield "p: expected a contiguous", lambda: adamw_(p.t(), m.t(), v.t(), [None], steps)
    yield "m: expected memory of its own, got .* overlaps p", lambda: adamw_(p, p, v, [None], steps)
    yield (
        "v: expected memory of its own, got .* overlaps m",
        lambda: adamw_(memory[80:], memory[:20], memory[10:30], [None], steps),
    )
    yield "gradients: .* overlaps v", lambda: adamw_(p, m, v, [v], steps)
    yield "gradients: expected float32 or bfloat16", lambda: adamw_(p, m, v, [gradient.half()], steps)
    yield r"gradients: .*\[4, 6\], got float32 .*\[24\]", lambda: adamw_(p, m, v, [gradient.view(-1)], steps)
    yield r"steps: expected float32 of shape \[2, 10\]", lambda: adamw_(p, m, v, [None, None], steps)
    yield "steps: expected float32 of shape .*, got float64", lambda: adamw_(p, m, v, [None], steps.double())
    unknown = torch.full_like(steps, 4.0)
    yield "steps: expected rows that begin with the number", lambda: adamw_(p, m, v, [None], unknown)
    yield "no gradient", lambda: adamw_(leaf, m, v, [gradient], steps)


@pytest.mark.parametrize("index", range(13))
def test_refusals_say_what_was_expected_and_change_nothing(index, device):
    message, call = list(refusals(device))[index]
    with pytest.raises(RuntimeError, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("t", 0),
        ("t", -5),
        ("lr", -1.0),
        ("lr", float("nan")),
        ("betas", (1.0, 0.9)),
        ("betas", (0.9, -0.1)),
        ("eps", -1e-8),
        ("weight_decay", float("inf")),
        ("loss_scale", 0.0),
        ("clip", -1.0),
        ("arithmetic", "torch_fused"),
        ("powers", (0.9, 0.999)),
    ],
)
def test_numbers_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected"):
        adamw_step(**STEP | {"t": 1} | {name: value})


@pytest.mark.parametrize("wrong", [None, (1.0, 0.5), (0.95, 0.5), (-0.1, 0.5)])
def test_powers_are_asked_for_where_they_are_needed(wrong):
    with pytest.raises(ValueError, match="powers: expected beta"):
        adamw_step(t=1, arithmetic="torch_cuda_fused", powers=wrong, **STEP)


@pytest.mark.gpu
@pytest.mark.chip
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["fused", "foreach"])
def test_equals_torch_on_cuda_bit_for_bit(settings, kind, variant):
    """The trainer's optimizer on the GPU, repeated on the GPU and on the CPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    random = torch.Generator().manual_seed(0)
    arithmetic = f"torch_cuda_{variant}"
    for size in (1, 71, 70_003):
        start = normal(size, random)
        theirs = torch.nn.Parameter(start.cuda())
        optimizer = torch.optim.AdamW([theirs], **settings, **{variant: True})
        states = {"cpu": fresh_state(start)}
        if has_cuda_kernels():
            states["cuda"] = fresh_state(start.cuda())
        for t in range(1, 31):
            gradient = KINDS[kind](size, random)
            theirs.grad = gradient.cuda()
            optimizer.step()
            given = {"powers": powers(settings["betas"], t, "cuda")} if variant == "fused" else {}
            for where, ours in states.items():
                adamw_(*ours, [gradient.to(where)], numbers(settings, [t], arithmetic=arithmetic, **given))
        moments = optimizer.state[theirs]
        for ours in states.values():
            for one, two in zip(ours, (theirs.detach(), moments["exp_avg"], moments["exp_avg_sq"]), strict=True):
                assert same_bits(one.cpu(), two.cpu()), size
