"""An optimizer with float32 masters in its state, as mixed-precision recipes have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class MasterAdam(torch.optim.Optimizer):
    """AdamW on a float32 master of each parameter that is not float32 itself, made in its first step."""

    def __init__(self, params: ParamsT, lr: float = 1e-3, decay: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                    if p.dtype != torch.float32:
                        state["master_weights"] = p.detach().float()
                master = state.get("master_weights", p)
                gradient = p.grad.float()
                state["step"] += 1
                t = int(state["step"])
                state["exp_avg"].lerp_(gradient, 1 - beta1)
                state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)
                divisor = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt_().add_(group["eps"])
                master.mul_(1 - group["lr"] * group["weight_decay"])
                master.addcdiv_(state["exp_avg"], divisor, value=-group["lr"] / (1 - beta1**t))
                if master is not p:
                    p.copy_(master)
