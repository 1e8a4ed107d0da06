"""Parts of a worker's model that compute wrongly."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


def spoil(model: Any, where: str) -> None:
    """Let the head, or the experts of the first layer, have one element of their output that is wrong."""

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
