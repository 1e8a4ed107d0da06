"""Counts the tokens of a layer's experts on the layer's device; the host reads the counts when it needs them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class TokenCount:
    """Tokens of each expert, summed over all ranks: those of the last forward, and a total.

    Counts stay on the device until they are read, so that no forward waits for them. They are added in place, so that a
    CUDA graph with a forward counts at each replay.

    Args:
        num_experts: of the layer.
    """

    def __init__(self, num_experts: int) -> None:
        self._last_E: NDArray[np.int64] | Tensor = np.zeros(num_experts, np.int64)
        self._total_E = np.zeros(num_experts, np.int64)
        self._on_device_E: Tensor | None = None
        """int64, on a device: counts that are not in `_total_E` yet."""
        self.begun = 0
        """Forwards whose exchange has begun since the last `reset`, without those that a CUDA graph replays."""
        self.received: list[tuple[int, list[int]]] = []
        """Of compiled forwards since the last `reset` which no backward has repeated: the number of ranks that exchange
        rows, and the rows of each local expert; see `evermoe.moe.lost_exchange`."""

    def add(self, tokens_E: NDArray[np.int64] | Tensor, *, is_counted: bool) -> None:
        """Count a forward.

        Args:
            tokens_E: int64, tokens of each expert; a tensor stays on its device.
            is_counted: whether to add them to the total.
        """
        self._last_E = tokens_E
        if not is_counted:
            return
        if not isinstance(tokens_E, Tensor):
            self._total_E = self._total_E + tokens_E
            return
        if self._on_device_E is None or self._on_device_E.device != tokens_E.device:
            self._collect([self])
            self._on_device_E = torch.zeros_like(tokens_E)
        self._on_device_E.add_(tokens_E)

    @property
    def last_E(self) -> NDArray[np.int64]:
        """Tokens of the last forward."""
        return self._last_E.cpu().numpy() if isinstance(self._last_E, Tensor) else self._last_E

    def reset(self) -> None:
        """Set the total to zero."""
        self.begun, self.received = 0, []
        self._total_E = np.zeros_like(self._total_E)
        if self._on_device_E is not None:
            self._on_device_E.zero_()

    def copy(self) -> TokenCount:
        """Return a copy of the counts so far; the host waits for no device."""
        found = TokenCount(len(self._total_E))
        found._last_E, found._total_E = self._last_E, self._total_E
        found._on_device_E = None if self._on_device_E is None else self._on_device_E.clone()
        return found

    def resume(self, kept: TokenCount) -> None:
        """Continue from the counts of a copy, after a `reset`."""
        self._total_E = kept._total_E
        if kept._on_device_E is not None and self._on_device_E is not None:
            self._on_device_E.copy_(kept._on_device_E)

    @classmethod
    def totals(cls, counts: Iterable[TokenCount]) -> list[NDArray[np.int64]]:
        """Return the totals of several layers; the host waits once per device."""
        counts = list(counts)
        cls._collect(counts)
        return [each._total_E for each in counts]

    @staticmethod
    def _collect(counts: list[TokenCount]) -> None:
        by_device: dict[torch.device, list[tuple[TokenCount, Tensor]]] = {}
        for each in counts:
            if each._on_device_E is not None:
                by_device.setdefault(each._on_device_E.device, []).append((each, each._on_device_E))
        for waiting in by_device.values():
            found = torch.cat([tokens_E for _, tokens_E in waiting]).cpu().numpy()
            for each, tokens_E in waiting:
                new_E, found = found[: len(tokens_E)], found[len(tokens_E) :]
                each._total_E = each._total_E + new_E
                tokens_E.zero_()
