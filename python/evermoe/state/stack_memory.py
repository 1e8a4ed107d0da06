"""Memory of stacks of experts on the host, in which experts come and go while the others' pages stay."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from evermoe.profile.memory import HUGE_PAGE_BYTES, in_huge_pages


class StackMemory:
    """Room for all rows that one stack can ever have: addresses alone, until a row is written.

    Pages that the system has not handed out yet must be cleared first, which takes longer than to copy as much. So a
    stack that gets more rows keeps its memory, and its storage has no more bytes than the rows that it has now.

    Raises:
        OSError: the system refuses so large a range of addresses.
    """

    def __init__(self, rows: int, row_bytes: int) -> None:
        self.nbytes = rows * row_bytes
        self.used_bytes = 0
        """Bytes of the stack now; what is after them may be given back."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._pages = mmap.mmap(-1, self.nbytes, flags=flags)
        pages = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._address = pages.data_ptr()
        in_huge_pages(pages)

    def has(self, stack: Tensor) -> bool:
        """Whether a stack begins here."""
        return stack.data_ptr() == self._address and stack.is_contiguous()

    def stack(self, rows: int, like: Tensor) -> Tensor:
        """The first rows, as a stack like another one."""
        if not rows:
            return like.new_empty((0, *like.shape[1:]))
        count = rows * like.shape[1:].numel()
        return torch.frombuffer(self._pages, dtype=like.dtype, count=count).view(rows, *like.shape[1:])

    def free_unused(self) -> None:
        """Gives the system back what comes after the stack, in large pages."""
        begin, advice = -(-self.used_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, getattr(mmap, "MADV_DONTNEED", None)
        if begin < self.nbytes and advice is not None:
            self._pages.madvise(advice, begin, self.nbytes - begin)


class StackMemories:
    """Memory of a rank's stacks, by any keys. On a GPU, whose allocator has pages at hand, stacks are made again."""

    def __init__(self) -> None:
        self._memories: dict[Hashable, StackMemory] = {}
        self._may_reserve = may_reserve()

    def restack(
        self,
        key: Hashable,
        old: Tensor,
        kept: Sequence[tuple[int, int]],
        rows: int,
        most: int,
        leaving: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """A stack with some rows of an old one, which is not to be used any more: both may be the same memory.

        Example, in one memory: of rows a, b, c the first leaves, and one comes before c: b, new, c, and behind them a.

        Args:
            key: of the stack.
            old: `[rows, length]`.
            kept: new and old numbers of the rows that stay; others are to be written.
            rows: of the new stack.
            most: rows that the stack can ever have.
            leaving: old numbers of rows that are to be retained until `free_unused`.

        Returns:
            The stack, and the rows that leave, on the host: behind it, or in memory of their own.
        """
        is_on_host = self._may_reserve and old.device.type == "cpu" and old.is_contiguous()
        memory = self._memory(key, old, most) if is_on_host else None
        if memory is None or not memory.has(old):
            left = [in_huge_pages(torch.empty(old.shape[1:], dtype=old.dtype)).copy_(old[row]) for row in leaving]
            new = in_huge_pages(old.new_empty((rows, *old.shape[1:]))) if memory is None else memory.stack(rows, old)
            for to, row in kept:
                new[to].copy_(old[row])
        else:
            ends = [rows + place for place in range(len(leaving))]
            every = memory.stack(max(len(old), rows + len(leaving)), old)
            _move(every, dict(zip(leaving, ends, strict=True)) | {row: to for to, row in kept})
            new, left = memory.stack(rows, old), [every[place] for place in ends]
        if memory is not None:
            memory.used_bytes = new.nbytes
            if not leaving:
                memory.free_unused()
        return new, left

    def free_unused(self) -> None:
        """Rows that have left are not needed any more."""
        for memory in self._memories.values():
            memory.free_unused()

    def release(self) -> None:
        """Lets go of all memory; stacks that are still used keep theirs."""
        self._memories.clear()

    def _memory(self, key: Hashable, old: Tensor, most: int) -> StackMemory | None:
        """Return the memory of the old stack if it is one of these, else another one; None if the system has none."""
        row_bytes = old.shape[1:].numel() * old.itemsize
        found = self._memories.get(key)
        if found is None or not found.has(old) or found.nbytes != most * row_bytes:
            self._memories.pop(key, None)
            try:
                found = self._memories[key] = StackMemory(most, row_bytes)
            except (OSError, ValueError):
                return None
        return found


def _move(rows: Tensor, moves: Mapping[int, int]) -> None:
    """Moves rows within their memory, each to a place of its own, of old to new number; others may be overwritten."""
    pending, aside = {row: to for row, to in moves.items() if row != to}, []
    while pending:
        row = next((row for row, to in pending.items() if to not in pending), None)
        if row is None:  # all are in each other's way
            row = next(iter(pending))
            aside.append((pending.pop(row), rows[row].clone()))
        else:
            rows[pending.pop(row)].copy_(rows[row])
    for to, data in aside:
        rows[to].copy_(data)


def may_reserve() -> bool:
    """Whether addresses are free: neither they nor what could be written there is limited."""
    try:
        is_strict = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        is_strict = False
    return not is_strict and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
