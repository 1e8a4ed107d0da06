"""What is known of a forward's exchange of tokens, on the host and on the layer's device: one wait for a GPU.

Shape suffixes: R ranks, E experts, e local experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes to which parts of one copy are aligned, for tensors of any type."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """How many rows go from and to each rank and expert in one forward."""

    share_E: Tensor
    """float64: parts of all ranks' tokens that go to each expert."""
    send_ER: Tensor
    """int64: rows for each expert on each rank."""
    receive_Re: Tensor
    """int64: rows that come from each rank for each local expert."""
    ends_e: Tensor
    """int32: ends of the local experts' rows, once they are ordered by expert."""
    sent_R: list[int]
    """Rows to each rank."""
    received_R: list[int]
    """Rows from each rank."""
    lengths_e: list[int]
    """Rows of each local expert."""

    @staticmethod
    def of(tokens_RE: Tensor, send_ER: np.ndarray, receive_RE: np.ndarray, experts: Sequence[int]) -> Exchange:
        """The exchange as it was planned.

        Args:
            tokens_RE: int64 on the layer's device, tokens of each rank for each expert.
            send_ER: int64, of `planning.split_tokens`.
            receive_RE: likewise.
            experts: the local ones.
        """
        receive_Re = receive_RE[:, experts]
        lengths_e = receive_Re.sum(0)
        tokens_E = tokens_RE.sum(0)
        there = copy_to([send_ER, receive_Re, lengths_e.cumsum().astype(np.int32)], tokens_RE.device)
        return Exchange(
            share_E=tokens_E.double() / tokens_E.sum().clamp(min=1),
            send_ER=there[0],
            receive_Re=there[1],
            ends_e=there[2],
            sent_R=send_ER.sum(0).tolist(),
            received_R=receive_RE.sum(1).tolist(),
            lengths_e=lengths_e.tolist(),
        )


def copy_to(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on a device; to a GPU in one copy that nobody waits for."""
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    if device.type == "cpu":
        return tensors
    starts = [0, *accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)]
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for start, tensor in zip(starts, tensors, strict=False):
        host[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there.narrow(0, start, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=False)
    ]
