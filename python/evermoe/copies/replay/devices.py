"""Devices on which replicas repeat steps."""

from __future__ import annotations

import torch

from evermoe.ops.cache import has_cuda_kernels
from evermoe.presets import ReplayedCopies


def check_device(options: ReplayedCopies) -> None:
    """Check that this process can repeat steps on the device of the options.

    Raises:
        ValueError: it has no such GPU, or its build has no CUDA kernels.
    """
    name, device = options.replica_device, torch.device(options.replica_device)
    if device.type == "cuda" and not ((device.index or 0) < torch.cuda.device_count() and has_cuda_kernels()):
        raise ValueError(
            f"replica_device is {name!r}, but this process has no such GPU, or this build no CUDA kernels; use cpu"
        )
