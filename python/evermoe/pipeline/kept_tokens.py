"""Token counts of a stage's experts as buffers, so that they are copied and recovered with its units."""

from __future__ import annotations

import torch
from torch import nn

from evermoe.state.expert_load import ExpertLoad


class KeptTokens(nn.Module):
    """Tokens of each expert in total and at its latest copies, in the memory of an `ExpertLoad`.

    Args:
        load: of the stage.
    """

    tokens: torch.Tensor
    marks: torch.Tensor

    def __init__(self, load: ExpertLoad) -> None:
        super().__init__()
        self.register_buffer("tokens", load.tokens)
        self.register_buffer("marks", load.marks.state)
