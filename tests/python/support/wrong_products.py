"""Parts of a worker's model that compute wrongly."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


def spoil(model: nn.Module, where: str) -> None:
    """Let the head, or the experts of the first layer, have one element of their output that is wrong."""

    def spoilt(compute: Any) -> Any:
        def run(*args: Any) -> Tensor:
            output = compute(*args).clone()
            output.view(-1)[:1] += 1
            return output

        return run

    found: Any = model
    if where == "head":
        found.head.forward = spoilt(found.head.forward)
    else:
        expert = copy.copy(found.first.experts.expert)
        object.__setattr__(expert, "apply", spoilt(expert.apply))
        found.first.experts.expert = expert
