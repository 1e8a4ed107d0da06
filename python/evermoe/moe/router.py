"""Routers: choose the experts of each token and their weights.

Shape suffixes: T tokens of this rank, H hidden width, K experts per token, E experts, G groups of experts.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from evermoe.moe import checkpointing
from evermoe.moe.choice import Choice

SCORES = ("softmax", "sigmoid", "chosen")
Scores = Literal["softmax", "sigmoid", "chosen"]
TINY = 1e-20
"""Added to the divisor of weights, as in DeepSeek-V3."""


class Routes(NamedTuple):
    """A router's choices."""

    ids_TK: Tensor
    """int64: experts of each token, the best one first."""
    weights_TK: Tensor
    """float32: weights of the experts' outputs; differentiable."""
    probabilities_E: Tensor
    """float32: each expert's mean share of the tokens' scores; differentiable, for balancing losses."""
    identity_T: Tensor | None = None
    """float32: weight of each token itself, with `identity_experts`; differentiable."""


class Router(nn.Linear):
    """Scores the experts for each token with a linear layer, and chooses the best K.

    | models | arguments |
    |---|---|
    | Mixtral | `Router(H, E, 2)` |
    | Switch Transformer | `Router(H, E, 1, normalize=False)` |
    | Qwen3-MoE | `Router(H, E, 8, normalize=True)`; `False` where `norm_topk_prob` is |
    | DeepSeek-V2 | `Router(H, E, 6, normalize=False, groups=8, top_groups=3, scale=16.0)` |
    | DeepSeek-V3 | `Router(H, E, 8, scores="sigmoid", groups=8, top_groups=4, scale=2.5, balance_rate=1e-3)` |
    | GPT-OSS | `Router(H, E, 4, scores="chosen", bias=True)` |

    The linear layer and the scores are computed in float32, also under autocast.

        routes = router(x_TH)
        y_TH = experts(x_TH, routes.ids_TK, routes.weights_TK)

    Args:
        hidden: H.
        num_experts: E.
        top_k: K.
        scores: `softmax` over all experts, `sigmoid` of each, or `chosen`: the choice is by logits, and the weights are
            the softmax over the chosen experts only.
        normalize: whether a token's K weights are divided by their sum; no effect with `chosen`.
        groups: G, equal groups of neighbouring experts; each token uses experts of its best groups only. A group's
            score is that of its best expert, or with `sigmoid` the sum of its best two (DeepSeek-V2, section 2.2.2; V3,
            section 2.1.2). If the experts of a group are on one node, tokens are sent to few nodes.
        top_groups: number of groups per token; None for all.
        scale: factor of the weights, after normalisation.
        noise: standard deviation of Gaussian noise on the logits, in training only.
        jitter: in training, tokens are multiplied by uniform random numbers of 1 - jitter to 1 + jitter before they are
            scored (Switch Transformer).
        balance_rate: with it, `balance` has a bias for each expert, which is added to its score for the choice but not
            for the weights. `update_balance` changes the bias by this rate after each step: up for experts with fewer
            tokens than the mean, down for those with more (DeepSeek-V3, section 2.1.2). A session does this for the
            routers of `MoE`, and for any router whose `update_balance` is `Experts.on_load`.
        bias: whether the linear layer has a bias.
        identity_experts: number of additional experts that return the token itself, so that tokens can use less compute
            (LongCat-Flash, "zero-computation experts"). In `ids_TK` they are -1.
        vocabulary: number of token ids. With it, a token's id determines its experts: K different ones, drawn with
            `hash_seed`; its scores give only the weights (Hash layers; DeepSeek-V4).
        hash_seed: seed of that draw, the same on all members.

    Raises:
        ValueError: an option is out of range; the message names it.
    """

    balance: Tensor | None
    """float32 `[E]`: added to the scores for the choice; None without `balance_rate`."""
    table: Tensor | None
    """int64 `[vocabulary, K]`: experts of each token id; None without `vocabulary`."""

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        scores: Scores = "softmax",
        normalize: bool = True,
        groups: int = 1,
        top_groups: int | None = None,
        scale: float = 1.0,
        noise: float = 0.0,
        jitter: float = 0.0,
        balance_rate: float | None = None,
        bias: bool = False,
        identity_experts: int = 0,
        vocabulary: int | None = None,
        hash_seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        kept = groups if top_groups is None else top_groups
        if min(hidden, num_experts) < 1 or groups < 1 or num_experts % groups:
            raise ValueError(
                f"Router: expected positive sizes and groups that divide num_experts, got hidden={hidden}, "
                f"num_experts={num_experts}, groups={groups}"
            )
        if not 1 <= kept <= groups or not 1 <= top_k <= kept * (num_experts // groups):
            raise ValueError(
                f"Router: expected 1 <= top_groups <= groups and 1 <= top_k <= the experts of top_groups groups, got "
                f"top_groups={top_groups}, groups={groups}, top_k={top_k}, num_experts={num_experts}"
            )
        if scores not in SCORES:
            raise ValueError(f"Router: expected scores to be one of {', '.join(SCORES)}, got {scores!r}")
        if min(noise, jitter) < 0 or jitter >= 1:
            raise ValueError(f"Router: expected noise >= 0 and 0 <= jitter < 1, got noise={noise}, jitter={jitter}")
        if balance_rate is not None and balance_rate <= 0:
            raise ValueError(f"Router: expected balance_rate > 0 or None, got {balance_rate}")
        if identity_experts < 0 or (identity_experts and (groups > 1 or balance_rate is not None or vocabulary)):
            raise ValueError(
                "Router: expected identity_experts >= 0, and none of them with groups, balance_rate or vocabulary; got "
                f"{identity_experts}"
            )
        if vocabulary is not None and (vocabulary < 1 or kept < groups or balance_rate is not None):
            raise ValueError(
                f"Router: expected vocabulary >= 1, without top_groups and balance_rate, or None; got {vocabulary}"
            )
        super().__init__(hidden, num_experts + identity_experts, bias=bias, device=device, dtype=dtype)
        self.num_experts, self.identity_experts, self.vocabulary = num_experts, identity_experts, vocabulary
        self.top_k, self.scores, self.normalize, self.scale = top_k, scores, normalize, scale
        self.groups, self.top_groups, self.noise, self.jitter = groups, kept, noise, jitter
        self.balance_rate = balance_rate
        self.register_buffer("balance", None if balance_rate is None else torch.zeros(num_experts, device=device))
        self.register_buffer("table", None)
        if vocabulary is not None:
            random = torch.Generator().manual_seed(hash_seed)
            draws_VE = torch.rand(vocabulary, num_experts, generator=random)
            self.table = draws_VE.topk(top_k, dim=-1).indices.to(device=device)

    def extra_repr(self) -> str:
        """Return the text that `print(router)` shows."""
        return f"{super().extra_repr()}, {self.settings()}"

    def settings(self) -> str:
        """Return the settings that change a choice and do not show in the shapes of the parameters."""
        found = f"top_k={self.top_k}, router_noise={self.noise}"
        others = {
            "scores": (self.scores, "softmax"),
            "normalize": (self.normalize, True),
            "groups": (self.groups, 1),
            "top_groups": (self.top_groups, self.groups),
            "scale": (self.scale, 1.0),
            "jitter": (self.jitter, 0.0),
            "balance_rate": (self.balance_rate, None),
            "identity_experts": (self.identity_experts, 0),
            "vocabulary": (self.vocabulary, None),
        }
        return found + "".join(f", {name}={value}" for name, (value, usual) in others.items() if value != usual)

    def forward(  # type: ignore[override]
        self,
        x_TH: Tensor,
        tokens_T: Tensor | None = None,
        mask_T: Tensor | None = None,
        choice: Choice | None = None,
    ) -> Routes:
        """Choose the experts of each token.

        Args:
            x_TH: `[T, H]` of any floating-point dtype.
            tokens_T: integers `[T]`, ids of the tokens, for a router with a `vocabulary`.
            mask_T: `[T]`, 0 or False for padding: its experts are -1 with weight 0, and `probabilities_E` is the mean
                over the other tokens. None: no token is padding.
            choice: of a forward that is recorded, replayed or may be repeated: `MoE` gives it.

        Raises:
            ValueError: the router has a vocabulary, and `tokens_T` is missing or does not fit `x_TH`.
        """
        with torch.autocast(x_TH.device.type, enabled=False):
            if self.training and self.jitter > 0:
                sample = partial(_factors_like, x_TH, self.jitter)
                x_TH = x_TH * checkpointing.draw(self, "jitter", x_TH.device, sample)
            bias = None if self.bias is None else self.bias.float()
            logits_TE = F.linear(x_TH.float(), self.weight.float(), bias)
            scores_TE = logits_TE.sigmoid() if self.scores == "sigmoid" else logits_TE.softmax(-1)
            total_T1 = scores_TE.sum(-1, keepdim=True) if self.scores == "sigmoid" else 1.0
            probabilities_E = mean_of_tokens(scores_TE / total_T1, mask_T)
            if self.training and self.noise > 0:
                noise_TE = checkpointing.draw(self, "noise", x_TH.device, partial(torch.randn_like, logits_TE))
                logits_TE = logits_TE + noise_TE * self.noise
                scores_TE = logits_TE.sigmoid() if self.scores == "sigmoid" else logits_TE.softmax(-1)
            if self.scores == "chosen":
                scores_TE = logits_TE
            ids_TK = self._choose(scores_TE.detach()) if self.table is None else self._look_up(x_TH, tokens_T)
            if choice is not None:
                ids_TK = choice.choose(ids_TK)
            weights_TK = scores_TE.gather(1, ids_TK)
            if self.scores == "chosen":
                weights_TK = weights_TK.softmax(-1)
            elif self.normalize and (self.top_k > 1 or self.scores == "sigmoid"):
                weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + TINY)
            if self.scale != 1.0:
                weights_TK = weights_TK * self.scale
            if choice is not None:
                weights_TK = choice.weigh(weights_TK)
            if mask_T is not None:
                is_padding_T1 = ~mask_T.bool().unsqueeze(1)
                ids_TK, weights_TK = ids_TK.masked_fill(is_padding_T1, -1), weights_TK.masked_fill(is_padding_T1, 0)
            if not self.identity_experts:
                return Routes(ids_TK, weights_TK, probabilities_E)
            is_identity_TK = ids_TK >= self.num_experts
            identity_T = (weights_TK * is_identity_TK).sum(-1)
            ids_TK = ids_TK.masked_fill(is_identity_TK, -1)
            return Routes(ids_TK, weights_TK, probabilities_E[: self.num_experts], identity_T)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        if self.balance is not None:
            scores_TE = scores_TE + self.balance
        if self.top_groups < self.groups:
            scores_TGe = scores_TE.unflatten(1, (self.groups, -1))
            best = min(2 if self.scores == "sigmoid" else 1, scores_TGe.shape[2])
            groups_TG = scores_TGe.topk(best, dim=-1).values.sum(-1)
            left = torch.ones_like(groups_TG, dtype=torch.bool)
            left.scatter_(1, groups_TG.topk(self.top_groups, dim=-1).indices, False)
            scores_TE = scores_TGe.masked_fill(left.unsqueeze(-1), -torch.inf).flatten(1)
        return scores_TE.topk(self.top_k, dim=-1).indices

    def _look_up(self, x_TH: Tensor, tokens_T: Tensor | None) -> Tensor:
        if tokens_T is None or tokens_T.shape != x_TH.shape[:1] or tokens_T.is_floating_point():
            found = "none" if tokens_T is None else f"{tokens_T.dtype} {list(tokens_T.shape)}"
            raise ValueError(f"Router: expected the numbers of {len(x_TH)} tokens for its vocabulary, got {found}")
        assert self.table is not None
        return self.table[tokens_T.long()]

    @torch.no_grad()
    def update_balance(self, load_E: NDArray[np.int64]) -> None:
        """Update `balance` after a step; the same on all ranks, since the load is.

        Args:
            load_E: tokens of each expert on all ranks in this step, as `Experts.load_E`.
        """
        if self.balance is not None and self.balance_rate is not None:
            follow_load(self.balance, load_E, self.balance_rate)


def _factors_like(x_TH: Tensor, jitter: float) -> Tensor:
    return torch.empty_like(x_TH).uniform_(1 - jitter, 1 + jitter)


def mean_of_tokens(scores_TE: Tensor, mask_T: Tensor | None) -> Tensor:
    """Return the mean over the tokens that are not padding, `[E]`; zeros if all are padding."""
    if mask_T is None:
        return scores_TE.sum(0) / max(len(scores_TE), 1)
    kept_T1 = mask_T.bool().unsqueeze(1)
    return scores_TE.masked_fill(~kept_T1, 0).sum(0) / kept_T1.sum().clamp(min=1)


def follow_load(balance_E: Tensor, load_E: NDArray[np.int64], rate: float) -> None:
    """Add `rate` for each expert with less than the mean load, and subtract it for those with more, in place."""
    balance_E.add_(torch.from_numpy(np.sign(load_E.mean() - load_E)).to(balance_E), alpha=rate)
