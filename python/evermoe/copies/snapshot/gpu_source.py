"""Units on a GPU, prepared for a copier: each tensor in memory of its own, all on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from evermoe._native import Capture
from evermoe.copies.snapshot.chunked_copy import ChunkedCopy

TRANSFERS = 4
"""Maximum number of concurrent transfers of 4 MiB of a capture."""
MAX_STAND_INS = 1 / 16
"""Maximum part of the bytes that may have stand-ins, which take GPU memory."""


class GpuSource:
    """Chunks for the tensors of units, created once as long as the tensors stay at their addresses.

    Optimizers keep one `step` for all experts of a layer, and some keep it on the CPU. Each unit has a *stand-in* on
    the GPU for tensors that several units share and for those on another device, written before each capture. If all
    tensors have a stand-in, training may write them again at once: the captured bytes are in other memory.

    Args:
        tensors: contiguous, unit by unit.
        device: device of all tensors except small ones.
        copies_first: whether all tensors have stand-ins, which take as much GPU memory as the tensors.

    Raises:
        RuntimeError: too little memory on the GPU, or too little page-locked memory on the host.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, *, copies_first: bool = False) -> None:
        self.copies_first = copies_first
        self.capture: Capture | None = None
        """The newest one."""
        self._places = _places(tensors)
        uses = Counter(self._places)
        self._device = device
        self._originals: dict[tuple[int, int], Tensor] = {}
        self._stand_ins: list[tuple[tuple[int, int], Tensor]] = []
        own = []
        for tensor, place in zip(tensors, self._places, strict=True):
            if tensor.device != device or (tensor.nbytes and (copies_first or uses[place] > 1)):
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
        """Return whether all tensors except a small part are on the device."""
        elsewhere = sum(tensor.nbytes for tensor in tensors if tensor.device != device)
        return elsewhere <= MAX_STAND_INS * sum(tensor.nbytes for tensor in tensors)

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the source was created for these tensors at their current addresses."""
        return self._places == _places(tensors)

    def copy(self) -> ChunkedCopy:
        """Return the chunks for one capture of the tensors, after all work on torch's current stream."""
        on_device = {place: self._on_device(each) for place, each in self._originals.items()}
        if self._stand_ins:
            torch._foreach_copy_(
                [stand_in for _, stand_in in self._stand_ins], [on_device[place] for place, _ in self._stand_ins]
            )
        if self._written is not None:
            self._written.record(torch.cuda.current_stream(self._device))
        return self._copy

    def _on_device(self, original: Tensor) -> Tensor:
        """Return the tensor on the device; one elsewhere, which may be written right after, is copied first."""
        is_own = self.copies_first and original.device != self._device
        return (original.clone() if is_own else original).to(self._device, non_blocking=True)

    def release(self) -> None:
        """Make torch's current stream wait until the stand-ins are written; later work may write all tensors."""
        if self._written is not None:
            torch.cuda.current_stream(self._device).wait_event(self._written)


def _places(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
