"""Counter of a group's collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Begun:
    """Counter of collectives, and the latest one."""

    count: int = 0
    name: str = ""
    shape: Sequence[int] = ()
    dtype: torch.dtype | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Count a collective that begins."""
        self.count += 1
        self.name, self.shape, self.dtype = name, tensor.shape, tensor.dtype

    def __str__(self) -> str:
        """Return the latest collective with its number, shape and type; empty before the first."""
        if not self.count:
            return ""
        return f"collective {self.count}, {self.name} of {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
