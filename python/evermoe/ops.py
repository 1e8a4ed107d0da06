"""Token dispatch for Mixture-of-Experts layers: which token goes where, and the copies there and back. And optimizers.

One layer in six lines (`x_TH` tokens, `ids_TK` and `weights_TK` from the router, one rank):

    counts_E = expert_histogram(ids_TK, num_experts)
    row_ids_N, positions_TK = dispatch_plan(ids_TK, counts_E[:, None])
    rows_NH = permute(x_TH, row_ids_N, positions_TK)       # grouped by expert
    rows_NH = experts(rows_NH, counts_E)
    y_TH = unpermute(rows_NH, positions_TK, weights_TK)    # weighted sum per token

Letters: T tokens, K choices of a token, E experts, R ranks, N rows, H columns. A *slot* is one choice,
numbered `t * K + k`. -1 means: no expert (in ids), no slot (in row ids), no row (in positions). Row ids and positions
are int32, 8 bytes a slot together; from 2**31 slots on int64. All functions take either.

All functions take CPU and CUDA tensors, are differentiable where it makes sense, work inside
`torch.compile(fullgraph=True)` with dynamic shapes, and give the same bits whatever the number of threads.
Wrong arguments raise `RuntimeError` with what was expected and what came. On CUDA nothing waits for the GPU,
so *values* are not checked there: an id or row out of range counts as -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

_MIN_TORCH = (2, 10)


def _check_torch() -> None:
    """Raise ImportError unless a torch that the ops can be registered with is installed."""
    install = "pip install 'torch>=2.10'"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"evermoe needs PyTorch 2.10 or newer: {install}") from error
    found = str(torch.__version__)
    try:
        major, minor = (int(part) for part in found.split(".")[:2])
    except ValueError:
        return  # a version of someone's own making: registration finds out
    if (major, minor) < _MIN_TORCH:
        raise ImportError(f"evermoe needs PyTorch 2.10 or newer, found {found}: {install}")


_check_torch()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from evermoe import _native  # noqa: E402

_native.register_ops()
_ops = torch.ops.evermoe

from evermoe import _fakes  # noqa: E402, F401

__all__ = [
    "adamw_",
    "adamw_step",
    "cpu_cache_bytes",
    "dispatch_plan",
    "expert_histogram",
    "expert_histograms",
    "has_cuda_kernels",
    "permute",
    "permute_out",
    "regroup",
    "regroup_out",
    "set_cpu_cache_limit",
    "sgd_",
    "sgd_step",
    "split_tokens",
    "unpermute",
    "unpermute_out",
]


def has_cuda_kernels() -> bool:
    """Whether this build of evermoe holds compiled CUDA kernels."""
    return _native.has_cuda_kernels()


def set_cpu_cache_limit(num_bytes: int | None) -> None:
    """Bound the memory that the ops keep for their next results on the CPU, and free what is beyond it.

    Fresh memory costs two to three copies of its bytes in page faults, so a large result (from 1 MiB) takes the memory
    of an earlier one that is gone, as on a GPU. Such a result cannot grow (`resize_`, `out=` of another shape) nor have
    its storage resized: clone it first, or set 0. Needs torch 2.11; before, the system's allocator serves alone.

    Args:
        num_bytes: 0 keeps none, and the system's allocator serves alone; None, as at the start, keeps as many as are in
            use at the peak from now on.

    Raises:
        OverflowError: a negative number.
    """
    _native.set_cpu_cache_limit(num_bytes)


def cpu_cache_bytes() -> int:
    """Bytes that the ops keep for their next results on the CPU, beside those in use."""
    return _native.cpu_cache_bytes()


# ---- functions --------------------------------------------------------------------------------


def expert_histogram(ids: Tensor, num_experts: int) -> Tensor:
    """Count the tokens of each expert.

    Args:
        ids: int32 or int64, any shape: experts in `0..num_experts`, or -1 for unrouted (not counted).
        num_experts: 1 to 2**20; on CUDA at most 12288.

    Returns:
        int64 `[E]` on the device of `ids`.

    Example: ids `[[0, 2], [2, -1]]`, 3 experts: `[1, 0, 2]`.

    An id out of range raises on the CPU, naming it, and counts as -1 on CUDA.
    """
    return _ops.expert_histogram.default(ids, num_experts)


def dispatch_plan(ids: Tensor, send_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Give every slot its row in the send buffer: a stable sort by (destination rank, expert, slot).

    The first `send_counts[e, 0]` slots of expert e go to rank 0, the next `send_counts[e, 1]` to rank 1, and
    so on. With one rank and `send_counts = expert_histogram(ids, E)[:, None]` the rows are grouped by expert.

    Args:
        ids: int32 or int64 `[T, K]`: experts in `0..E`, or -1 for unrouted.
        send_counts: int64 `[E, R]`; each row adds up to the number of slots of its expert.

    Returns:
        `row_ids`, `[T * K]`: the slot of each row; as many -1 at the end as there are unrouted slots.
        `positions`, `[T, K]`: the row of each slot, -1 for an unrouted one.
        Both int32; int64 where T * K is 2**31 or more.

    Example: ids `[[1, 0], [1, -1], [1, -1]]`, send_counts `[[0, 1], [2, 1]]`. Expert 1 has the slots 0, 2, 4:
    two go to rank 0, one to rank 1; expert 0 has slot 1, for rank 1. So row_ids = `[0, 2, 1, 4, -1, -1]` and
    positions = `[[0, 2], [1, -1], [3, -1]]`.

    Counts that do not add up, and ids out of range, raise on the CPU. On CUDA, slots beyond the counts become
    unrouted, and rows that no slot fills hold -1.
    """
    return _ops.dispatch_plan.default(ids, send_counts)


def permute(x: Tensor, row_ids: Tensor, positions: Tensor) -> Tensor:
    """Copy tokens into the rows of the plan: `out[i] = x[row_ids[i] // K]`, zeros where `row_ids[i]` is -1.

    Differentiable in `x`: the gradient of a token is the sum of its rows' gradients, added in float32.

    Args:
        x: float32, bfloat16 or float16 `[T, H]`.
        row_ids: int32 or int64 `[N]`, from `dispatch_plan`; a prefix of it will do, to leave the unrouted tail out.
        positions: int32 or int64 `[T, K]`, from the same plan; gives K, and the gradient.

    Returns:
        `[N, H]`, dtype of `x`.

    Example: x `[a, b]`, K = 2, row_ids `[2, 0, 3, -1]`: `[b, a, b, 0]`.
    """
    top_k = _top_k(x, positions)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Permute.apply(x, row_ids, positions)
    return _ops.permute.default(x, row_ids, top_k)


def permute_out(x: Tensor, row_ids: Tensor, positions: Tensor, out: Tensor) -> Tensor:
    """Like `permute`, into `out` (contiguous `[N, H]`, dtype of `x`, memory of its own), and returns it.

    Not differentiable: raises when a gradient would be needed.
    """
    _refuse_grad("permute_out", "use permute, or torch.no_grad()", x, out)
    _ops.permute_out.default(x, row_ids, _top_k(x, positions), out)
    return out


def unpermute(rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    """Combine rows into tokens: `out[t] = sum over k of weights[t, k] * rows[positions[t, k]]`.

    The sum is in float32 in the order of k, and rounded once to the dtype of `rows`. Unrouted slots (-1), and
    positions at or past N (of rows that a prefix cut off), add nothing. Differentiable in `rows` and
    `weights`; then no two slots may name one row.

    Args:
        rows: float32, bfloat16 or float16 `[N, H]`, in the order of the plan.
        positions: int32 or int64 `[T, K]`, from `dispatch_plan`.
        weights: float32, or the dtype of `rows`, `[T, K]`; None for 1.

    Returns:
        `[T, H]`, dtype of `rows`.

    Example: rows `[[1], [10]]`, positions `[[1, 0], [-1, -1]]`, weights `[[0.5, 2], [1, 1]]`: `[[7], [0]]`.
    """
    if torch.is_grad_enabled() and (rows.requires_grad or (weights is not None and weights.requires_grad)):
        if weights is None:
            return _Sum.apply(rows, positions)
        return _Combine.apply(rows, positions, weights)
    return _ops.unpermute.default(rows, positions, weights)


def unpermute_out(rows: Tensor, positions: Tensor, weights: Tensor | None, out: Tensor) -> Tensor:
    """Like `unpermute`, into `out` (contiguous `[T, H]`, dtype of `rows`, memory of its own), and returns it.

    Not differentiable: raises when a gradient would be needed.
    """
    _refuse_grad("unpermute_out", "use unpermute, or torch.no_grad()", rows, out, weights)
    _ops.unpermute_out.default(rows, positions, weights, out)
    return out


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
    profile: str = "evermoe",
    powers: tuple[float, float] | None = None,
) -> Tensor:
    """Compute the numbers of one step of AdamW, in double, rounded once: what `adamw_` needs beside the gradient.

    A replica that repeats the step gets them from the trainer: computed anew, they may differ in the last bit. The
    profile travels in them, so that a step is repeated with the arithmetic that took it or not at all.

    Args:
        t: which step of the parameter it is, from 1.
        lr: learning rate, 0 or more.
        betas: decay of the first and the second moment, each 0 to below 1.
        eps: added to the denominator, 0 or more.
        weight_decay: decoupled weight decay, 0 or more.
        maximize: ascend rather than descend.
        loss_scale: what the loss was multiplied by; the gradient is divided by it.
        clip: what the gradient is multiplied by then, 0 or more; only then it is negated to maximize.
        profile: whose arithmetic to follow bit for bit: "evermoe", or that of `torch.optim.AdamW`: "torch_cpu_fused"
            (x86), "torch_cuda_fused" or "torch_cuda_foreach" (the default on CUDA). `evermoe.replay.calibrate` finds
            the profile of an optimizer.
        powers: `betas[0]**t` and `betas[1]**t` in float32, for "torch_cuda_fused" alone: as the trainer's GPU
            computes them, see `evermoe.replay.powers`.

    Returns:
        float32 `[10]` on the CPU: profile (0 to 3 in the order above), loss_scale, clip (negative to maximize),
        1 - lr * weight_decay, 1 - beta1, 1 - beta2, beta2, lr / (1 - beta1**t), sqrt(1 - beta2**t), eps. With
        "torch_cuda_fused" the fourth is -(lr * weight_decay) and the fifth beta1.

    Raises:
        ValueError: a number is out of its range, or the profile is not known.

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
        profile=profile,
        powers=powers,
    )
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def adamw_(p: Tensor, m: Tensor, v: Tensor, gradients: Sequence[Tensor | None], steps: Tensor) -> None:
    """Apply steps of AdamW to `p`, `m` and `v` in place, in one pass over the memory.

    The bits are the same on every CPU and GPU, whether the steps come in one call or in several. Those of the profile
    "evermoe" equal those of `torch.optim.AdamW(fused=True)` on an x86 CPU where `p.numel()` is a multiple of 8; see
    `src/cpu/adamw.rs` for the recipes. (Which NaN comes out is the processor's choice.)

    Args:
        p: parameters, float32, contiguous. Under "torch_cpu_fused" a whole parameter of
            the trainer's, as torch steps its last `numel % 8` elements in another way.
        m: first moment, like `p`.
        v: second moment, like `p`.
        gradients: one for each step, float32 or bfloat16 of the shape of `p`; None is a gradient of zeros, which
            needs no memory. A step that was skipped for an infinite gradient is no step: leave it out.
        steps: float32 `[len(gradients), 10]` on the CPU: rows from `adamw_step`.

    Raises:
        RuntimeError: an argument is not as above; nothing is changed then.

    Example: p `[4]`, m and v `[0]`, gradient `[2]`, t = 1, lr = 0.5, betas (0.5, 0.75), eps = 0, weight_decay =
    0.5: m becomes 1, v becomes 1, p becomes 4 * 0.75 - 1 * 1 / (1 / 0.5) = 2.5.

    Not differentiable.
    """
    _refuse_grad("adamw_", "call it under torch.no_grad()", p, m, v)
    _ops.adamw_.default(p, m, v, gradients, steps)


def expert_histograms(ids: Sequence[Tensor], num_experts: int) -> Tensor:
    """Count the tokens of each expert of several layers; on CUDA in one launch for each 64 layers.

    Args:
        ids: for each layer int32 or int64 of any shape, as for `expert_histogram`; all on one device.
        num_experts: 1 to 2**20; on CUDA at most 12288.

    Returns:
        int64 `[L, E]` on the device of the ids.

    Example: ids `[[0, 2], [2, -1]]` and `[1]`, 3 experts: `[[1, 0, 2], [0, 1, 0]]`.

    An id out of range raises on the CPU, naming it and the layer, and counts as -1 on CUDA.
    """
    if len(ids) == 0:
        raise RuntimeError("ids: expected the ids of one layer or more, got none")
    return _ops.expert_histograms.default(ids, num_experts)


def split_tokens(counts: Tensor, replicas: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Split the tokens of every expert over its replicas, without waiting for a GPU.

    The same integers as `evermoe.planning.split_tokens` with `policy="even"` (Lazarus, Algorithm 1): what a rank has
    room for stays there, the rest goes to the others in proportion to the room they have left.

    Args:
        counts: int64 `[E, R]`: tokens of each expert on each rank.
        replicas: int64 `[R, E]`: replicas of each expert on each rank.
        rank: whose part to return, 0 to R - 1. On CUDA R is at most 755.

    Returns:
        `send`, int64 `[E, R]`: tokens of each expert that go to each rank.
        `receive`, int64 `[R, E]`: tokens of each expert that come from each rank.

    Example: one expert with a replica on each of three ranks, counts `[[5, 0, 1]]`: there is room for 2 on each, so
    rank 0 keeps 2 and sends 2 and 1: send = `[[2, 2, 1]]`, receive = `[[2], [0], [0]]`.

    Negative numbers, an expert that has tokens and no replica, and more than 2**61 tokens times replicas of one raise
    on the CPU, naming the expert. On CUDA nobody sends or receives tokens of such an expert.
    """
    return _ops.split_tokens.default(counts, replicas, rank)


def regroup(rows: Tensor, counts: Tensor, inverse: bool = False) -> Tensor:
    """Bring rows from the order of (source rank, expert) into that of (expert, source rank), or back.

    After an exchange the rows of each source are ordered by expert; experts want all of theirs together. Differentiable
    in `rows`: the gradient goes the other way.

    Args:
        rows: `[N, H]` of any dtype; a row has an even number of bytes.
        counts: int64 `[R, e]`: rows of each source for each local expert; they add up to N.
        inverse: from (expert, source) to (source, expert).

    Returns:
        `[N, H]`, dtype of `rows`.

    Example: counts `[[1, 2], [3, 0]]`, rows `a | b c || d e f |`: `a d e f | b c`; the inverse gives them back.

    Counts that do not add up, and negative ones, raise on the CPU. On CUDA rows past the counts are zeros, and a
    negative count is zero.
    """
    if torch.is_grad_enabled() and rows.requires_grad:
        return _Regroup.apply(rows, counts, inverse)
    return _ops.regroup.default(rows, counts, inverse)


def regroup_out(rows: Tensor, counts: Tensor, inverse: bool, out: Tensor) -> Tensor:
    """Like `regroup`, into `out` (contiguous `[N, H]`, dtype of `rows`, memory of its own), and returns it.

    Not differentiable: raises when a gradient would be needed.
    """
    _refuse_grad("regroup_out", "use regroup, or torch.no_grad()", rows, out)
    _ops.regroup_out.default(rows, counts, inverse, out)
    return out


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
    profile: str = "evermoe",
) -> Tensor:
    """Compute the numbers of one step of SGD, rounded once: what `sgd_` needs beside the gradient.

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
        profile: whose arithmetic to follow bit for bit: "evermoe", or "torch_cpu_fused", that of
            `torch.optim.SGD(fused=True)` on an x86 CPU, which differs in the last `numel % 8` elements.

    Returns:
        float32 `[9]` on the CPU: profile (0 or 1), loss_scale, clip (negative to maximize), weight_decay, momentum,
        1 - dampening, lr, is_first (0 or 1), nesterov (0 or 1).

    Raises:
        ValueError: a number is out of its range, or the profile is not known.

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
        profile=profile,
    )
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def sgd_(p: Tensor, buffer: Tensor | None, gradients: Sequence[Tensor | None], steps: Tensor) -> None:
    """Apply steps of SGD to `p` and its momentum buffer in place, in one pass over the memory.

    The bits are the same on every CPU and GPU, whether the steps come in one call or in several. Those of the profile
    "evermoe" equal those of `torch.optim.SGD` on an x86 CPU: of its `fused` variant where `p.numel()` is a multiple
    of 8, of the others always; see `src/cpu/sgd.rs` for the recipe. (Which NaN comes out is the processor's choice.)

    Args:
        p: parameters, float32, contiguous, with one dimension or more. Under "torch_cpu_fused" a whole parameter of
            the trainer's.
        buffer: the momentum's, like `p`; whatever it holds before the first step. None where no step has momentum.
        gradients: one for each step, float32 or bfloat16 of the shape of `p`; None is a gradient of zeros, which
            needs no memory. A step that was skipped for an infinite gradient is no step: leave it out.
        steps: float32 `[len(gradients), 9]` on the CPU: rows from `sgd_step`.

    Raises:
        RuntimeError: an argument is not as above; nothing is changed then.

    Example: p `[4]`, buffer `[6]`, gradient `[2]` and the step of `sgd_step`'s example: the gradient becomes
    2 + 0.25 * 4 = 3, buffer becomes 3 + 0.5 * 6 = 6, p becomes 4 - 0.5 * 6 = 1.

    Not differentiable.
    """
    _refuse_grad("sgd_", "call it under torch.no_grad()", p, buffer)
    _ops.sgd_.default(p, buffer, gradients, steps)


def _top_k(x: Tensor, positions: Tensor) -> int:
    if positions.dim() != 2 or positions.shape[0] != x.shape[0]:
        raise RuntimeError(
            f"positions: expected shape [T, K] with T = {x.shape[0]} as in x, got {list(positions.shape)}"
        )
    return max(positions.shape[1], 1)


def _refuse_grad(name: str, instead: str, *tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise RuntimeError(f"{name} writes into its arguments and has no gradient: {instead}")


# ---- gradients --------------------------------------------------------------------------------
# Functions rather than torch.library.register_autograd, which would cost every call several microseconds,
# also where no gradient is needed.

_Context: TypeAlias = Any


class _Permute(torch.autograd.Function):
    """The gradient of a copy is a sum."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, row_ids: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return _ops.permute.default(x, row_ids, max(positions.shape[1], 1))

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        return unpermute(grad, positions), None, None


class _Sum(torch.autograd.Function):
    """The gradient of a sum is a copy."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.num_rows = rows.shape[0]
        return _ops.unpermute.default(rows, positions, None)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        (positions,) = ctx.saved_tensors
        row_ids = _ops.invert_positions.default(positions, ctx.num_rows)
        return permute(grad, row_ids, positions), None


class _Combine(torch.autograd.Function):
    """The gradient of a weighted sum is a scaled copy, and a dot product per slot."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, positions, weights)
        return _ops.unpermute.default(rows, positions, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        rows, positions, weights = ctx.saved_tensors
        grad_rows, grad_weights = _ops.unpermute_backward.default(grad, rows, positions, weights)
        return grad_rows, None, grad_weights


class _Regroup(torch.autograd.Function):
    """The gradient of a copy to other places is the copy back."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, counts: Tensor, inverse: bool) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.inverse = inverse
        return _ops.regroup.default(rows, counts, inverse)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:
        (counts,) = ctx.saved_tensors
        return regroup(grad, counts, not ctx.inverse), None, None
