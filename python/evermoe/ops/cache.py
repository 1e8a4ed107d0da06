"""The memory that the ops keep on the CPU, and what this build holds."""

from __future__ import annotations

from evermoe import _native


def has_cuda_kernels() -> bool:
    """Return whether this build of evermoe holds compiled CUDA kernels."""
    return _native.has_cuda_kernels()


def set_cpu_cache_limit(num_bytes: int | None) -> None:
    """Bound the memory that the ops keep for their next results on the CPU, and free what is beyond it.

    Fresh memory costs two to three copies of its bytes in page faults, so a large result (from 1 MiB) takes the memory
    of an earlier one that is gone, as on a GPU. Such a result cannot grow (`resize_`, `out=` of another shape) nor have
    its storage resized: clone it first, or set 0. Needs torch 2.11; before, the system's allocator serves alone.

    Args:
        num_bytes: 0 keeps none, and the system's allocator serves alone; None, as at the start, keeps as many as are in
            use at the peak from now on.

    Raises:
        OverflowError: a negative number.
    """
    _native.set_cpu_cache_limit(num_bytes)


def cpu_cache_bytes() -> int:
    """Bytes that the ops keep for their next results on the CPU, in addition to those in use."""
    return _native.cpu_cache_bytes()
