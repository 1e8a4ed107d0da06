"""Units on a GPU as a copier can take them: each tensor in memory of its own, all on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from evermoe._native import Capture
from evermoe.snapshot.chunked_copy import ChunkedCopy

TRANSFERS = 4
"""Transfers of 4 MiB of a capture that are on their way at once."""
MAX_STAND_INS = 1 / 16
"""Part of the bytes that may have stand-ins, which take room on the GPU."""


class GpuSource:
    """Chunks for the tensors of units, made once as long as the tensors stay where they are.

    Optimizers keep one `step` for all experts of a layer, and some keep it on the CPU. For what several units share,
    and what is elsewhere, each unit has a *stand-in* on the GPU, which is written before each capture. Where all
    tensors have one, training may write them again at once: the captured bytes are in other memory.

    Args:
        tensors: contiguous, unit by unit.
        device: where all but small ones are.
        is_beside: whether all tensors have stand-ins, which take as much memory on the GPU as they do.

    Raises:
        RuntimeError: too little memory on the GPU, or page-locked on the host.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, *, is_beside: bool = False) -> None:
        self.is_beside = is_beside
        self.capture: Capture | None = None
        """The newest one."""
        self._places = _places(tensors)
        uses = Counter(self._places)
        self._device = device
        self._originals: dict[tuple[int, int], Tensor] = {}
        self._stand_ins: list[tuple[tuple[int, int], Tensor]] = []
        own = []
        for tensor, place in zip(tensors, self._places, strict=True):
            if tensor.device != device or (tensor.nbytes and (is_beside or uses[place] > 1)):
                self._originals[place] = tensor.detach().reshape(-1).view(torch.uint8)
                own.append(torch.empty(tensor.nbytes, dtype=torch.uint8, device=device))
                self._stand_ins.append((place, own[-1]))
            else:
                own.append(tensor)
        self._copy = ChunkedCopy(own, staging=TRANSFERS, for_captures=True)
        self._written = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Bytes of the stand-ins."""
        return sum(stand_in.nbytes for _, stand_in in self._stand_ins)

    @staticmethod
    def fits(tensors: Sequence[Tensor], device: torch.device) -> bool:
        """Whether all but small parts of the tensors are on the device."""
        elsewhere = sum(tensor.nbytes for tensor in tensors if tensor.device != device)
        return elsewhere <= MAX_STAND_INS * sum(tensor.nbytes for tensor in tensors)

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it was made for these tensors, where they are now."""
        return self._places == _places(tensors)

    def copy(self) -> ChunkedCopy:
        """The chunks, for one capture of the tensors as torch's current stream will have left them."""
        there = {place: self._there(each) for place, each in self._originals.items()}
        if self._stand_ins:
            torch._foreach_copy_(
                [stand_in for _, stand_in in self._stand_ins], [there[place] for place, _ in self._stand_ins]
            )
        if self._written is not None:
            self._written.record(torch.cuda.current_stream(self._device))
        return self._copy

    def _there(self, original: Tensor) -> Tensor:
        """On the device; of what is elsewhere, and may be written right after, a copy of its own is on its way."""
        is_own = self.is_beside and original.device != self._device
        return (original.clone() if is_own else original).to(self._device, non_blocking=True)

    def release(self) -> None:
        """Makes torch's current stream wait until the stand-ins are written: then it may write all else."""
        if self._written is not None:
            torch.cuda.current_stream(self._device).wait_event(self._written)


def _places(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
