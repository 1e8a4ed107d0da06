"""Memory that is asked for in large pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evermoe.profile.memory import HUGE_PAGE_BYTES, in_huge_pages

MAPPINGS = Path("/proc/self/smaps")


def is_asked_for(address):
    """Return whether the kernel was asked to put the mapping of an address in large pages."""
    here = False
    for line in MAPPINGS.read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            here = begin <= address < end
        elif here and first == "VmFlags:":
            return "hg" in rest
    return False


@pytest.mark.parametrize("nbytes", [0, 1, HUGE_PAGE_BYTES - 1, 3 * HUGE_PAGE_BYTES + 5])
def test_a_tensor_of_any_size_is_usable(nbytes):
    tensor = in_huge_pages(torch.empty(nbytes, dtype=torch.uint8))
    tensor.fill_(7)
    assert bool((tensor == 7).all())


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no large pages")
def test_the_kernel_is_asked_for_complete_large_pages_only():
    plain, asked = (torch.empty(64 * HUGE_PAGE_BYTES, dtype=torch.uint8) for _ in range(2))
    in_huge_pages(asked)
    assert is_asked_for(asked.data_ptr() + asked.nbytes // 2)
    assert not is_asked_for(plain.data_ptr() + plain.nbytes // 2)
