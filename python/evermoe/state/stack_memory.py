"""Memory of stacks of experts on the host, in which experts come and go while the others' pages stay."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Hashable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from evermoe.profile.memory import HUGE_PAGE_BYTES, in_huge_pages


class StackMemory:
    """Room for all rows that one stack can ever have: addresses alone, until a row is written.

    Pages that the system has not handed out yet must be cleared first, which takes longer than to copy as much. So a
    stack that gets more rows keeps its memory, and its storage has no more bytes than the rows that it has now.

    Args:
        rows: the most.
        row_bytes: of each.

    Raises:
        OSError: the system refuses so many addresses.
    """

    def __init__(self, rows: int, row_bytes: int) -> None:
        self.nbytes = rows * row_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._pages = mmap.mmap(-1, self.nbytes, flags=flags)
        whole = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._address = whole.data_ptr()
        in_huge_pages(whole)

    def has(self, stack: Tensor) -> bool:
        """Whether a stack begins here."""
        return stack.data_ptr() == self._address and stack.is_contiguous()

    def stack(self, rows: int, like: Tensor) -> Tensor:
        """The first rows, as a stack like another one."""
        if not rows:
            return like.new_empty((0, *like.shape[1:]))
        count = rows * like.shape[1:].numel()
        return torch.frombuffer(self._pages, dtype=like.dtype, count=count).view(rows, *like.shape[1:])

    def free_after(self, nbytes: int) -> None:
        """Gives the system back what comes after so many bytes, in large pages."""
        begin, advice = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, getattr(mmap, "MADV_DONTNEED", None)
        if begin < self.nbytes and advice is not None:
            self._pages.madvise(advice, begin, self.nbytes - begin)


class StackMemories:
    """The memory of a rank's stacks, by any keys. On a GPU, whose allocator has pages at hand, stacks are made anew."""

    def __init__(self) -> None:
        self._memories: dict[Hashable, StackMemory] = {}
        self._may_reserve = may_reserve()

    def restack(self, key: Hashable, old: Tensor, kept: Sequence[tuple[int, int]], rows: int, most: int) -> Tensor:
        """A stack with some rows of an old one, which is not to be used any more: both may be the same memory.

        Args:
            key: of the stack.
            old: `[rows, length]`.
            kept: new and old numbers of the rows that stay, the new ones ascending; others are to be written.
            rows: of the new stack.
            most: rows that the stack can ever have.
        """
        if any(row > later for (_, row), (_, later) in pairwise(kept)):  # they would be in each other's way
            self._memories.pop(key, None)
        is_on_host = self._may_reserve and old.device.type == "cpu" and old.is_contiguous()
        memory = self._memory(key, old, most) if is_on_host else None
        new = in_huge_pages(old.new_empty((rows, *old.shape[1:]))) if memory is None else memory.stack(rows, old)
        # In one memory, what moves to the front goes first, and what moves to the back begins with the last.
        to_front, to_back = [each for each in kept if each[0] < each[1]], [each for each in kept if each[0] >= each[1]]
        for to, row in (*to_front, *reversed(to_back)):
            if new[to].data_ptr() != old[row].data_ptr():
                new[to].copy_(old[row])
        if memory is not None:
            memory.free_after(new.nbytes)
        return new

    def release(self) -> None:
        """Lets go of all memory; stacks that are still used keep theirs."""
        self._memories.clear()

    def _memory(self, key: Hashable, old: Tensor, most: int) -> StackMemory | None:
        """That of the old stack if it is one of these, or else another one; None if the system has none."""
        row_bytes = old.shape[1:].numel() * old.itemsize
        found = self._memories.get(key)
        if found is None or not found.has(old) or found.nbytes != most * row_bytes:
            self._memories.pop(key, None)
            try:
                found = self._memories[key] = StackMemory(most, row_bytes)
            except (OSError, ValueError):
                return None
        return found


def may_reserve() -> bool:
    """Whether addresses are free: neither they nor what could be written there is limited."""
    try:
        is_strict = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        is_strict = False
    return not is_strict and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
