"""MoE layer: a router, and its experts on any rank.

Shape suffixes: T tokens of this rank, H hidden width, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from evermoe.moe import checkpointing
from evermoe.moe.choice import begin_choice
from evermoe.moe.expert import Activation, Expert
from evermoe.moe.experts import Experts, expert_layers, sum_over_members
from evermoe.moe.module_paths import named_parts
from evermoe.moe.router import Router, Routes
from evermoe.moe.token_counts import TokenCount
from evermoe.planning.dispatch import SplitPolicy


class MoE(nn.Module):
    """A layer of E feed-forward experts, of which each token uses the K best by its router's scores.

    In an `evermoe.Session` the experts are distributed over the ranks, and tokens are sent to them and back. For a
    router of your own see `evermoe.Experts`.

    Args:
        hidden: H, width of a token.
        intermediate: inner width of an expert.
        num_experts: E.
        top_k: K, experts per token. With K > 1 the K weights are normalised to sum to one.
        router_noise: standard deviation of Gaussian noise on the router's logits, in training only.
        gated: as for `Expert`; also `activation`.
        token_split: as for `Experts`; also all following arguments.

    Attributes:
        router: the `Router`.
        experts: the `Experts`.
        shared: module for all tokens, whose output is added to that of the experts; None without one.
        balance_loss: after a forward, `E · Σ_e f_e · P_e` (Switch Transformer, Eq. 4) with f_e the fraction of all
            ranks' (token, k) pairs routed to e and P_e this rank's mean router probability, both without padding. Add
            it to the loss, times a factor. Both kinds of activation checkpointing keep its gradient. If the ranks'
            numbers of tokens may differ, use `load_balancing_loss`, which is exact then.
        balanced_tokens: float32 scalar: number of tokens in the mean P_e.

    Raises:
        ValueError: a size or an option is out of range; the message names it.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int = 2,
        *,
        router_noise: float = 0.0,
        gated: bool = False,
        activation: Activation = F.silu,
        token_split: SplitPolicy | None = None,
        max_tokens: int | None = None,
        fp8_dispatch: bool = False,
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
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        expert = Expert(hidden, intermediate, gated=gated, activation=activation)
        self._compose(
            Router(hidden, num_experts, top_k, normalize=top_k > 1, noise=router_noise, **place),
            Experts(
                expert,
                num_experts,
                token_split=token_split,
                max_tokens=max_tokens,
                fp8_dispatch=fp8_dispatch,
                **place,
            ),
            None,
        )

    @classmethod
    def of(cls, router: Router, experts: Experts, shared: nn.Module | None = None) -> MoE:
        """Create a layer from a router and experts of any kind.

        Args:
            router: chooses the experts of each token.
            experts: of the router's number and width.
            shared: a module for all tokens, `[T, H]`, whose output is added (DeepSeekMoE's shared experts).

        Raises:
            ValueError: router and experts do not fit each other.
        """
        found, expected = (router.in_features, router.num_experts), (experts.hidden, experts.num_experts)
        if found != expected:
            raise ValueError(
                f"MoE: expected a router of hidden={expected[0]} and num_experts={expected[1]} as the experts are, got "
                f"hidden={found[0]} and num_experts={found[1]}"
            )
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._compose(router, experts, shared)
        return layer

    def _compose(self, router: Router, experts: Experts, shared: nn.Module | None) -> None:
        self.router, self.experts, self.shared = router, experts, shared
        self.hidden, self.num_experts, self.top_k = experts.hidden, experts.num_experts, router.top_k
        experts.top_k = router.top_k
        self.balance_loss: Tensor = torch.zeros((), device=experts.weights.device)
        self.balanced_tokens: Tensor = torch.zeros((), device=experts.weights.device)
        if router.balance is not None:
            experts.on_load = router.update_balance

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without the graph of a forward."""
        return self.__dict__ | {"balance_loss": self.balance_loss.detach()}

    @property
    def tokens_E(self) -> NDArray[np.int64]:
        """`[E]`: tokens routed to each expert in the last forward, summed over all ranks."""
        return self.experts.tokens_E

    @property
    def load_E(self) -> NDArray[np.int64]:
        """`[E]`: the same, summed over all forwards in training mode; in a session, over those of the current step."""
        return self.experts.load_E

    def settings(self) -> str:
        """Return the settings that change the layer's result and do not show in the shapes of its parameters."""
        return f"{self.router.settings()}, {self.experts.settings()}"

    def forward(self, x: Tensor, tokens: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the layer's output, with the shape and dtype of `x`. Collective when the layer spans several ranks.

        Args:
            x: `[..., H]`.
            tokens: integers `[...]`, ids of the tokens in the vocabulary, for a router with a `vocabulary`.
            mask: `[...]`, 0 or False for padding, as transformers' `attention_mask`. Padding goes to no expert: it is
                not sent, and counts neither in `balance_loss` nor in `load_E`. Its output is that of `shared`, or 0.

        Raises:
            ValueError: a shape does not fit.
        """
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            raise ValueError(f"MoE: expected [..., {self.hidden}], got {list(x.shape)}")
        if mask is not None and mask.shape != x.shape[:-1]:
            raise ValueError(f"MoE: expected a mask of shape {list(x.shape[:-1])} as x has, got {list(mask.shape)}")
        x_TH = x.reshape(-1, self.hidden)
        mask_T = None if mask is None else mask.reshape(-1)
        choice = begin_choice(self.experts)
        routes = self.router(x_TH, None if tokens is None else tokens.reshape(-1), mask_T, choice)
        y_TH, shared_TH = self._run_experts(x_TH, routes)
        if routes.identity_T is not None:
            y_TH = y_TH + x_TH * routes.identity_T.unsqueeze(1).to(x_TH.dtype)
        if shared_TH is not None:
            y_TH = y_TH + shared_TH
        share_E = self.experts.share_E.to(routes.probabilities_E)
        balance_loss = self.num_experts * (share_E * routes.probabilities_E).sum()
        if mask_T is None:
            counted = torch.full((), len(x_TH), dtype=torch.float32, device=x_TH.device)
        else:
            counted = mask_T.bool().sum().float()
        y_TH, balance_loss = checkpointing.carry(self, y_TH, balance_loss)
        checkpointing.keep(self, "balanced_tokens", counted * self.experts.has_samples)
        checkpointing.keep(self, "balance_loss", balance_loss)
        return y_TH.reshape(x.shape)

    def _run_experts(self, x_TH: Tensor, routes: Routes) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of the experts and of `shared`, which a GPU computes while the host waits for its plan."""
        experts, shared = self.experts, self.shared
        if shared is None:
            return experts(x_TH, routes.ids_TK, routes.weights_TK), None
        # What a wrapper such as activation checkpointing runs must not contain another module.
        is_plain = isinstance(experts, Experts) and "forward" not in vars(experts)
        if torch.compiler.is_compiling() or not is_plain:
            return experts(x_TH, routes.ids_TK, routes.weights_TK), shared(x_TH)
        found: list[Tensor] = []
        y_TH = experts(x_TH, routes.ids_TK, routes.weights_TK, before_wait=lambda: found.append(shared(x_TH)))
        return y_TH, found[0]


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """Return the MoE layers of a model by module path, in module order."""
    return {name: module for name, module in named_parts(model) if isinstance(module, MoE)}


def _find_layers(model: nn.Module) -> list[MoE]:
    """Return the layers of `moe_layers` in a fifth of its time, without paths."""
    found, seen, left = [], set(), [model]
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        if isinstance(module, MoE):
            found.append(module)
        # A module without modules is no MoE layer. The first child is the next one.
        left += [each for each in reversed(module._modules.values()) if each is not None and each._modules]
    return found


def update_balance(model: nn.Module) -> None:
    """Call `on_load` of all layers with the load of this step, which updates the `balance` of each `Router`.

    A session does this in each step. Without one, call it after `optimizer.step()`, and then `experts.count.reset()` of
    each layer.
    """
    report_load(expert_layers(model).values())


def report_load(layers: Iterable[Experts]) -> None:
    """Call `on_load` of the layers that have it with their load."""
    followed = [experts for experts in layers if experts.on_load is not None]
    for experts, load_E in zip(followed, TokenCount.totals(experts.count for experts in followed), strict=True):
        assert experts.on_load is not None
        experts.on_load(load_E)


def layer_settings(model: nn.Module) -> list[str]:
    """Return the settings of each MoE layer, and of experts with another router."""
    layers = list(moe_layers(model).values())
    inside = {id(layer.experts) for layer in layers}
    others = [experts for experts in expert_layers(model).values() if id(experts) not in inside]
    return [layer.settings() for layer in layers] + [experts.settings() for experts in others]


def load_balancing_loss(model: nn.Module) -> Tensor:
    """Return the mean over the MoE layers of `E · Σ_e f_e · P_e` of the last forward: a scalar, 1 at perfect balance.

    Both f_e and P_e are over the tokens of all members, without padding. So the loss is the same on all members, and
    its gradient is that of one process with all tokens, whatever the weights of the members' losses. Under
    `torch.no_grad()` P_e is this member's, and nothing is exchanged.

    Call it on all members: it is collective, also in the backward, if the layers span several members and gradients are
    recorded.

    Raises:
        ValueError: the model has no MoE layer.
        PeerLost: a member is lost.
    """
    layers = list(moe_layers(model).values()) if torch.compiler.is_compiling() else _find_layers(model)
    if not layers:
        raise ValueError("load_balancing_loss: expected a model with evermoe.MoE layers, got one without any")
    losses_L = torch.stack([layer.balance_loss.float() for layer in layers])
    experts = layers[0].experts
    if experts.group.is_alone or not checkpointing.is_for_backward():
        return losses_L.mean()
    tokens_L = torch.stack([layer.balanced_tokens for layer in layers]).to(losses_L)
    sums_L, tokens_L = sum_over_members(experts, torch.cat([losses_L * tokens_L, tokens_L])).chunk(2)
    return (sums_L / tokens_L.clamp(min=1)).mean()
