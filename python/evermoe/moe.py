"""The MoE layer: router, dispatch to expert replicas on any rank, experts as stacked weights, weighted combine.

Shape suffixes: T tokens of this rank, H hidden width, K experts per token, E experts, e local experts, N rows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from types import FrameType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from evermoe import ops
from evermoe.comm.collectives import all_to_all
from evermoe.comm.group import Group
from evermoe.errors import UnsupportedState
from evermoe.planning import SPLITS, SplitPolicy, split_tokens

ROW_ALIGNMENT = 16
"""An expert's flat weights are padded to this many elements, so that optimizers treat all replicas alike (SIMD)."""

REENTRANT = "CheckpointFunction.backward"
"""What reentrant checkpointing repeats a forward from, in libraries that have copied torch's."""

Activation = Callable[[Tensor], Tensor]


class MoE(nn.Module):
    """A layer of E feed-forward experts, of which each token uses the K that the router likes best.

    By itself it holds all experts. In an `evermoe.Session` each rank holds some, an expert may have replicas on
    several ranks, and tokens travel to them and back: no padding, no capacity limit, no token dropped. The result does
    not depend on where the experts are, but for floating-point rounding.

    Args:
        hidden: H, width of a token.
        intermediate: inner width of an expert.
        num_experts: E.
        top_k: K, experts per token. With K > 1 the K weights are normalised to sum to one.
        gated: experts are `down(activation(gate(x)) * up(x))` instead of `down(activation(up(x)))`.
        activation: elementwise, differentiable.
        router_noise: standard deviation of Gaussian noise on the router's logits, in training only.
        token_split: policy of `evermoe.planning.split_tokens`: `balanced` gives the busiest rank as few
            tokens as can be, `even` every replica of an expert the same (Lazarus, Algorithm 1).

    Attributes:
        weights: `[e, row]`, one row per local expert: its matrices, flattened one after the other, then padding.
        experts: ids of the local experts, ascending; row i of `weights` belongs to `experts[i]`.
        balance_loss: after a forward, `E · Σ_e f_e · P_e` (Switch Transformer, Eq. 4) with f_e the share of all ranks'
            (token, k) slots routed to e and P_e this rank's mean router probability.
        tokens_E: after a forward, numpy int64 `[E]`: tokens routed to each expert on all ranks together.
        load_E: the same summed over all forwards in training mode, until it is set to zero; a session does so at
            each step.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int = 2,
        *,
        gated: bool = False,
        activation: Activation = F.silu,
        router_noise: float = 0.0,
        token_split: SplitPolicy = "balanced",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(hidden, intermediate, num_experts) < 1 or not 1 <= top_k <= num_experts:
            raise ValueError(
                f"MoE: expected positive sizes and 1 <= top_k <= num_experts, got hidden={hidden}, "
                f"intermediate={intermediate}, num_experts={num_experts}, top_k={top_k}"
            )
        if router_noise < 0:
            raise ValueError(f"MoE: expected router_noise >= 0, got {router_noise}")
        if token_split not in SPLITS:
            raise ValueError(f"MoE: expected token_split to be one of {', '.join(SPLITS)}, got {token_split!r}")
        self.token_split = token_split
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.activation, self.router_noise = activation, router_noise
        up, down = (intermediate, hidden), (hidden, intermediate)
        self.matrices: list[tuple[int, int]] = [up, up, down] if gated else [up, down]
        used = sum(rows * columns for rows, columns in self.matrices)
        self.row_padding = -used % ROW_ALIGNMENT
        self.router = nn.Linear(hidden, num_experts, bias=False, device=device, dtype=dtype)
        self.weights = nn.Parameter(torch.empty(num_experts, used + self.row_padding, device=device, dtype=dtype))
        self.experts = list(range(num_experts))
        self.group = Group()
        self.matrix_RE = np.ones((1, num_experts), np.int64)
        self.balance_loss: Tensor = torch.zeros((), device=device)
        self.tokens_E = np.zeros(num_experts, np.int64)
        self.load_E = np.zeros(num_experts, np.int64)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the experts as `nn.Linear` draws its weights: uniform within 1/sqrt(fan in)."""
        with torch.no_grad():
            start = 0
            for rows, columns in self.matrices:
                bound = 1 / math.sqrt(columns)
                self.weights[:, start : start + rows * columns].uniform_(-bound, bound)
                start += rows * columns
            self.weights[:, start:] = 0

    def extra_repr(self) -> str:
        """What `print(layer)` shows."""
        return f"num_experts={self.num_experts}, top_k={self.top_k}, matrices={self.matrices}, local={self.experts}"

    def settings(self) -> str:
        """What changes a token's way through the layer and is not seen in the shapes of its parameters."""
        activation = getattr(self.activation, "__name__", type(self.activation).__name__)
        return (
            f"top_k={self.top_k}, activation={activation}, router_noise={self.router_noise}, "
            f"token_split={self.token_split}"
        )

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [..., H]; the result has the same shape and dtype. Collective when the layer spans several ranks."""
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            raise ValueError(f"MoE: expected [..., {self.hidden}], got {list(x.shape)}")
        x_TH = x.reshape(-1, self.hidden)
        ids_TK, weights_TK, mean_probability_E = self._route(x_TH)
        tokens_ER = self._gather_load(ops.expert_histogram(ids_TK, self.num_experts))
        self.balance_loss = self._balance_loss(mean_probability_E)
        send_ER, receive_RE = split_tokens(tokens_ER, self.matrix_RE, self.group.rank, self.token_split)
        row_ids, positions_TK = ops.dispatch_plan(ids_TK, torch.from_numpy(send_ER).to(ids_TK.device))
        rows_NH = ops.permute(x_TH, row_ids, positions_TK)
        arrived_NH = all_to_all(rows_NH, send_ER.sum(0), receive_RE.sum(1), self.group)
        outputs_NH = self._run_experts(arrived_NH, receive_RE[:, self.experts])
        returned_NH = all_to_all(outputs_NH, receive_RE.sum(1), send_ER.sum(0), self.group)
        return ops.unpermute(returned_NH, positions_TK, weights_TK).to(x.dtype).reshape(x.shape)

    def _route(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = self.router(x_TH).float()
        probabilities_TE = logits_TE.softmax(-1)
        if self.training and self.router_noise > 0:
            logits_TE = logits_TE + torch.randn_like(logits_TE) * self.router_noise
            probabilities_TE = logits_TE.softmax(-1)
        weights_TK, ids_TK = probabilities_TE.topk(self.top_k, dim=-1)
        if self.top_k > 1:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return ids_TK, weights_TK, probabilities_TE.sum(0) / max(len(x_TH), 1)

    def _gather_load(self, counts_E: Tensor) -> np.ndarray:
        """int64 [E, R]: tokens of each expert on each rank, gathered on the host; the step's only extra exchange."""
        tokens_RE = self.group.all_gather(counts_E.cpu())
        self.tokens_E = tokens_RE.sum(0).numpy()
        if self.training and not _is_recomputing():
            self.load_E = self.load_E + self.tokens_E
        return np.ascontiguousarray(tokens_RE.numpy().T)

    def _balance_loss(self, mean_probability_E: Tensor) -> Tensor:
        share_E = torch.from_numpy(self.tokens_E / max(self.tokens_E.sum(), 1))
        return self.num_experts * (share_E.to(mean_probability_E) * mean_probability_E).sum()

    def _run_experts(self, rows_NH: Tensor, counts_Re: np.ndarray) -> Tensor:
        """Rows ordered by (source rank, expert) → the experts' outputs in the same order."""
        if len(self.experts) == 0:  # stays in the graph, so that this rank takes part in the backward exchange
            return rows_NH + self.weights.sum().to(rows_NH.dtype)
        counts = torch.from_numpy(counts_Re).to(rows_NH.device)
        is_mixed = min(counts.shape) > 1  # else both orders are the same
        if is_mixed:
            rows_NH = ops.regroup(rows_NH, counts)
        outputs_NH = self._feed_forward(rows_NH, counts_Re.sum(0))
        return ops.regroup(outputs_NH, counts, inverse=True) if is_mixed else outputs_NH

    def _feed_forward(self, rows_NH: Tensor, counts_e: np.ndarray) -> Tensor:
        """Rows ordered by local expert → the experts' outputs in the same order."""
        kind = rows_NH.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weights.dtype
        rows_NH = rows_NH.to(dtype)
        sizes = [rows * columns for rows, columns in self.matrices] + [self.row_padding]
        parts = self.weights.to(dtype).split(sizes, 1)
        matrices = [part.unflatten(1, shape) for part, shape in zip(parts, self.matrices, strict=False)]
        multiply = self._multiply_at_once if self._is_aligned(dtype) else self._multiply_one_by_one
        inner_NI = self.activation(multiply(rows_NH, matrices[0], counts_e))
        if len(matrices) == 3:
            inner_NI = inner_NI * multiply(rows_NH, matrices[1], counts_e)
        return multiply(inner_NI, matrices[-1], counts_e)

    def _is_aligned(self, dtype: torch.dtype) -> bool:
        """Whether `grouped_mm` takes the matrices: of these types, with rows of whole 16 bytes."""
        whole = all(columns * dtype.itemsize % 16 == 0 for _, columns in self.matrices)
        return whole and dtype in (torch.float32, torch.bfloat16, torch.float16)

    @staticmethod
    def _multiply_at_once(rows_NC: Tensor, matrices_eDC: Tensor, counts_e: np.ndarray) -> Tensor:
        """Each expert's rows times its matrix, transposed: [N, D]."""
        ends_e = torch.from_numpy(counts_e.cumsum().astype(np.int32)).to(rows_NC.device)
        return F.grouped_mm(rows_NC, matrices_eDC.transpose(1, 2), offs=ends_e)

    @staticmethod
    def _multiply_one_by_one(rows_NC: Tensor, matrices_eDC: Tensor, counts_e: np.ndarray) -> Tensor:
        """The same for any types and sizes."""
        blocks = rows_NC.split(counts_e.tolist())
        return torch.cat([F.linear(block, matrix) for block, matrix in zip(blocks, matrices_eDC, strict=True)])


def _is_recomputing() -> bool:
    """Whether this forward repeats one for its backward, as activation checkpointing does.

    Raises:
        UnsupportedState: it is the reentrant kind, whose first forward left no graph for `balance_loss`.
    """
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() < 0:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is CheckpointFunction.backward.__code__ or getattr(code, "co_qualname", "") == REENTRANT:
            raise UnsupportedState(
                "MoE: reentrant activation checkpointing around this layer leaves its balance_loss without a gradient; "
                "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        frame = frame.f_back
    return True


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """The MoE layers of a model by their module path, in module order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def load_balancing_loss(model: nn.Module) -> Tensor:
    """Mean of the MoE layers' `balance_loss` of the last forward; at perfect balance it is 1. Scalar.

    Raises:
        ValueError: the model has no MoE layer.
    """
    losses: Sequence[Tensor] = [layer.balance_loss for layer in moe_layers(model).values()]
    if not losses:
        raise ValueError("load_balancing_loss: expected a model with evermoe.MoE layers, got one without any")
    return torch.stack([loss.float() for loss in losses]).mean()
