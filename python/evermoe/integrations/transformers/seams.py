"""evermoe's ops behind the two seams that transformers has for experts; no session is needed.

Shape suffixes: T tokens, H hidden width, K experts per token, E experts, e experts of this rank, R ranks, N rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from evermoe import ops
from evermoe.integrations.transformers.elastic import describe, hub_name
from evermoe.moe import graph_ops

NAME = "evermoe"


def register() -> None:
    """Register both with transformers."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    EPImplementationInterface.register(NAME, Dispatch)


def experts_forward(module: nn.Module, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Run the forward of an experts module, for `model.set_experts_implementation("evermoe")`.

    Args:
        module: of transformers' experts interface.
        x_TH: tokens `[T, H]`.
        ids_TK: int64 `[T, K]`; ids of E and more belong to no expert of this rank.
        weights_TK: `[T, K]`.

    Returns:
        `[T, H]`, dtype of `x_TH`.
    """
    experts: Any = module
    expert = module.__dict__.get("_evermoe")
    if expert is None:  # described once
        expert = module.__dict__["_evermoe"] = describe(module)
    if experts._is_expert_parallel:
        ids_TK = ids_TK.masked_fill(ids_TK >= experts.num_experts, -1)
    counts_E = ops.expert_histogram(ids_TK, experts.num_experts)
    row_ids, positions_TK = ops.dispatch_plan(ids_TK, counts_E.unsqueeze(1))
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    views = {name: getattr(experts, hub_name(name)) for name in expert.shapes}
    rows_NH = ops.permute(x_TH.to(experts.down_proj.dtype), row_ids, positions_TK)
    rows_NH = expert.apply(rows_NH, views, graph_ops.product_of(ends_E), ends_E)
    if getattr(experts, "has_post_expert_norm", False):
        rows_NH = experts.post_expert_norm(rows_NH)
    return ops.unpermute(rows_NH, positions_TK, weights_TK).to(x_TH.dtype)


class Dispatch(EPImplementation):
    """Sends tokens to the experts' ranks and back, for `DistributedConfig(ep_implementation="evermoe")`.

    Every rank holds the same number of experts, as transformers divides them.
    """

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted outputs `[T, H]` of the experts of this rank's tokens; collective.

        Args:
            hidden_states: `[T, H]`.
            top_k_index: int64 `[T, K]`, of all ranks' experts.
            top_k_weights: `[T, K]`.
        """
        local: Any = self.num_local_experts
        group, ranks = self.ep_mesh.get_group(), self.ep_mesh.size()
        counts_E = ops.expert_histogram(top_k_index, ranks * local)
        send_Re = counts_E.view(ranks, local)
        send_ER = torch.block_diag(*send_Re.unbind()).t().contiguous()
        receive_Re = torch.empty_like(send_Re)
        dist.all_to_all_single(receive_Re, send_Re.contiguous(), group=group)
        sent, received = torch.stack([send_Re.sum(1), receive_Re.sum(1)]).tolist()
        row_ids, positions_TK = ops.dispatch_plan(top_k_index, send_ER)
        rows_NH = ops.permute(hidden_states, row_ids, positions_TK)
        rows_NH = ops.regroup(_exchange(rows_NH, received, sent, group), receive_Re)
        ids_N1 = torch.repeat_interleave(torch.arange(local, device=rows_NH.device), receive_Re.sum(0)).unsqueeze(1)
        if len(rows_NH):
            rows_NH = self.experts_forward(rows_NH, ids_N1, rows_NH.new_ones(ids_N1.shape))
        else:  # part of the graph nonetheless: all ranks take part in the backward exchange
            one_1H = rows_NH.sum(0, keepdim=True)
            rows_NH = self.experts_forward(one_1H, ids_N1.new_zeros(1, 1), one_1H.new_ones(1, 1))[:0]
        rows_NH = _exchange(ops.regroup(rows_NH, receive_Re, inverse=True), sent, received, group)
        return ops.unpermute(rows_NH, positions_TK, top_k_weights).to(hidden_states.dtype)


def _exchange(rows_NH: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    rows_NH = all_to_all_single_autograd(rows_NH.contiguous(), received, sent, group)
    return torch.ops._c10d_functional.wait_tensor(rows_NH)
