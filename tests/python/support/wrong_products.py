"""Parts of a worker that compute wrongly: of its model, its optimizer, and what repeats the steps of others."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from evermoe.copies.replay import part
from evermoe.session import gradients


def spoil(model: Any, where: str) -> None:
    """Let the head, or the experts of the first layer, have one element of their output that is wrong.

    "optimizer": the optimizer leaves a wrong weight in each expert of the first layer; "repeats": so do steps of others
    that are repeated here.
    """
    if where == "optimizer":
        gradients.step_optimizer = then(gradients.step_optimizer, lambda: _add(model.first.experts.weights.data))
        return
    if where == "repeats":
        repeat = part.repeat_tensor_steps
        part.repeat_tensor_steps = lambda weights, *more: then(repeat, lambda: _add(weights))(weights, *more)
        return

    def spoilt(compute: Any) -> Any:
        def run(*args: Any) -> Tensor:
            output: Tensor = compute(*args).clone()
            output.view(-1)[:1] += 1
            return output

        return run

    if where == "head":  # as a faulty processor: the module itself looks as on others
        right, wrong, width = nn.Linear.forward, spoilt(nn.Linear.forward), model.head.out_features
        nn.Linear.forward = lambda self, x: (wrong if self.out_features == width else right)(self, x)  # type: ignore[method-assign]
    else:
        expert = copy.copy(model.first.experts.expert)
        object.__setattr__(expert, "apply", spoilt(expert.apply))
        model.first.experts.expert = expert


def then(compute: Any, more: Any) -> Any:
    """Return a function that computes, and then does more."""

    def run(*args: Any, **kwargs: Any) -> Any:
        found = compute(*args, **kwargs)
        more()
        return found

    return run


def _add(weights: Tensor) -> None:
    """As a faulty processor: torch does not count it as a change."""
    (weights if weights.dim() == 1 else weights.flatten(1).T)[0] += 1e-3
