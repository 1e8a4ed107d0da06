"""Token dispatch: which token goes to which row, and the copies in both directions; see `evermoe.ops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from evermoe.ops._load import check_rows, refuse_grad, torch_ops


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
    if not isinstance(ids, Tensor):
        raise RuntimeError(f"ids: expected a tensor, got {type(ids).__name__}")
    return torch_ops.expert_histogram.default(ids, num_experts)


def dispatch_plan(ids: Tensor, send_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Give every slot its row in the send buffer: a stable sort by (destination rank, expert, slot).

    The first `send_counts[e, 0]` slots of expert e go to rank 0, the next `send_counts[e, 1]` to rank 1, and
    so on. With one rank and `send_counts = expert_histogram(ids, E)[:, None]` the rows are grouped by expert.

    Args:
        ids: int32 or int64 `[T, K]`: experts in `0..E`, or -1 for unrouted.
        send_counts: int64 `[E, R]`; each row adds up to the number of slots of its expert. On CUDA E + R < 12288.

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
    return torch_ops.dispatch_plan.default(ids, send_counts)


def invert_positions(positions: Tensor, num_rows: int) -> Tensor:
    """Give every row its slot: the `row_ids` to positions that were moved or cut off.

    Args:
        positions: int32 or int64 `[T, K]`: the row of each slot, -1 for none; no row twice.
        num_rows: N, rows of the buffer.

    Returns:
        `[N]`, dtype of `positions`: the slot of each row, -1 for a row without one.

    Example: positions `[[0, 3], [1, -1]]`, 5 rows: `[0, 2, -1, 1, -1]`.
    """
    return torch_ops.invert_positions.default(positions, num_rows)


def permute(x: Tensor, row_ids: Tensor, positions: Tensor) -> Tensor:
    """Copy tokens into the rows of the plan: `out[i] = x[row_ids[i] // K]`, zeros where `row_ids[i]` is -1.

    Differentiable in `x`: the gradient of a token is the sum of its rows' gradients, added in float32.

    Args:
        x: float32, bfloat16 or float16 `[T, H]`.
        row_ids: int32 or int64 `[N]`, from `dispatch_plan`; a prefix of it will do, to leave the unrouted tail out.
        positions: int32 or int64 `[T, K]`, from the same plan: gives K and the gradient, and on CUDA the rows of
            each token, which is read once for all of them.

    Returns:
        `[N, H]`, dtype of `x`.

    Example: x `[a, b]`, K = 2, row_ids `[2, 0, 3, -1]`: `[b, a, b, 0]`.
    """
    check_rows(x=x, positions=positions)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Permute.apply(x, row_ids, positions)
    return torch_ops.permute.default(x, row_ids, positions)


def permute_out(x: Tensor, row_ids: Tensor, positions: Tensor, out: Tensor) -> Tensor:
    """Like `permute`, into `out` (contiguous `[N, H]`, dtype of `x`, memory of its own), and returns it.

    Not differentiable: raises when a gradient would be needed.
    """
    refuse_grad("permute_out", "use permute, or torch.no_grad()", x, out)
    check_rows(x=x, positions=positions)
    torch_ops.permute_out.default(x, row_ids, positions, out)
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
    check_rows(rows=rows)
    if torch.is_grad_enabled() and (rows.requires_grad or (isinstance(weights, Tensor) and weights.requires_grad)):
        if weights is None:
            return _Sum.apply(rows, positions)
        return _Combine.apply(rows, positions, weights)
    return torch_ops.unpermute.default(rows, positions, weights)


def unpermute_out(rows: Tensor, positions: Tensor, weights: Tensor | None, out: Tensor) -> Tensor:
    """Like `unpermute`, into `out` (contiguous `[T, H]`, dtype of `rows`, memory of its own), and returns it.

    Not differentiable: raises when a gradient would be needed.
    """
    refuse_grad("unpermute_out", "use unpermute, or torch.no_grad()", rows, out, weights)
    torch_ops.unpermute_out.default(rows, positions, weights, out)
    return out


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
    if not isinstance(ids, Sequence):
        raise RuntimeError(f"ids: expected a sequence of tensors, one for each layer, got {type(ids).__name__}")
    if len(ids) == 0:
        raise RuntimeError("ids: expected the ids of one layer or more, got none")
    return torch_ops.expert_histograms.default(ids, num_experts)


def split_tokens(counts: Tensor, replicas: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Split the tokens of every expert over its replicas, without waiting for a GPU.

    The same integers as `evermoe.planning.split_tokens` with `policy="even"` (Lazarus, Algorithm 1): a rank keeps what
    it has room for, and the rest goes to the others in proportion to the room they have left.

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
    on the CPU, naming the expert. On CUDA no rank sends or receives tokens of such an expert.
    """
    return torch_ops.split_tokens.default(counts, replicas, rank)


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
    check_rows(rows=rows)
    if torch.is_grad_enabled() and rows.requires_grad:
        return _Regroup.apply(rows, counts, inverse)
    return torch_ops.regroup.default(rows, counts, inverse)


def regroup_out(rows: Tensor, counts: Tensor, inverse: bool, out: Tensor) -> Tensor:
    """Like `regroup`, into `out` (contiguous `[N, H]`, dtype of `rows`, memory of its own), and returns it.

    Not differentiable: raises when a gradient would be needed.
    """
    refuse_grad("regroup_out", "use regroup, or torch.no_grad()", rows, out)
    torch_ops.regroup_out.default(rows, counts, inverse, out)
    return out


# ---- gradients --------------------------------------------------------------------------------
# Functions rather than torch.library.register_autograd, which would cost every call several microseconds,
# also where no gradient is needed.

_Context: TypeAlias = Any


class _Permute(torch.autograd.Function):
    """The gradient of a copy is a sum."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, row_ids: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return torch_ops.permute.default(x, row_ids, positions)

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
        return torch_ops.unpermute.default(rows, positions, None)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        (positions,) = ctx.saved_tensors
        row_ids = invert_positions(positions, ctx.num_rows)
        return permute(grad, row_ids, positions), None


class _Combine(torch.autograd.Function):
    """The gradient of a weighted sum is a scaled copy, and a dot product per slot."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, positions, weights)
        return torch_ops.unpermute.default(rows, positions, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        rows, positions, weights = ctx.saved_tensors
        grad_rows, grad_weights = torch_ops.unpermute_backward.default(grad, rows, positions, weights)
        return grad_rows, None, grad_weights


class _Regroup(torch.autograd.Function):
    """The gradient of a copy to other places is the copy back."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, counts: Tensor, inverse: bool) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.inverse = inverse
        return torch_ops.regroup.default(rows, counts, inverse)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:
        (counts,) = ctx.saved_tensors
        return regroup(grad, counts, not ctx.inverse), None, None
