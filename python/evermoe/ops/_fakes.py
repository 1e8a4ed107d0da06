"""Fake kernels of the ops: shapes and dtypes for `torch.compile` and `torch.export`. `evermoe.ops` imports it."""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.library.register_fake("evermoe::expert_histogram")
def _(ids: Tensor, num_experts: int) -> Tensor:
    return ids.new_empty((num_experts,), dtype=torch.int64)


@torch.library.register_fake("evermoe::expert_histograms")
def _(ids: Sequence[Tensor], num_experts: int) -> Tensor:
    return ids[0].new_empty((len(ids), num_experts), dtype=torch.int64)


@torch.library.register_fake("evermoe::dispatch_plan")
def _(ids: Tensor, send_counts: Tensor) -> tuple[Tensor, Tensor]:
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # slow to import; tracing has done so

    tokens, top_k = ids.shape
    # Where the number of slots is not known even while running, int32 is taken for granted.
    dtype = torch.int32 if guard_or_true(tokens * top_k < 2**31) else torch.int64
    return ids.new_empty((tokens * top_k,), dtype=dtype), ids.new_empty((tokens, top_k), dtype=dtype)


@torch.library.register_fake("evermoe::invert_positions")
def _(positions: Tensor, num_rows: int) -> Tensor:
    return positions.new_empty((num_rows,))


@torch.library.register_fake("evermoe::permute")
def _(x: Tensor, row_ids: Tensor, positions: Tensor) -> Tensor:
    return x.new_empty((row_ids.shape[0], x.shape[1]))


@torch.library.register_fake("evermoe::unpermute")
def _(rows: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty((positions.shape[0], rows.shape[1]))


@torch.library.register_fake("evermoe::unpermute_backward")
def _(grad: Tensor, rows: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


@torch.library.register_fake("evermoe::permute_out")
def _(x: Tensor, row_ids: Tensor, positions: Tensor, out: Tensor) -> None:
    pass


@torch.library.register_fake("evermoe::unpermute_out")
def _(rows: Tensor, positions: Tensor, weights: Tensor | None, out: Tensor) -> None:
    pass


@torch.library.register_fake("evermoe::split_tokens")
def _(counts: Tensor, replicas: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    return counts.new_empty(counts.shape), replicas.new_empty(replicas.shape)


@torch.library.register_fake("evermoe::quantize_rows")
def _(rows: Tensor) -> Tensor:
    width = rows.shape[1]
    return rows.new_empty((rows.shape[0], _up_to_16(width) + _up_to_16(4 * ((width + 127) // 128))), dtype=torch.uint8)


def _up_to_16(size: int) -> int:
    return (size + 15) // 16 * 16


@torch.library.register_fake("evermoe::dequantize_rows")
def _(rows: Tensor, like: Tensor) -> Tensor:
    return like.new_empty((rows.shape[0], like.shape[1]))


@torch.library.register_fake("evermoe::regroup")
def _(rows: Tensor, counts: Tensor, inverse: bool) -> Tensor:
    return rows.new_empty(rows.shape)


@torch.library.register_fake("evermoe::regroup_out")
def _(rows: Tensor, counts: Tensor, inverse: bool, out: Tensor) -> None:
    pass


@torch.library.register_fake("evermoe::unpermute_backward_out")
def _(grad: Tensor, rows: Tensor, positions: Tensor, weights: Tensor, grad_rows: Tensor, grad_weights: Tensor) -> None:
    pass


@torch.library.register_fake("evermoe::adamw_")
def _(
    p: Tensor, m: Tensor, v: Tensor, gradients: Sequence[Tensor | None], steps: Tensor, rounded: Tensor | None
) -> None:
    pass


@torch.library.register_fake("evermoe::sgd_")
def _(
    p: Tensor, buffer: Tensor | None, gradients: Sequence[Tensor | None], steps: Tensor, rounded: Tensor | None
) -> None:
    pass


@torch.library.register_fake("evermoe::adamw_all_")
def _(
    p: Sequence[Tensor],
    m: Sequence[Tensor],
    v: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    steps: Tensor,
    rounded: Sequence[Tensor],
    _: Sequence[int],
) -> None:
    pass


@torch.library.register_fake("evermoe::sgd_all_")
def _(
    p: Sequence[Tensor],
    buffers: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    steps: Tensor,
    rounded: Sequence[Tensor],
    _: Sequence[int],
) -> None:
    pass


@torch.library.register_fake("evermoe::pack_chunks")
def _(tensors: Sequence[Tensor], first_chunk: int, chunks: Tensor, hashes: Tensor) -> None:
    pass


@torch.library.register_fake("evermoe::unpack_chunks")
def _(chunks: Tensor, hashes: Tensor, first_chunk: int, tensors: Sequence[Tensor], wrong: Tensor) -> None:
    pass


@torch.library.register_fake("evermoe::hash_blocks")
def _(chunks: Tensor, hashes: Tensor) -> None:
    pass
