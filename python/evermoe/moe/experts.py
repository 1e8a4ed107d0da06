"""Experts of an MoE layer, for any router: dispatch to replicas on any rank, stacked weights, weighted combine.

Shape suffixes: T tokens of this rank, H hidden width, K experts per token, E experts, e local experts, N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evermoe import ops
from evermoe.comm.collectives import all_reduce
from evermoe.comm.group import Group
from evermoe.moe import checkpointing, fp8_exchange, graph_ops
from evermoe.moe.choice import Layer, end_choice
from evermoe.moe.exchange_planner import ExchangePlanner
from evermoe.moe.expert import Expert, Product, norm_rows
from evermoe.moe.expert_copies import PartialExperts
from evermoe.moe.forward_turns import Manner, Turns
from evermoe.moe.module_paths import named_parts, norm_over_rows
from evermoe.moe.recorded_rows import feed_forward
from evermoe.moe.shared_cast import share_cast
from evermoe.moe.token_counts import TokenCount
from evermoe.moe.token_exchange import (
    Exchange,
    permute_weighted,
)
from evermoe.planning.dispatch import SPLITS, SplitPolicy


class Experts(PartialExperts, Layer):
    """E feed-forward experts, of which your router chooses K for each token.

    Outside a session the layer holds all experts. In an `evermoe.Session` each rank holds some, and an expert may have
    replicas on several ranks. Tokens are sent to them and back: without a capacity limit, and without dropping any. The
    result does not depend on the placement of the experts, except for floating-point rounding. `evermoe.MoE` combines
    this layer with a router.

        experts = evermoe.Experts(evermoe.Expert(64, 128, gated=True), num_experts=8)
        weights_TK, ids_TK = router(x_TH).softmax(-1).topk(2)
        y_TH = experts(x_TH, ids_TK, weights_TK)

    Args:
        expert: definition of each expert.
        num_experts: E.
        post_norm: a module applied to the experts' outputs, `[N, H]`, before they are weighted; all experts share it.
            It must treat each row independently, as RMSNorm and LayerNorm do; it never sees padding, nor do its
            gradients.
        token_split: policy of `evermoe.planning.split_tokens`: `balanced` minimises the tokens of the busiest rank,
            `even` gives all replicas of an expert the same number (Lazarus, Algorithm 1). None: the policy of the
            session's preset, `even` with `lazarus`, otherwise `balanced`.
        max_tokens: maximum number of tokens of any rank in one forward, the same on all ranks. With it, exchanges are
            padded to the largest possible number of rows: the host waits for nothing, and no shape depends on a value,
            so a forward can be part of a CUDA graph (after one outside a graph). Replicas of an expert then share its
            tokens evenly. It suits small batches and fast links. Sizes are exact nonetheless if the padded rows take
            more than 64 MiB (`token_exchange.PADDED_BYTES`), or the matrices do not suit `grouped_mm` (on a GPU:
            bfloat16 with rows of a multiple of 16 bytes). None: exact sizes, for which the host waits once per forward;
            a single rank does not wait.
        fp8_dispatch: whether tokens are sent to the experts as e4m3 numbers with a float32 scale for each 128 columns
            (`ops.quantize_rows`; DeepSeek-V3, section 3.3.2): about half the bytes of bfloat16. All experts get rounded
            tokens, local ones too; outputs and gradients are sent in their own dtype. Inside `torch.compile` tokens are
            rounded the same way, but sent in their own dtype.

    Attributes:
        weights: `[e, row]`, one row per local expert: its matrices and biases, flattened one after the other, then
            padding; `expert.views(weights)` returns them by name.
        ids: of the local experts, ascending; row i of `weights` belongs to `ids[i]`.
        share_E: after a forward, float `[E]`: fraction of all ranks' choices that went to each expert, on the layer's
            device.
        count: tokens routed to each expert, summed over all ranks.
        top_k: K of the router, or of the latest forward outside `torch.compile`; 0 before.
        has_samples: False if this member's part of the step has weight 0. Its tokens then go to no expert, and do not
            count in loads and balancing losses. A session sets it.
        on_load: called after each step of a session with `load_E`; `Router.update_balance`, for example. None: nothing
            is called. The same on all members.

    Raises:
        ValueError: a size or an option is out of range; the message names it.
    """

    def __init__(
        self,
        expert: Expert,
        num_experts: int,
        *,
        post_norm: nn.Module | None = None,
        token_split: SplitPolicy | None = None,
        max_tokens: int | None = None,
        fp8_dispatch: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(expert, Expert) or num_experts < 1:
            raise ValueError(
                f"Experts: expected an evermoe.Expert and num_experts >= 1, got {expert!r} and {num_experts}"
            )
        if fp8_dispatch and expert.weighted == "inputs":
            raise ValueError("Experts: expected fp8_dispatch=False, or an expert with weighted='outputs'")
        if (mixing := norm_over_rows(post_norm)) is not None:
            raise ValueError(
                f"Experts: expected post_norm to treat each row by itself, got {mixing}, whose statistics are of all "
                "rows that are on one rank: use RMSNorm or LayerNorm"
            )
        if token_split not in (None, *SPLITS):
            raise ValueError(f"Experts: expected token_split to be one of {', '.join(SPLITS)}, got {token_split!r}")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"Experts: expected max_tokens >= 1 or None, got {max_tokens}")
        self.expert, self.num_experts, self.fp8_dispatch, self.post_norm = expert, num_experts, fp8_dispatch, post_norm
        self._planner = ExchangePlanner(num_experts, token_split, max_tokens)
        self.weights = nn.Parameter(torch.empty(num_experts, expert.row_size, device=device, dtype=dtype))
        self.ids = list(range(num_experts))
        self.group = Group()
        self.turns: Turns | None = None
        self.share_E: Tensor = torch.zeros(num_experts, device=device)
        self.count = TokenCount(num_experts)
        self.top_k = 0
        self.has_samples = True
        self.on_load: Callable[[NDArray[np.int64]], None] | None = None
        self._name = graph_ops.register(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the experts with `Expert.initialize`."""
        self.expert.initialize(self.weights)

    def split_as(self, default: SplitPolicy) -> None:
        """Set the token split to the constructor's `token_split`, or to `default` if that was None."""
        self._planner.split_as(default)

    @property
    def hidden(self) -> int:
        """H."""
        return self.expert.hidden

    @property
    def max_tokens(self) -> int | None:
        """The constructor's `max_tokens`."""
        return self._planner.max_tokens

    @property
    def token_split(self) -> SplitPolicy:
        """Policy by which the replicas of an expert share its tokens."""
        return self._planner.split

    @token_split.setter
    def token_split(self, split: SplitPolicy) -> None:
        self._planner.split = split

    @property
    def matrix_RE(self) -> NDArray[np.int64]:
        """`[R, E]`: replicas of each expert on each rank."""
        return self._planner.matrix_RE

    @matrix_RE.setter
    def matrix_RE(self, matrix_RE: NDArray[np.int64]) -> None:
        self._planner.matrix_RE = matrix_RE

    def extra_repr(self) -> str:
        """Return the text that `print(layer)` shows."""
        return f"num_experts={self.num_experts}, {self.expert.shapes}, local={self.ids}"

    @property
    def tokens_E(self) -> NDArray[np.int64]:
        """`[E]`: tokens routed to each expert in the last forward, summed over all ranks."""
        return self.count.last_E

    @property
    def load_E(self) -> NDArray[np.int64]:
        """`[E]`: the same, summed over all forwards in training mode; in a session, over those of the current step."""
        return TokenCount.totals([self.count])[0]

    def settings(self) -> str:
        """Return the settings that change the experts' result and do not show in the shapes of their parameters."""
        return (
            f"{self.expert.settings()}, token_split={self.token_split}"
            + (f", max_tokens={self.max_tokens}" if self.max_tokens else "")
            + (", fp8_dispatch" if self.fp8_dispatch else "")
        )

    def forward(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, before_wait: Callable[[], None] | None = None
    ) -> Tensor:
        """Return the weighted sum of each token's expert outputs; collective when the layer spans several ranks.

        Args:
            x_TH: tokens `[T, H]`.
            ids_TK: int32 or int64 `[T, K]`: experts of 0..E, or -1 for none.
            weights_TK: `[T, K]`, float32 or the experts' dtype; differentiable.
            before_wait: called once, before the host waits for the plan of the exchange, to launch other work on the
                GPU meanwhile. Not in `torch.compile`.

        Returns:
            `[T, H]`, dtype of `x_TH`.

        Raises:
            ValueError: shapes do not fit, or the number of tokens exceeds `max_tokens`.
        """
        _check_shapes(x_TH, ids_TK, weights_TK, self.hidden)
        ids_TK, weights_TK = end_choice(self, ids_TK, weights_TK)
        if not self.has_samples:
            ids_TK = torch.full_like(ids_TK, -1)
        return self.run(x_TH, ids_TK, weights_TK, before_wait, in_graph=torch.compiler.is_compiling())

    def run(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, launch: Callable[[], None] | None, *, in_graph: bool
    ) -> Tensor:
        """Run `forward` with the messages of a compiled (`in_graph`) or of an eager forward."""
        counts_E = ops.expert_histogram(ids_TK, self.num_experts)
        sent_TH = x_TH.to(_compute_dtype(self.weights, x_TH.device.type))
        if in_graph:
            return self._forward_in_graph(sent_TH, ids_TK, weights_TK, counts_E).to(x_TH.dtype)
        _check_tokens(len(ids_TK), self.max_tokens)
        if self.turns is not None:
            self.turns.take(self, Manner.of(sent_TH, ids_TK, in_graph=False))
        plan = self._planner.begin(self, (len(ids_TK), ids_TK.shape[1]), counts_E, sent_TH.dtype)
        if launch is not None:
            launch()
        exchange = plan()
        self.share_E = exchange.share_E
        if self.top_k != ids_TK.shape[1]:
            self.top_k = ids_TK.shape[1]
        row_ids, positions_TK = ops.dispatch_plan(ids_TK, exchange.send_ER)
        if exchange.starts_R is not None:
            row_ids, positions_TK = exchange.pad(positions_TK)
        if self.fp8_dispatch:
            rows_NH = fp8_exchange.send(sent_TH, row_ids, positions_TK, exchange, self.group)
        else:
            rows_NH, weights_TK = permute_weighted(sent_TH, row_ids, positions_TK, weights_TK, self.expert.weighted)
            # The host waits in `move`, while the GPU has work.
            rows_NH = exchange.by_expert(exchange.move(rows_NH, self.group))
        if len(self.ids) == 0:
            outputs_NH = take_part(rows_NH, self._matrices(rows_NH.dtype))
        else:
            product = graph_ops.exchange_product(exchange, rows_NH.dtype, self._widths)
            outputs_NH = feed_forward(self, rows_NH, product, exchange.ends_e)
        returned_NH = exchange.move(exchange.by_source(outputs_NH), self.group, is_return=True)
        return ops.unpermute(returned_NH, positions_TK, weights_TK).to(x_TH.dtype)

    def _forward_in_graph(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, counts_E: Tensor) -> Tensor:
        """Run the rest of `forward` in a form that `torch.compile` can trace: the exchanges are opaque ops."""
        num_local, manner = self.weights.shape[0], list(Manner.of(x_TH, ids_TK, in_graph=True))
        plan = graph_ops.plan_exchange(self._name, counts_E, num_local, manner, torch.is_grad_enabled())
        share_E, send_ER, receive_Re, splits_2R = plan
        checkpointing.keep(self, "share_E", share_E)
        row_ids, positions_TK = ops.dispatch_plan(ids_TK, send_ER)
        if self.fp8_dispatch:
            x_TH = fp8_exchange.rounded(x_TH)
        rows_NH, weights_TK = permute_weighted(x_TH, row_ids, positions_TK, weights_TK, self.expert.weighted)
        ends_e = receive_Re.sum(0).cumsum(0).to(torch.int32)
        product: Product = lambda rows_NC, matrices_eDC: graph_ops.multiply(rows_NC, matrices_eDC, ends_e)  # noqa: E731
        if self.group.is_alone:
            rows_NH = self._feed_forward(rows_NH, product, ends_e)
        else:
            rows_NH = graph_ops.send_rows(self._name, rows_NH, splits_2R)
            if num_local == 0:
                rows_NH = take_part(rows_NH, self._matrices(rows_NH.dtype))
            else:
                rows_NH = self._feed_forward(ops.regroup(rows_NH, receive_Re), product, ends_e)
                rows_NH = ops.regroup(rows_NH, receive_Re, inverse=True)
            rows_NH = graph_ops.exchange_rows(self._name, rows_NH, splits_2R, row_ids.shape[0], True)
        return ops.unpermute(rows_NH, positions_TK, weights_TK)

    def plan_exchange(self, counts_E: Tensor) -> Exchange:
        """Gather and count the load, and plan an exchange with exact sizes; collective."""
        return self._planner.begin_exact(self, counts_E)()

    def _feed_forward(self, rows_NH: Tensor, product: Product, ends_e: Tensor) -> Tensor:
        """Return the experts' outputs for rows ordered by local expert, in the same order."""
        outputs_NH = self.expert.apply(rows_NH, self._matrices(rows_NH.dtype), product, ends_e)
        return outputs_NH if self.post_norm is None else norm_rows(self.post_norm, outputs_NH, ends_e)

    def _matrices(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return what the local experts compute with, by name: `[e, *shape]` each."""
        return self.expert.views(share_cast(self.weights, dtype))

    @property
    def _widths(self) -> tuple[int, int]:
        return self.expert.hidden, self.expert.intermediate


def _check_shapes(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, hidden: int) -> None:
    tokens = len(x_TH)
    if x_TH.dim() != 2 or x_TH.shape[1] != hidden or ids_TK.dim() != 2 or len(ids_TK) != tokens:
        raise ValueError(
            f"Experts: expected tokens [T, {hidden}] and ids [T, K], got {list(x_TH.shape)} and {list(ids_TK.shape)}"
        )
    if weights_TK.shape != ids_TK.shape:
        raise ValueError(
            f"Experts: expected weights of the ids' shape {list(ids_TK.shape)}, got {list(weights_TK.shape)}"
        )


def _check_tokens(tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and tokens > max_tokens:
        raise ValueError(f"Experts: expected at most max_tokens={max_tokens} tokens in a forward, got {tokens}")


def _compute_dtype(weights: Tensor, kind: str) -> torch.dtype:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weights.dtype


def take_part(rows_NH: Tensor, matrices: Mapping[str, Tensor]) -> Tensor:
    """Connect empty rows to the graph, so that a rank without experts takes part in the backward exchange."""
    return rows_NH + sum(each.sum() for each in matrices.values())


def sum_over_members(experts: Experts, values: Tensor) -> Tensor:
    """Sum `values` over the members that share a layer's experts. Collective and differentiable.

    The backward is collective, too: it sums the gradient over the members. So the gradient is that of the sum of all
    members' losses, whatever their weights.
    """
    if torch.compiler.is_compiling():
        return graph_ops.sum_over_members(experts._name, values)
    return all_reduce(values, experts.group)


def experts_by_stack() -> dict[int, Expert]:
    """Return the definition of the experts in each layer of this process, by the id of the layer's weights."""
    return {id(layer.weights): layer.expert for layer in graph_ops.live_layers() if isinstance(layer, Experts)}


def expert_layers(model: nn.Module) -> dict[str, Experts]:
    """Return the experts of a model's MoE layers by module path, without wrappers, in module order."""
    return {name: module for name, module in named_parts(model) if isinstance(module, Experts)}
