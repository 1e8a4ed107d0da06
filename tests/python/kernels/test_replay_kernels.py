"""The optimizers' kernels, run on the CPU from their own source, beside the CPU ops: the same bits."""

import struct

import pytest
import torch

from evermoe import ops
from support.kernels import Buffer

SIZES = [(0, 1), (1, 4), (3, 4), (7, 1), (8, 4), (15, 4), (257, 4), (1031, 1), (1031, 4)]
MAX_STEPS, STEP_BYTES = 8, 48  # as in kernels/replay.cu
KINDS = {torch.float32: 1, torch.bfloat16: 2}
ADAMW = {"lr": 0.3, "betas": (0.9, 0.97), "eps": 1e-9, "weight_decay": 0.2}
OTHER_END = ADAMW | {"betas": (0.3, 0.5), "maximize": True, "loss_scale": 3.0, "clip": 0.7}
SGD = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.2}


def table(steps, gradients):
    """The kernels' last argument: the numbers of each step, its kind of gradient, arithmetic and address."""
    packed = b""
    for (arithmetic, *numbers), gradient in zip(steps.tolist(), gradients, strict=True):
        kind, address = (0, 0) if gradient is None else (KINDS[gradient.dtype], gradient.data_ptr())
        filled = numbers + [0.0] * (9 - len(numbers))
        packed += struct.pack("<9fHHQ", *filled, kind, int(arithmetic), address)
    return packed.ljust(MAX_STEPS * STEP_BYTES, b"\0")


def draw(size):
    """Gradients of each kind, and two states: ordinary floats, and any bits (NaNs and infinities too)."""
    random = torch.Generator().manual_seed(size)
    bits = [torch.randint(-(1 << 31), (1 << 31) - 1, (size,), generator=random).int() for _ in range(4)]
    gradients = [torch.randn(size, generator=random), None, bits[0].view(torch.float32)]
    gradients += [torch.randn(size, generator=random).bfloat16(), torch.randn(size, generator=random)]
    ordinary = [torch.randn(size, generator=random) for _ in range(2)] + [torch.zeros(size)]
    return gradients, (ordinary, [values.view(torch.float32) for values in bits[1:]])


def check(kernels, name, op, state, gradients, steps, *more):
    """Floats of every kind are compared bit for bit; NaNs are NaNs, as which of them comes out is not said."""
    size = state[0].numel()
    ours, expected = [Buffer([size], torch.float32).set(values) for values in state], [v.clone() for v in state]
    used = [gradient for gradient in gradients if gradient is not None]
    addresses = list(ours)
    if name.startswith("sgd") and len(state) == 1:
        addresses.append(0)
    kernels(name, 2, 32, 0, *addresses, size, *more, len(steps), table(steps, gradients), also=used)
    op(*expected, *([None] * (len(addresses) - len(state))), gradients, steps)
    for buffer, values in zip(ours, expected, strict=True):
        buffer.equals_but_for_nans(values)


@pytest.mark.parametrize(("size", "per_thread"), SIZES)
@pytest.mark.parametrize("arithmetic", ["evermoe", "torch_cpu_fused", "torch_cuda_fused", "torch_cuda_foreach"])
def test_adamw(kernels, arithmetic, size, per_thread):
    gradients, states = draw(size)
    rows = []
    for t, options in enumerate([ADAMW, ADAMW, ADAMW | {"weight_decay": 0.0}, ADAMW | {"lr": 0.0}, OTHER_END], start=1):
        powers = tuple(beta**t for beta in options["betas"]) if arithmetic == "torch_cuda_fused" else None
        rows.append(ops.adamw_step(t=t, arithmetic=arithmetic, powers=powers, **options))
    for state in states:
        check(kernels, f"adamw_{per_thread}", ops.adamw_, state, gradients, torch.stack(rows))


@pytest.mark.parametrize(("size", "per_thread"), SIZES)
@pytest.mark.parametrize("arithmetic", ["evermoe", "torch_cpu_fused"])
def test_sgd(kernels, arithmetic, size, per_thread):
    gradients, states = draw(size)
    later = [SGD | {"nesterov": True}, SGD | {"dampening": 0.4}, SGD | {"weight_decay": 0.0, "momentum": 0.0}]
    later.append(SGD | {"maximize": True, "loss_scale": 3.0, "clip": 0.7})
    rows = [ops.sgd_step(is_first=True, arithmetic=arithmetic, **SGD)]
    rows += [ops.sgd_step(is_first=False, arithmetic=arithmetic, **options) for options in later]
    for state in states:
        check(kernels, f"sgd_{per_thread}", ops.sgd_, state[:2], gradients, torch.stack(rows), 1)
    rows = [ops.sgd_step(is_first=False, arithmetic=arithmetic, **options | {"momentum": 0.0}) for options in [SGD] * 5]
    for state in states:
        check(kernels, f"sgd_{per_thread}", ops.sgd_, state[:1], gradients, torch.stack(rows), 0)


def test_arithmetics_of_one_batch_may_differ(kernels):
    gradients, states = draw(71)
    arithmetics = ["torch_cpu_fused", "evermoe", "torch_cuda_foreach", "torch_cuda_fused", "torch_cpu_fused"]
    rows = [
        ops.adamw_step(
            t=1, arithmetic=arithmetic, powers=(0.9, 0.97) if arithmetic == "torch_cuda_fused" else None, **ADAMW
        )
        for arithmetic in arithmetics
    ]
    check(kernels, "adamw_4", ops.adamw_, states[0], gradients, torch.stack(rows))


def test_large(fast_kernels):
    gradients, states = draw(200_003)
    rows = torch.stack([ops.adamw_step(t=t, **ADAMW) for t in range(1, 6)])
    check(fast_kernels, "adamw_4", ops.adamw_, states[0], gradients, rows)
    rows = torch.stack([ops.sgd_step(is_first=t == 0, **SGD) for t in range(5)])
    check(fast_kernels, "sgd_4", ops.sgd_, states[0][:2], gradients, rows, 1)
