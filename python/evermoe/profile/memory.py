"""How much memory is free, what gives it back, and what takes it quickly."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
"""Of a large page on x86-64, and on most ARM systems."""


def free_device_bytes(device: torch.device) -> int | None:
    """Memory of the GPU that no process has taken; None without one.

    Once a step is enough: torch's allocator keeps what it has taken, so that this is also the lowest of the step.
    """
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def free_host_bytes() -> int | None:
    """Memory of the host that programs can get without swapping; None where the system does not say."""
    try:
        with open("/proc/meminfo", "rb") as file:
            for line in file:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def share_of_host_bytes(nodes: Sequence[str], rank: int) -> int | None:
    """What each member of a rank's node may take of the memory that is free there: as much as the others.

    `nodes` are by rank.
    """
    free = free_host_bytes()
    return None if free is None else free // nodes.count(nodes[rank])


def return_freed_memory() -> None:
    """Gives the system back what this process has freed, where the C library keeps it for later: glibc's `malloc_trim`.

    It looks at all pages that are free, so it is for rare events after which much is.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def return_freed_memory_beside() -> None:
    """As `return_freed_memory`, in a thread of its own, as it takes tens of milliseconds."""
    with suppress(RuntimeError):  # no thread can be started: then the memory stays for later
        threading.Thread(target=return_freed_memory, name="evermoe-trim", daemon=True).start()


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Asks for large pages for the memory of a tensor on the CPU that is still to be written; returns the tensor.

    Where the system has them on demand, memory is taken faster, with fewer page faults; elsewhere nothing changes.
    """
    begin = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    nbytes = (tensor.data_ptr() + tensor.nbytes - begin) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    advise, advice = getattr(ctypes.CDLL(None), "madvise", None), getattr(mmap, "MADV_HUGEPAGE", None)
    if tensor.device.type == "cpu" and nbytes > 0 and advise is not None and advice is not None:
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), advice)
    return tensor
