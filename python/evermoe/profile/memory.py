"""Free memory: its amount, its return to the system, and fast allocation."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
"""Size of a large page on x86-64, and on most ARM systems."""


def free_device_bytes(device: torch.device) -> int | None:
    """Return the GPU's memory that no process has reserved; None without a GPU.

    One call per step is enough: torch's allocator keeps reserved memory, so that this is the minimum of the step.
    """
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def free_host_bytes() -> int | None:
    """Return the host's memory that programs can get without swapping; None if the system does not report it."""
    try:
        with open("/proc/meminfo", "rb") as file:
            for line in file:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def share_of_host_bytes(nodes: Sequence[str], rank: int) -> int | None:
    """Return the equal share of free memory for each member of a rank's node.

    `nodes` lists the node of each rank.
    """
    free = free_host_bytes()
    return None if free is None else free // nodes.count(nodes[rank])


def return_freed_memory() -> None:
    """Return memory that this process has freed to the system, if the C library keeps it: glibc's `malloc_trim`.

    It visits all free pages, so call it only after rare events that free much memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def return_freed_memory_beside() -> None:
    """Call `return_freed_memory` in a separate thread, as it takes tens of milliseconds."""
    with suppress(RuntimeError):  # no thread can be started; the memory is returned later
        threading.Thread(target=return_freed_memory, name="evermoe-trim", daemon=True).start()


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Request large pages for the memory of a CPU tensor that is not written yet; return the tensor.

    If the system offers them on demand, allocation is faster, with fewer page faults; otherwise nothing changes.
    """
    begin = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    nbytes = (tensor.data_ptr() + tensor.nbytes - begin) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    advise, advice = getattr(ctypes.CDLL(None), "madvise", None), getattr(mmap, "MADV_HUGEPAGE", None)
    if tensor.device.type == "cpu" and nbytes > 0 and advise is not None and advice is not None:
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), advice)
    return tensor
