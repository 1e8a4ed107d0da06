"""Tokens that the experts of a layer get, counted where the layer runs, and read when the host needs them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class TokenCount:
    """Tokens of each expert on all ranks together: those of the last forward, and a total.

    What a device has counted stays there until it is read, so that no forward waits for it; it is added in place, so
    that a CUDA graph that holds a forward counts at each replay.

    Args:
        num_experts: of the layer.
    """

    def __init__(self, num_experts: int) -> None:
        self._last_E: NDArray[np.int64] | Tensor = np.zeros(num_experts, np.int64)
        self._total_E = np.zeros(num_experts, np.int64)
        self._there_E: Tensor | None = None
        """int64, on a device: what is not in `_total_E` yet."""
        self.begun = 0
        """Forwards whose exchange has begun since the total was forgotten, without those that a CUDA graph repeats."""

    def add(self, tokens_E: NDArray[np.int64] | Tensor, *, is_counted: bool) -> None:
        """Record the load of a forward.

        Args:
            tokens_E: int64, tokens of each expert; a tensor stays on its device.
            is_counted: whether they count in the total.
        """
        self._last_E = tokens_E
        if not is_counted:
            return
        if not isinstance(tokens_E, Tensor):
            self._total_E = self._total_E + tokens_E
            return
        if self._there_E is None or self._there_E.device != tokens_E.device:
            self._collect([self])
            self._there_E = torch.zeros_like(tokens_E)
        self._there_E.add_(tokens_E)

    @property
    def last_E(self) -> NDArray[np.int64]:
        """Tokens of the last forward."""
        return self._last_E.cpu().numpy() if isinstance(self._last_E, Tensor) else self._last_E

    def forget(self) -> None:
        """Set the total to zero."""
        self.begun = 0
        self._total_E = np.zeros_like(self._total_E)
        if self._there_E is not None:
            self._there_E.zero_()

    def copy(self) -> TokenCount:
        """Return a copy of the counts; the host waits for no device."""
        found = TokenCount(len(self._total_E))
        found._last_E, found._total_E = self._last_E, self._total_E
        found._there_E = None if self._there_E is None else self._there_E.clone()
        return found

    def resume(self, kept: TokenCount) -> None:
        """Restore the total of a copy after `forget`."""
        self._total_E = kept._total_E
        if kept._there_E is not None and self._there_E is not None:
            self._there_E.copy_(kept._there_E)

    @classmethod
    def totals(cls, counts: Iterable[TokenCount]) -> list[NDArray[np.int64]]:
        """Return the totals of several layers; the host waits for each device once."""
        counts = list(counts)
        cls._collect(counts)
        return [each._total_E for each in counts]

    @staticmethod
    def _collect(counts: list[TokenCount]) -> None:
        by_device: dict[torch.device, list[tuple[TokenCount, Tensor]]] = {}
        for each in counts:
            if each._there_E is not None:
                by_device.setdefault(each._there_E.device, []).append((each, each._there_E))
        for waiting in by_device.values():
            found = torch.cat([tokens_E for _, tokens_E in waiting]).cpu().numpy()
            for each, tokens_E in waiting:
                new_E, found = found[: len(tokens_E)], found[len(tokens_E) :]
                each._total_E = each._total_E + new_E
                tokens_E.zero_()
