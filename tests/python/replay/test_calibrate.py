"""The arithmetic that repeats an optimizer's steps, found by trying."""

import copy

import pytest
import torch

import evermoe
from evermoe.copies.replay.calibrate import Arithmetic, calibrate, powers, repeat_tensor_steps
from evermoe.errors import NotReplayable
from evermoe.ops.cache import has_cuda_kernels
from support.floats import same_bits


def parameters(device="cpu"):
    random = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=random).to(device)) for shape in ((5, 3), (17,), ())]


def take_steps(optimizer, count):
    random = torch.Generator().manual_seed(1)
    for _ in range(count):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=random).to(parameter.device)
        optimizer.step()


class Approximate(torch.optim.AdamW):
    """As a compiler's fast maths: the last bits of the parameters are other ones."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 + 2.0**-23)
        return loss


class Rounded(evermoe.optim.SGD):
    """Made with an option that its groups do not hold."""

    def __init__(self, params, lr=0.1, momentum=0.0, mode="near"):
        super().__init__(params, lr, momentum)
        self.mode = mode


class Flushing(torch.optim.SGD):
    """Takes subnormal gradients for zeros, as kernels do that are compiled with flush to zero."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.where(parameter.grad.abs() < 2.0**-126, 0.0, parameter.grad)
        return super().step(closure)


class Late(evermoe.optim.AdamW):
    """Has the bits of evermoe's for two steps."""

    steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        self.steps += 1
        if self.steps > 2:
            for group in self.param_groups:
                group["params"][0].add_(1)
        return loss


MATCHING = {
    "adamw": (lambda p: torch.optim.AdamW(p, fused=True), Arithmetic("adamw", "torch_cpu_fused")),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.1, fused=True), Arithmetic("adamw", "torch_cpu_fused")),
    "tensor": (
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
        Arithmetic("adamw", "torch_cpu_fused"),
    ),
    "other end": (
        lambda p: torch.optim.AdamW(p, betas=(0.3, 0.5), eps=0.0, weight_decay=0.3, maximize=True, fused=True),
        Arithmetic("adamw", "torch_cpu_fused"),
    ),
    "evermoe's": (lambda p: evermoe.optim.AdamW(p, lr=0.3), Arithmetic("adamw", "evermoe")),
    "sgd": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
        Arithmetic("sgd", "torch_cpu_fused"),
    ),
    "sgd foreach": (
        lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, foreach=True),
        Arithmetic("sgd", "evermoe"),
    ),
    "plain sgd": (lambda p: torch.optim.SGD(p, weight_decay=0.1), Arithmetic("sgd", "evermoe")),
    "evermoe's sgd": (lambda p: evermoe.optim.SGD(p, momentum=0.5, dampening=0.1), Arithmetic("sgd", "evermoe")),
}
REFUSED = {
    "fast maths": (Approximate, "Approximate rounds like none of the arithmetics evermoe, .* differs in .* words"),
    "late": (Late, "evermoe is the nearest: step 3 differs in 1 word, first in p"),
    "flushes": (lambda p: Flushing(p, lr=0.1), "Flushing rounds like none of the arithmetics evermoe"),
    "coupled decay": (lambda p: torch.optim.Adam(p, weight_decay=0.1, fused=True), "Adam rounds like none"),
    "nadam": (torch.optim.NAdam, "NAdam rounds like none"),
    "rmsprop": (torch.optim.RMSprop, "RMSprop has neither the options of AdamW nor those of SGD"),
    "amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True, which keeps a third moment"),
    "double": (
        lambda p: torch.optim.AdamW([q.double().detach() for q in p]),
        "parameters in torch.float64, not float32",
    ),
    "hidden option": (lambda p: Rounded(p, mode="far"), "created with mode=far, which its groups do not contain"),
}


@pytest.mark.parametrize("name", MATCHING)
def test_arithmetic_is_found(name):
    make, arithmetic = MATCHING[name]
    assert calibrate(make(parameters())) == arithmetic


@pytest.mark.parametrize("lr", [0.0, 1e-30])
def test_warm_up_does_not_hide_the_arithmetic(lr):
    """With a rate of 0 the parameters stay as they are, whatever is added to them."""
    for fused, name in ((True, "torch_cpu_fused"), (False, None)):
        optimizer = torch.optim.AdamW(parameters(), lr=1e-3, fused=fused)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step + lr)
        assert optimizer.param_groups[0]["lr"] == 1e-3 * lr
        if name:
            assert calibrate(optimizer).variant == name
        else:
            with pytest.raises(evermoe.errors.NotReplayable, match=r"AdamW without fused=True bit .* first in p"):
                calibrate(optimizer)
        assert optimizer.param_groups[0]["lr"] == 1e-3 * lr
    scheduled = torch.optim.AdamW(parameters(), lr=torch.tensor(lr), foreach=False)
    with pytest.raises(evermoe.errors.NotReplayable, match="first in p"):
        calibrate(scheduled)
    assert scheduled.param_groups[0]["lr"] == lr


@pytest.mark.parametrize("name", REFUSED)
def test_other_optimizers_are_refused_with_the_reason(name):
    make, message = REFUSED[name]
    with pytest.raises(evermoe.errors.NotReplayable, match=message) as refusal:
        calibrate(make(parameters()))
    assert "full state" in str(refusal.value)


def test_groups_have_options_of_their_own():
    first, *rest = parameters()
    groups = [{"params": [first], "lr": 0.5}, {"params": rest, "betas": (0.4, 0.99), "weight_decay": 0.0}]
    assert calibrate(torch.optim.AdamW(groups, fused=True)).variant == "torch_cpu_fused"


def test_optimizer_is_neither_changed_nor_its_hooks_called():
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=torch.tensor(0.1), fused=True)
    take_steps(optimizer, 3)
    before = copy.deepcopy((params, optimizer.state_dict(), [p.grad for p in params], torch.get_rng_state()))
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    calibrate(optimizer)
    after = params, optimizer.state_dict(), [p.grad for p in params], torch.get_rng_state()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not called


@pytest.mark.parametrize("name", MATCHING)
def test_steps_are_repeated_from_the_log(name):
    """Repeat a step as a replica does: state before, gradients and numbers in; the trainer's bits out."""
    params = parameters()
    optimizer = MATCHING[name][0](params)
    arithmetic = calibrate(optimizer)
    take_steps(optimizer, 1)
    names = {"adamw": ["exp_avg", "exp_avg_sq"], "sgd": ["momentum_buffer"]}[arithmetic.rule]
    group, p = optimizer.param_groups[0], params[0]
    replica = p.detach().clone()
    kept = {name: optimizer.state[p][name].clone() for name in names if optimizer.state[p].get(name) is not None}
    gradients, rows = [], []
    for t in range(2, 6):
        group["lr"] = 0.1 / t
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
        gradients.append(p.grad.clone())
        rows.append(arithmetic.numbers(group, t))
        optimizer.step()
    repeat_tensor_steps(replica, kept, gradients, torch.stack(rows))
    assert same_bits(replica, p.detach())
    assert all(same_bits(kept[name], optimizer.state[p][name]) for name in kept)


def test_powers_are_a_gpus():
    with pytest.raises(ValueError, match="device: expected the trainer's CUDA device"):
        powers((0.9, 0.999), 3, "cpu")
    with pytest.raises(ValueError, match="device: expected the trainer's CUDA device"):
        Arithmetic("adamw", "torch_cuda_fused").numbers(torch.optim.AdamW(parameters()).param_groups[0], 1)


@pytest.mark.gpu
@pytest.mark.chip
@pytest.mark.parametrize("variant", ["fused", "foreach"])
def test_arithmetic_is_found_on_cuda(variant):
    if not torch.cuda.is_available() or not has_cuda_kernels():
        pytest.skip("no CUDA device, or no kernels in this build")
    optimizer = torch.optim.AdamW(parameters("cuda"), **{variant: True})
    assert calibrate(optimizer) == Arithmetic("adamw", f"torch_cuda_{variant}")
    assert calibrate(evermoe.optim.AdamW(parameters("cuda"))) == Arithmetic("adamw", "evermoe")
    assert calibrate(evermoe.optim.SGD(parameters("cuda"), momentum=0.9)) == Arithmetic("sgd", "evermoe")


def test_an_optimizer_whose_processor_flushes_subnormals_cannot_be_repeated():
    """A replica keeps them; the trainer's digests would show it one day, when moments have become small."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(40))], fused=True)
    calibrate(optimizer)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        with pytest.raises(NotReplayable):
            calibrate(optimizer)
    finally:
        torch.set_flush_denormal(False)
