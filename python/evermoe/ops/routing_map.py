"""Routing maps, as Megatron-Core's routers give them, to the ids and weights that the other ops take."""

from __future__ import annotations

import torch
from torch import Tensor


def routing_map_to_ids(routing_map: Tensor, probabilities: Tensor, top_k: int | None = None) -> tuple[Tensor, Tensor]:
    """List the experts of each token of a routing map, in ascending order, and their weights.

    Made of torch's own ops, so that it runs on any device and `torch.compile` fuses it. Differentiable in
    `probabilities`: an expert that the map leaves out gets a gradient of zero.

    Args:
        routing_map: bool `[T, E]`: whether a token goes to an expert. Any number per token; none, too.
        probabilities: floating-point `[T, E]`: the weights. What stands where the map is False counts for nothing.
        top_k: K, the most experts that a token has: 1 to E. None finds it, for which the host waits for a GPU, and
            `torch.compile(fullgraph=True)` wants it given.

    Returns:
        `ids`, int64 `[T, K]`: experts, then -1 where a token has fewer than K.
        `weights`, `[T, K]` of the probabilities' dtype: 0 where the id is -1.

    Example: map `[[0, 1, 0, 1], [0, 0, 1, 0]]`, probabilities `[[.1, .2, .3, .4], [.5, .6, .7, .8]]`:
    ids = `[[1, 3], [2, -1]]`, weights = `[[.2, .4], [.7, 0]]`.

    A token with more than `top_k` experts raises on the CPU, naming it. On CUDA, and inside `torch.compile`, its first
    `top_k` count, and the others do not.
    """
    experts = _check(routing_map, probabilities)
    on_cpu = routing_map.device.type == "cpu" and not torch.compiler.is_compiling()
    if top_k is None or on_cpu:
        counts_T = routing_map.sum(1)
        most = int(counts_T.max()) if len(counts_T) else 0
        top_k = max(1, most) if top_k is None else top_k
        if most > top_k:
            raise RuntimeError(
                f"routing_map: expected at most top_k = {top_k} experts for each token, got {most} for token "
                f"{int(counts_T.argmax())}"
            )
    if not 1 <= top_k <= experts:
        raise RuntimeError(f"top_k: expected 1 to the number of experts, {experts}, got {top_k}")
    # Those of the map are numbered from E down to 1, the others 0: the greatest K of a token, in descending order, are
    # its experts, and no two that count are equal, so that the result does not depend on how a device breaks ties.
    numbers_E = torch.arange(experts, 0, -1, dtype=torch.int32, device=routing_map.device)
    numbers_TK = (routing_map * numbers_E).topk(top_k, dim=1).values.long()
    is_none_TK = numbers_TK == 0
    ids_TK = (experts - numbers_TK).masked_fill(is_none_TK, -1)
    return ids_TK, probabilities.gather(1, ids_TK.clamp(min=0)).masked_fill(is_none_TK, 0)


def _check(routing_map: Tensor, probabilities: Tensor) -> int:
    """E, of arguments that fit each other."""
    for name, value in (("routing_map", routing_map), ("probabilities", probabilities)):
        if not isinstance(value, Tensor):
            raise RuntimeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if routing_map.dtype != torch.bool or routing_map.dim() != 2 or routing_map.shape[1] == 0:
        raise RuntimeError(
            "routing_map: expected bool of shape [T, E] with one expert or more, got "
            f"{routing_map.dtype} of shape {list(routing_map.shape)}"
        )
    if not probabilities.is_floating_point() or probabilities.shape != routing_map.shape:
        raise RuntimeError(
            f"probabilities: expected floating-point numbers of shape {list(routing_map.shape)} as routing_map, got "
            f"{probabilities.dtype} of shape {list(probabilities.shape)}"
        )
    if probabilities.device != routing_map.device:
        raise RuntimeError(
            f"probabilities: expected a tensor on {routing_map.device} like routing_map, got one on "
            f"{probabilities.device}"
        )
    return routing_map.shape[1]
