"""Experts modules of transformers that its experts interface does not know, although their matrices are those of it.

Shape suffixes: T tokens, H hidden width, K experts per token, E experts.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers.integrations import moe as hub_moe

LLAMA4, STEP3 = ("Llama4TextMoe", "Llama4TextExperts"), "Step3p7Experts"


def declare(parent: nn.Module, experts: nn.Module) -> None:
    """Give a module of such a kind what the interface says of its own modules; leave others as they are."""
    found: Any = experts
    kind = type(experts).__name__
    is_llama4 = (type(parent).__name__, kind) == LLAMA4
    if not is_llama4 and kind != STEP3:
        return
    found.has_gate, found.has_bias, found.is_concatenated, found.is_transposed = True, False, True, is_llama4
    if is_llama4:
        found._apply_gate = MethodType(hub_moe._default_apply_gate, experts)
        parent.forward = MethodType(_llama4_forward, parent)


def _llama4_forward(layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Run Llama 4's MoE layer: an expert gets the token times the sigmoid of its score, and outputs are added.

    transformers' own forward gives all tokens to all experts, those that were not chosen times zero.

    Args:
        layer: a `Llama4TextMoe` whose experts are elastic.
        hidden_states: `[..., H]`.

    Returns:
        Outputs `[T, H]`, and the router's logits `[T, E]`.
    """
    x_TH = hidden_states.reshape(-1, layer.hidden_dim)
    scores_TE, logits_TE = layer.router(x_TH)
    ids_TK = logits_TE.topk(layer.top_k, dim=1).indices
    scores_TK = scores_TE.gather(1, ids_TK)
    rows_NH = (x_TH.unsqueeze(1) * scores_TK.unsqueeze(2)).flatten(0, 1)
    routed_NH = layer.experts(rows_NH, ids_TK.reshape(-1, 1), rows_NH.new_ones(len(rows_NH), 1))
    return layer.shared_expert(x_TH) + routed_NH.unflatten(0, (-1, layer.top_k)).sum(1), logits_TE
