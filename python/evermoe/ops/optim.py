"""Steps of AdamW and SGD with one arithmetic on all devices: several of one parameter, or one of many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evermoe import _native
from evermoe.ops._load import refuse_grad, torch_ops


def adamw_step(
    *,
    t: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    loss_scale: float = 1.0,
    clip: float = 1.0,
    arithmetic: str = "evermoe",
    powers: tuple[float, float] | None = None,
) -> Tensor:
    """Compute the numbers of one step of AdamW that `adamw_` needs besides the gradient, in double, rounded once.

    A replica that repeats the step gets them from the trainer: if it computed them, the last bit might differ. The
    arithmetic travels in them, so that a step is repeated with the arithmetic that took it or not at all.

    Args:
        t: which step of the parameter it is, from 1.
        lr: learning rate, 0 or more.
        betas: decay of the first and the second moment, each 0 to below 1.
        eps: added to the denominator, 0 or more.
        weight_decay: decoupled weight decay, 0 or more.
        maximize: ascend rather than descend.
        loss_scale: what the loss was multiplied by; the gradient is divided by it.
        clip: what the gradient is multiplied by then, 0 or more; only then it is negated to maximize.
        arithmetic: whose operations to repeat bit for bit: "evermoe", or that of `torch.optim.AdamW`: "torch_cpu_fused"
            (x86), "torch_cuda_fused" or "torch_cuda_foreach" (the default on CUDA).
            `evermoe.copies.replay.calibrate` finds the arithmetic of an optimizer.
        powers: `betas[0]**t` and `betas[1]**t` in float32, for "torch_cuda_fused" alone: as the trainer's GPU
            computes them, see `evermoe.copies.replay.calibrate.powers`.

    Returns:
        float32 `[10]` on the CPU: arithmetic (0 to 3 in the order above), loss_scale, clip (negative to maximize),
        1 - lr * weight_decay, 1 - beta1, 1 - beta2, beta2, lr / (1 - beta1**t), sqrt(1 - beta2**t), eps. With
        "torch_cuda_fused" the fourth is -(lr * weight_decay) and the fifth beta1.

    Raises:
        ValueError: a number is out of its range, or the arithmetic is not known.

    Example: t = 1, lr = 0.5, betas (0.5, 0.75), eps = 0.25, weight_decay = 0.5: `[0, 1, 1, 0.75, 0.5, 0.25, 0.75, 1,
    0.5, 0.25]`.
    """
    numbers = _native.adamw_step(
        t=t,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
        loss_scale=loss_scale,
        clip=clip,
        arithmetic=arithmetic,
        powers=powers,
    )
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def adamw_(
    p: Tensor,
    m: Tensor,
    v: Tensor,
    gradients: Sequence[Tensor | None],
    steps: Tensor,
    rounded: Tensor | None = None,
) -> None:
    """Apply steps of AdamW to `p`, `m` and `v` in place, in one pass over the memory.

    The bits are the same on every CPU and GPU, whether the steps come in one call or in several. With the arithmetic
    "evermoe" they equal those of `torch.optim.AdamW(fused=True)` on an x86 CPU where `p.numel()` is a multiple of 8;
    see `src/cpu/adamw.rs` for the recipes. (Which NaN comes out is the processor's choice.)

    Args:
        p: parameters, float32, contiguous. Under "torch_cpu_fused" a complete parameter of
            the trainer's, as torch steps its last `numel % 8` elements in another way.
        m: first moment, like `p`.
        v: second moment, like `p`.
        gradients: one for each step, float32 or bfloat16 of the shape of `p`; None is a gradient of zeros, which
            needs no memory. A step that was skipped for an infinite gradient is no step: leave it out.
        steps: float32 `[len(gradients), 10]` on the CPU: rows from `adamw_step`.
        rounded: bfloat16 or float16 weights of the shape of `p`, contiguous, whose float32 master is `p`. The same pass
            writes `p` to them, rounded to nearest, ties to even.

    Raises:
        RuntimeError: an argument is not as above; nothing is changed then.

    Example: p `[4]`, m and v `[0]`, gradient `[2]`, t = 1, lr = 0.5, betas (0.5, 0.75), eps = 0, weight_decay =
    0.5: m becomes 1, v becomes 1, p becomes 4 * 0.75 - 1 * 1 / (1 / 0.5) = 2.5.

    Not differentiable.
    """
    refuse_grad("adamw_", "call it under torch.no_grad()", p, m, v, rounded)
    torch_ops.adamw_.default(p, m, v, gradients, steps, rounded)
    _count_writes(p, m, v, rounded)


def adamw_all_(
    p: Sequence[Tensor],
    m: Sequence[Tensor],
    v: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    steps: Tensor,
    rounded: Sequence[Tensor | None] = (),
) -> None:
    """Apply one step of AdamW to each parameter in place: the bits of `adamw_` for each, in one call.

    On CUDA one launch takes 64 parameters of a device, of any sizes, if they have at most 8 different rows in `steps`.

    Args:
        p: parameters, each as for `adamw_`, on any devices; those that share memory are stepped in their order.
        m: first moments, one for each parameter.
        v: second moments, one for each parameter.
        gradients: one for each parameter; None is a gradient of zeros.
        steps: float32 `[len(p), 10]` on the CPU: rows from `adamw_step`.
        rounded: one for each parameter, as for `adamw_`, or none at all.

    Raises:
        RuntimeError: an argument is not as above; the message says of which parameter; nothing is changed then.

    Example: one parameter is the example of `adamw_`.

    Not differentiable.
    """
    refuse_grad("adamw_all_", "call it under torch.no_grad()", *p, *m, *v, *rounded)
    torch_ops.adamw_all_.default(p, m, v, gradients, steps, *_numbered(p, rounded))
    _count_writes(*p, *m, *v, *rounded)


def sgd_step(
    *,
    is_first: bool,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    loss_scale: float = 1.0,
    clip: float = 1.0,
    arithmetic: str = "evermoe",
) -> Tensor:
    """Compute the numbers of one step of SGD that `sgd_` needs in addition to the gradient, rounded once.

    Args:
        is_first: whether it is the parameter's first step, whose momentum buffer is the gradient.
        lr: learning rate, 0 or more.
        momentum: how much of the buffer is kept, 0 or more; 0 for no buffer.
        dampening: how much of the gradient does not go into the buffer.
        weight_decay: times the parameters, added to the gradient, 0 or more.
        nesterov: look ahead by one more step of momentum; needs momentum, and no dampening.
        maximize: ascend rather than descend.
        loss_scale: what the loss was multiplied by; the gradient is divided by it.
        clip: what the gradient is multiplied by then, 0 or more; only then it is negated to maximize.
        arithmetic: whose operations to repeat bit for bit: "evermoe", or "torch_cpu_fused", that of
            `torch.optim.SGD(fused=True)` on an x86 CPU, which differs in the last `numel % 8` elements.

    Returns:
        float32 `[9]` on the CPU: arithmetic (0 or 1), loss_scale, clip (negative to maximize), weight_decay, momentum,
        1 - dampening, lr, is_first (0 or 1), nesterov (0 or 1).

    Raises:
        ValueError: a number is out of its range, or the arithmetic is not known.

    Example: is_first = False, lr = 0.5, momentum = 0.5, weight_decay = 0.25: `[0, 1, 1, 0.25, 0.5, 1, 0.5, 0, 0]`.
    """
    numbers = _native.sgd_step(
        is_first=is_first,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        loss_scale=loss_scale,
        clip=clip,
        arithmetic=arithmetic,
    )
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def sgd_(
    p: Tensor,
    buffer: Tensor | None,
    gradients: Sequence[Tensor | None],
    steps: Tensor,
    rounded: Tensor | None = None,
) -> None:
    """Apply steps of SGD to `p` and its momentum buffer in place, in one pass over the memory.

    The bits are the same on every CPU and GPU, whether the steps come in one call or in several. With the arithmetic
    "evermoe" they equal those of `torch.optim.SGD` on an x86 CPU: of its `fused` variant where `p.numel()` is a
    multiple of 8, of the others always; see `src/cpu/sgd.rs` for the recipe. (Which NaN comes out
    is the processor's choice.)

    Args:
        p: parameters, float32, contiguous, with one dimension or more. Under "torch_cpu_fused" a complete parameter of
            the trainer's.
        buffer: the momentum's, like `p`; whatever it holds before the first step. None where no step has momentum.
        gradients: one for each step, float32 or bfloat16 of the shape of `p`; None is a gradient of zeros, which
            needs no memory. A step that was skipped for an infinite gradient is no step: leave it out.
        steps: float32 `[len(gradients), 9]` on the CPU: rows from `sgd_step`.
        rounded: weights whose float32 master is `p`, as for `adamw_`.

    Raises:
        RuntimeError: an argument is not as above; nothing is changed then.

    Example: p `[4]`, buffer `[6]`, gradient `[2]` and the step of `sgd_step`'s example: the gradient becomes
    2 + 0.25 * 4 = 3, buffer becomes 3 + 0.5 * 6 = 6, p becomes 4 - 0.5 * 6 = 1.

    Not differentiable.
    """
    refuse_grad("sgd_", "call it under torch.no_grad()", p, buffer, rounded)
    torch_ops.sgd_.default(p, buffer, gradients, steps, rounded)
    _count_writes(p, buffer, rounded)


def sgd_all_(
    p: Sequence[Tensor],
    buffers: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    steps: Tensor,
    rounded: Sequence[Tensor | None] = (),
) -> None:
    """Apply one step of SGD to each parameter in place: the bits of `sgd_` for each, in one call.

    Args:
        p: parameters, each as for `sgd_`, as in `adamw_all_`.
        buffers: the momentum's, one for each parameter whose step has momentum, in their order.
        gradients: one for each parameter; None is a gradient of zeros.
        steps: float32 `[len(p), 9]` on the CPU: rows from `sgd_step`.
        rounded: one for each parameter, as for `adamw_`, or none at all.

    Raises:
        RuntimeError: an argument is not as above; the message says of which parameter; nothing is changed then.

    Example: one parameter is the example of `sgd_`.

    Not differentiable.
    """
    refuse_grad("sgd_all_", "call it under torch.no_grad()", *p, *buffers, *rounded)
    torch_ops.sgd_all_.default(p, buffers, gradients, steps, *_numbered(p, rounded))
    _count_writes(*p, *buffers, *rounded)


def _count_writes(*tensors: Tensor | None) -> None:
    """Increment the versions of tensors, by which autograd notices writes; a compiled graph does so itself.

    The ops could do it in C only by another op on each tensor, which takes as long as a step of a small parameter.
    """
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([tensor for tensor in tensors if tensor is not None])


def _numbered(p: Sequence[Tensor], rounded: Sequence[Tensor | None]) -> tuple[list[Tensor], list[int]]:
    """Return the weights and the index of each: torch functionalizes no list of which some are missing."""
    if rounded and len(rounded) != len(p):
        raise RuntimeError(f"rounded: expected one for each of the {len(p)} parameters, got {len(rounded)}")
    present = [(weights, number) for number, weights in enumerate(rounded) if weights is not None]
    return [weights for weights, _ in present], [number for _, number in present]
