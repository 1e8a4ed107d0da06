"""The balancing loss of transformers' models over the tokens of all members.

The loss of Switch Transformer, `E · Σ_e f_e · P_e`, is a product of two means over tokens. So the mean of the members'
own losses is not that of the global batch. transformers' models call a function of their module for it,
`load_balancing_loss_func`, which gets the logits and the mask of one member. `make_elastic` replaces it by one that
sums counts and probabilities over the members of the model that runs.

Shape suffixes: T tokens of this member, E experts, K experts per token.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from evermoe.moe.checkpointing import is_for_backward
from evermoe.moe.experts import Experts, sum_over_members

logger = logging.getLogger(__name__)

NAME = "load_balancing_loss_func"
ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
"""Arguments of the function in all models with transformers' experts interface."""


class _Running(threading.local):
    """The elastic models whose forward runs in this thread, the innermost one last."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []


_running = _Running()


def span_members(model: nn.Module) -> None:
    """Compute the balancing losses of a model, and of models in it, over the tokens of all members."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        if NAME not in names or _enter in module._forward_pre_hooks.values():
            continue
        place = forward.__globals__
        if not hasattr(place[NAME], "of_one_member"):
            found = list(inspect.signature(place[NAME]).parameters)
            if found != ARGUMENTS:
                logger.warning(
                    "%s: the router's loss with several members is the mean of theirs, not that of one process: "
                    "expected %s to take %s, got %s",
                    *(type(module).__name__, NAME, ARGUMENTS, found),
                )
                continue
            place[NAME] = _over_members(place[NAME])
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave, always_call=True)


def _enter(module: nn.Module, _: Any) -> None:
    _running.models.append(module)


def _leave(module: nn.Module, *_: Any) -> None:
    _running.models.pop()


def _over_members(of_one_member: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a model's forward calls instead of `of_one_member`, which remains for a member alone."""

    def load_balancing_loss_func(
        gate_logits: Any, num_experts: int, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        layer = _layer() if isinstance(gate_logits, tuple) and gate_logits else None
        if layer is None or layer.group.is_alone or not is_for_backward():
            return of_one_member(gate_logits, num_experts, top_k, attention_mask)
        return balancing_loss(layer, gate_logits, num_experts, top_k, attention_mask)

    load_balancing_loss_func.of_one_member = of_one_member  # type: ignore[attr-defined]
    return load_balancing_loss_func


def _layer() -> Experts | None:
    """Return a layer of experts of the model that runs; all layers have the same members."""
    if not _running.models:
        return None
    return next((module for module in _running.models[-1].modules() if isinstance(module, Experts)), None)


def balancing_loss(
    layer: Experts, gate_logits: tuple[Tensor, ...], num_experts: int, top_k: int, attention_mask: Tensor | None
) -> Tensor:
    """Return the loss of all members' tokens together, as transformers computes it in one process. Collective.

    Args:
        layer: of these members; a member without samples brings no tokens.
        gate_logits: per layer `[T, E]`.
        num_experts: E.
        top_k: K.
        attention_mask: 0 for padding, T elements in all; None: no token is padding.

    Returns:
        A scalar, the same on all members. Its backward is collective, too.
    """
    device = gate_logits[0].device
    mask = torch.ones(len(gate_logits[0])) if attention_mask is None else attention_mask.reshape(-1)
    mask_T = mask.to(device, torch.float32) * layer.has_samples
    counts_E = sums_E = torch.zeros(num_experts, device=device)
    for logits_TE in gate_logits:
        scores_TE = logits_TE.to(device).softmax(-1)
        ids_TK = scores_TE.topk(top_k, dim=-1).indices
        counts_E = counts_E.scatter_add(0, ids_TK.reshape(-1), mask_T.repeat_interleave(top_k))
        sums_E = sums_E + (scores_TE.float() * mask_T.unsqueeze(1)).sum(0)
    tokens_1 = mask_T.sum().unsqueeze(0) * len(gate_logits)
    totals = sum_over_members(layer, torch.cat([counts_E, sums_E, tokens_1]))
    counts_E, sums_E, tokens_1 = totals.split([num_experts, num_experts, 1])
    tokens_1 = tokens_1.detach().clamp(min=1)
    return num_experts * ((counts_E.detach() / tokens_1) * (sums_E / tokens_1)).sum()
