"""The kernels of replay.cu, bit by bit against the CPU op."""

import struct

import pytest
import torch

from evermoe import ops
from kernels import Buffer

MAX_STEPS, STEP_BYTES = 8, 48  # as in kernels/replay.cu


def adamw_table(steps, gradients):
    """The kernel's last argument: the numbers of each step, its kind of gradient and the address."""
    kinds = {torch.float32: 1, torch.bfloat16: 2}
    packed = b""
    for numbers, gradient in zip(steps.tolist(), gradients, strict=True):
        kind, address = (0, 0) if gradient is None else (kinds[gradient.dtype], gradient.data_ptr())
        packed += struct.pack("<9fIQ", *numbers, kind, address)
    return packed.ljust(MAX_STEPS * STEP_BYTES, b"\0")


@pytest.mark.parametrize(
    ("size", "per_thread"), [(0, 1), (1, 4), (3, 4), (7, 1), (8, 4), (257, 4), (1031, 1), (1031, 4)]
)
def test_adamw(kernels, size, per_thread):
    check_adamw(kernels, size, per_thread)


def test_large_adamw(fast_kernels):
    check_adamw(fast_kernels, 200_003, 4)


def check_adamw(kernels, size, per_thread):
    """Floats of every kind, to compare bit for bit; NaNs are NaNs, as which of them comes out is not said."""
    random = torch.Generator().manual_seed(size)
    bits = [torch.randint(-(1 << 31), (1 << 31) - 1, (size,), generator=random).int() for _ in range(5)]
    gradients = [torch.randn(size, generator=random), None, bits[0].view(torch.float32)]
    gradients += [torch.randn(size, generator=random).bfloat16(), torch.randn(size, generator=random)]
    options = {"lr": 0.3, "betas": (0.9, 0.97), "eps": 1e-9, "weight_decay": 0.2}
    steps = [ops.adamw_step(t=t, **options) for t in range(1, 5)]
    steps.append(ops.adamw_step(t=5, loss_scale=3.0, clip=0.7, maximize=True, **options | {"betas": (0.3, 0.5)}))
    start = [torch.randn(size, generator=random), torch.randn(size, generator=random), torch.zeros(size)]
    for state in (start, [values.view(torch.float32) for values in bits[1:4]]):
        ours = [Buffer([size], torch.float32).set(values) for values in state]
        expected = [values.clone() for values in state]
        used = [gradient for gradient in gradients if gradient is not None]
        table = adamw_table(torch.stack(steps), gradients)
        addresses = [buffer.tensor for buffer in ours]
        kernels(f"adamw_{per_thread}", 2, 32, 0, *addresses, size, len(steps), table, also=used)
        ops.adamw_(*expected, gradients, torch.stack(steps))
        for buffer, values in zip(ours, expected, strict=True):
            buffer.equals_but_for_nans(values)
