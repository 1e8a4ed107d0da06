"""The optimizers' kernels, run on the CPU from their own source: the same bits as the CPU ops."""

import itertools
import struct
from dataclasses import dataclass

import pytest
import torch

from evermoe.ops.optim import adamw_, adamw_step, sgd_, sgd_step
from support.kernels import Buffer

SIZES = [(0, 1), (1, 4), (3, 4), (7, 1), (8, 4), (15, 4), (257, 4), (1031, 1), (1031, 4)]
MAX_STEPS, MAX_TENSORS = 8, 64  # as in kernels/abi.h, like the structs
STEP, TENSOR, GRADIENT = struct.Struct("<9fI"), struct.Struct("<5QI4B"), struct.Struct("<Q")
KIND = struct.Struct("<B")
KINDS = {torch.float32: 1, torch.bfloat16: 2}
IN_PACKS, TO_FLOAT16 = 1, 2
ADAMW = {"lr": 0.3, "betas": (0.9, 0.97), "eps": 1e-9, "weight_decay": 0.2}
OTHER_END = ADAMW | {"betas": (0.3, 0.5), "maximize": True, "loss_scale": 3.0, "clip": 0.7}
ARITHMETICS = ["evermoe", "torch_cpu_fused", "torch_cuda_foreach"]
SGD = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.2}


@dataclass
class Stepped:
    """A tensor of a launch: its state and the gradients of its steps; elements that a thread takes at once, 1 or 4.

    `rounded` is the type of the weights whose master it is.
    """

    state: list
    gradients: list
    per_thread: int = 4
    first_step: int = 0
    blocks: int = 2
    rounded: torch.dtype | None = None

    def __post_init__(self):
        self.skipped = self.per_thread % 4  # elements before it: not aligned to packs
        self.buffers = [Buffer([len(v) + self.skipped], torch.float32).set(self.moved(v)) for v in self.state]
        self.weights = self.rounded and Buffer([len(self.state[0]) + self.skipped], self.rounded)
        moved = [None if g is None else self.moved(g) for g in self.gradients]
        self.gradients = [None if g is None else g[self.skipped :] for g in moved]

    def moved(self, values):
        return torch.nn.functional.pad(values, (self.skipped, 0))


def table(steps, tensors):
    """The kernels' argument, and the blocks of a launch."""
    rows, entries, gradients, kinds, end_block = [], [], [], [], 0
    for arithmetic, *numbers in steps.tolist():
        rows.append(STEP.pack(*numbers, *[0.0] * (9 - len(numbers)), int(arithmetic)))
    for each in tensors:
        addresses = [buffer.tensor.data_ptr() + 4 * each.skipped for buffer in each.buffers]
        addresses += [0] * (3 - len(addresses))
        end_block += each.blocks
        addresses.append(each.weights.tensor.data_ptr() + 2 * each.skipped if each.weights else 0)
        flags = IN_PACKS * (each.per_thread == 4) + TO_FLOAT16 * (each.rounded == torch.float16)
        places = each.first_step, len(each.gradients), len(gradients), flags
        entries.append(TENSOR.pack(*addresses, len(each.state[0]), end_block, *places))
        for gradient in each.gradients:
            gradients.append(GRADIENT.pack(0 if gradient is None else gradient.data_ptr()))
            kinds.append(KIND.pack(0 if gradient is None else KINDS[gradient.dtype]))
    entries += [TENSOR.pack(*[0] * 5, 0xFFFFFFFF, *[0] * 4)] * (MAX_TENSORS - len(entries))
    parts = [(rows, STEP, MAX_STEPS), (entries, TENSOR, MAX_TENSORS), (gradients, GRADIENT, MAX_TENSORS)]
    parts.append((kinds, KIND, MAX_TENSORS))
    return b"".join(b"".join(packed).ljust(kind.size * count, b"\0") for packed, kind, count in parts), end_block


def draw(size):
    """Gradients of each kind, and two states: ordinary floats, and any bits (NaNs and infinities too)."""
    random = torch.Generator().manual_seed(size)
    bits = [torch.randint(-(1 << 31), (1 << 31) - 1, (size,), generator=random).int() for _ in range(4)]
    gradients = [torch.randn(size, generator=random), None, bits[0].view(torch.float32)]
    gradients += [torch.randn(size, generator=random).bfloat16(), torch.randn(size, generator=random)]
    ordinary = [torch.randn(size, generator=random) for _ in range(2)] + [torch.zeros(size)]
    return gradients, (ordinary, [values.view(torch.float32) for values in bits[1:]])


def check(kernels, name, op, steps, *tensors):
    """Floats of every kind are compared bit for bit; NaNs are NaNs, as which of them comes out is not said."""
    packed, blocks = table(steps, tensors)
    used = [buffer.tensor for each in tensors for buffer in each.buffers]
    used += [each.weights.tensor for each in tensors if each.weights]
    used += [gradient for each in tensors for gradient in each.gradients if gradient is not None]
    kernels(name, blocks, 32, 0, packed, also=used)
    for each in tensors:
        expected = [values.clone() for values in each.state]
        no_buffer = [None] if name == "sgd" and len(expected) == 1 else []
        its_steps = steps[each.first_step : each.first_step + len(each.gradients)]
        op(*expected, *no_buffer, each.gradients, its_steps)
        for buffer, values in zip(each.buffers, expected, strict=True):
            buffer.equals_but_for_nans(each.moved(values))
        if each.weights:
            each.weights.tensor[: each.skipped] = 0
            each.weights.equals_but_for_nans(each.moved(expected[0].to(each.rounded)))


@pytest.mark.parametrize(("size", "per_thread"), SIZES)
@pytest.mark.parametrize("arithmetic", ["evermoe", "torch_cpu_fused", "torch_cuda_fused", "torch_cuda_foreach"])
@pytest.mark.few(41)
def test_adamw(kernels, arithmetic, size, per_thread):
    gradients, states = draw(size)
    rows = []
    for t, options in enumerate([ADAMW, ADAMW, ADAMW | {"weight_decay": 0.0}, ADAMW | {"lr": 0.0}, OTHER_END], start=1):
        powers = tuple(beta**t for beta in options["betas"]) if arithmetic == "torch_cuda_fused" else None
        rows.append(adamw_step(t=t, arithmetic=arithmetic, powers=powers, **options))
    for state in states:
        for rounded in (None, torch.bfloat16, torch.float16):
            check(kernels, "adamw", adamw_, torch.stack(rows), Stepped(state, gradients, per_thread, rounded=rounded))


@pytest.mark.parametrize(("size", "per_thread"), SIZES)
@pytest.mark.parametrize("arithmetic", ["evermoe", "torch_cpu_fused"])
@pytest.mark.few(23)
def test_sgd(kernels, arithmetic, size, per_thread):
    gradients, states = draw(size)
    later = [SGD | {"nesterov": True}, SGD | {"dampening": 0.4}, SGD | {"weight_decay": 0.0, "momentum": 0.0}]
    later.append(SGD | {"maximize": True, "loss_scale": 3.0, "clip": 0.7})
    rows = [sgd_step(is_first=True, arithmetic=arithmetic, **SGD)]
    rows += [sgd_step(is_first=False, arithmetic=arithmetic, **options) for options in later]
    for state in states:
        check(
            kernels, "sgd", sgd_, torch.stack(rows), Stepped(state[:2], gradients, per_thread, rounded=torch.bfloat16)
        )
    rows = [sgd_step(is_first=False, arithmetic=arithmetic, **options | {"momentum": 0.0}) for options in [SGD] * 5]
    for state in states:
        check(kernels, "sgd", sgd_, torch.stack(rows), Stepped(state[:1], gradients, per_thread))


def test_arithmetics_of_one_batch_may_differ(kernels):
    gradients, states = draw(71)
    arithmetics = ["torch_cpu_fused", "evermoe", "torch_cuda_foreach", "torch_cuda_fused", "torch_cpu_fused"]
    rows = [
        adamw_step(
            t=1, arithmetic=arithmetic, powers=(0.9, 0.97) if arithmetic == "torch_cuda_fused" else None, **ADAMW
        )
        for arithmetic in arithmetics
    ]
    check(kernels, "adamw", adamw_, torch.stack(rows), Stepped(states[0], gradients))


def many(steps, arrays):
    """As many tensors as fit: of many sizes, also none, with one step or two, some not aligned, with uneven blocks."""
    sizes, tensors, room = itertools.cycle([1, 7, 0, 8, 33, 257, 15, 12]), [], MAX_TENSORS
    while room > 0:
        number, size = len(tensors), next(sizes)
        gradients, states = draw(size)
        its_steps = min(1 + number % 11 // 10, room)
        gradients = [gradients[(number + step) % 5] for step in range(its_steps)]
        place = {"per_thread": 1 if number % 3 == 2 else 4, "first_step": number % (len(steps) - 1)}
        place["rounded"] = (None, torch.bfloat16, torch.float16)[number % 3]
        tensors.append(Stepped(states[number % 2][:arrays], gradients, blocks=-(-size // 100), **place))
        room -= its_steps
    return tensors


def test_adamw_of_many_tensors(kernels):
    steps = [adamw_step(t=t, arithmetic=ARITHMETICS[t % 3], **ADAMW) for t in range(1, MAX_STEPS + 1)]
    check(kernels, "adamw", adamw_, torch.stack(steps), *many(steps, 3))


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd_of_many_tensors(kernels, momentum):
    options = SGD | {"momentum": momentum}
    steps = [sgd_step(is_first=t == 1, arithmetic=ARITHMETICS[t % 2], **options) for t in range(MAX_STEPS)]
    check(kernels, "sgd", sgd_, torch.stack(steps), *many(steps, 2 if momentum else 1))


def test_tensors_with_and_without_a_buffer(kernels):
    gradients, states = draw(40)
    steps = torch.stack([sgd_step(is_first=False, **SGD), sgd_step(is_first=False, lr=0.3)])
    tensors = [Stepped(states[0][:2], gradients[:1]), Stepped(states[1][:1], gradients[4:], first_step=1)]
    check(kernels, "sgd", sgd_, steps, *tensors)


@pytest.mark.long
def test_large(fast_kernels):
    gradients, states = draw(200_003)
    rows = torch.stack([adamw_step(t=t, **ADAMW) for t in range(1, 6)])
    small = [
        Stepped([values[:9] for values in states[1]], [gradients[3][:9]], first_step=t, blocks=1) for t in range(5)
    ]
    check(fast_kernels, "adamw", adamw_, rows, *small, Stepped(states[0], gradients, blocks=5))
    rows = torch.stack([sgd_step(is_first=t == 0, **SGD) for t in range(5)])
    check(fast_kernels, "sgd", sgd_, rows, Stepped(states[0][:2], gradients))
