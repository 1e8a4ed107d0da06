"""Self-test of a process before it joins its job: products and memory of its device."""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = {"cpu": (256, 4 << 20), "cuda": (2048, 64 << 20)}
"""By type of device: rows and columns of the matrices, and bytes of the memory that is tested."""
DEPTH = 512
"""Terms of each sum."""
CHECKED_ROWS = 64
"""Rows that are compared with a product in float64 on the CPU."""
TOLERANCE = 1e-2
"""Largest difference from it, in parts of the largest element: TF32 may be on."""
PATTERNS = (0x5555555555555555, -0x5555555555555556)
"""Each bit of memory is 1 in one of them, and 0 in the other."""


def find_fault(device: torch.device) -> str:
    """Return what the device does wrongly; empty if nothing.

    A product of matrices must have the same bits twice, and be close to that in float64. Memory must return what was
    written. No random generator is used. It takes some 20 ms on a CPU.
    """
    rows, nbytes = SIZES[device.type]
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        return _test_products(device, rows) or _test_memory(device, nbytes)


def _test_products(device: torch.device, rows: int) -> str:
    left, right = _matrix(rows, DEPTH, 7), _matrix(DEPTH, rows, 11)
    on_device = left.to(device), right.to(device)
    first, second = torch.matmul(*on_device), torch.matmul(*on_device)
    if not torch.equal(first, second):
        return "the same product of two matrices has other bits the second time"
    expected = left[:CHECKED_ROWS].double() @ right.double()
    error = float((first[:CHECKED_ROWS].cpu() - expected).abs().max() / expected.abs().max())
    if not error < TOLERANCE:
        return f"a product of two matrices is wrong by {error:.1g} of its largest element"
    return ""


def _matrix(rows: int, columns: int, factor: int) -> Tensor:
    """Return a float32 matrix of fixed numbers from -1 to 1."""
    return ((torch.arange(rows * columns, device="cpu") * factor * 2654435761 >> 16 & 4095).float() / 2048 - 1).view(
        rows, columns
    )


def _test_memory(device: torch.device, nbytes: int) -> str:
    memory = torch.empty(nbytes // 8, dtype=torch.int64, device=device)
    for pattern in PATTERNS:
        memory.fill_(pattern)
        if wrong := int(torch.count_nonzero(memory != pattern)):
            return f"{wrong} of {len(memory)} words of memory do not hold what was written"
    return ""
