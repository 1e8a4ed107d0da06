"""Registers the ops with the torch that is installed, and says so where none fits."""

from __future__ import annotations

_MIN_TORCH = (2, 10)


def _check_torch() -> None:
    """Raise ImportError unless a torch that the ops can be registered with is installed."""
    install = "pip install 'torch>=2.10'"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"evermoe needs PyTorch 2.10 or newer: {install}") from error
    found = str(torch.__version__)
    try:
        major, minor = (int(part) for part in found.split(".")[:2])
    except ValueError:
        return  # a version of someone's own making: registration finds out
    if (major, minor) < _MIN_TORCH:
        raise ImportError(f"evermoe needs PyTorch 2.10 or newer, found {found}: {install}")


_check_torch()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from evermoe import _native  # noqa: E402

_native.register_ops()
torch_ops = torch.ops.evermoe


def check_rows(**named: object) -> None:
    """Raise where an argument is no tensor, or one without rows; the message names it."""
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            got = "one of no dimension" if isinstance(value, Tensor) else type(value).__name__
            raise RuntimeError(f"{name}: expected a tensor of one dimension or more, got {got}")


def refuse_grad(name: str, instead: str, *tensors: Tensor | None) -> None:
    """Raise where autograd would have to follow an op that writes into its arguments; the message says what to do."""
    if torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
        raise RuntimeError(f"{name} writes into its arguments and has no gradient: {instead}")
