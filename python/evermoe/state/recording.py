"""Origin of a model's tensors: recorded while it is built (`Building`), repeated for those that are wanted.

Every operation is recorded with the memory that it reads and writes; `Rebuild` repeats those on which a tensor depends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from evermoe.errors import UnsupportedState


class View(NamedTuple):
    """Location of a tensor: its memory, and its layout in it."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """The place of a tensor."""
        shape, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return cls(memory_of(tensor), tensor.dtype, shape, stride, offset)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are one after the other, from the start of its memory."""
        expected = torch.empty(self.shape, device="meta").stride()
        return not self.offset and tuple(expected) == self.stride

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor with this layout in other memory."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)

    def row(self, rows: int, length: int, row: int) -> tuple[View | None, bool]:
        """Its part in one row of a stack `[rows, length]`, as a view of that row alone, and whether it spans all rows.

        None: it is outside that row.

        Raises:
            UnsupportedState: it is neither inside one row nor the same part of all.
        """
        inside = self.offset % length
        if self.shape and self.shape[0] == rows and self.stride[0] == length and inside + self._reach(1) <= length:
            return View(self.memory, self.dtype, self.shape[1:], self.stride[1:], inside), True
        if inside + self._reach(0) <= length:
            return (self._replace(offset=inside) if self.offset // length == row else None), False
        raise UnsupportedState(f"a part {list(self.shape)} of a stack of {rows} experts is not the same part of each")

    def _reach(self, first: int) -> int:
        """Elements from its first to behind its last, in the dimensions from `first` on."""
        return 1 + sum((n - 1) * step for n, step in zip(self.shape[first:], self.stride[first:], strict=True))


class Operation(NamedTuple):
    """One recorded operation; tensors among its arguments are views."""

    run: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[View | None, ...]
    """Tensors in new memory that it makes; None for others."""
    reads: frozenset[int]
    writes: frozenset[int]
    draw: int
    """Number among those that draw random numbers; -1 for others."""

    @property
    def name(self) -> str:
        """Its name without the overload: `aten::uniform_`."""
        return str(self.run._schema.name)


def memory_of(tensor: Tensor) -> int:
    """Identity of a tensor's memory, as long as that exists."""
    return int(tensor.untyped_storage()._cdata)


class Recording:
    """Record of how tensors were made. See the module's head."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._operations: list[Operation] = []
        self._writers = defaultdict[int, list[int]](list)
        self._storages: dict[int, torch.UntypedStorage] = {}

    def knows(self, tensor: Tensor) -> bool:
        """Whether it has recorded how the tensor came about."""
        return memory_of(tensor) in self._storages

    def note_constant(self, tensor: Tensor) -> None:
        """Records a tensor that came from elsewhere, with its values now."""
        if not self.knows(tensor):
            self.keep(tensor)
            clone, view = torch.ops.aten.clone.default, View.of(tensor)
            writes = frozenset({view.memory})
            self.add(Operation(clone, (tensor.detach().clone(),), {}, (view,), frozenset(), writes, -1))

    def add(self, operation: Operation) -> None:
        """Records the latest operation."""
        for memory in operation.writes:
            self._writers[memory].append(len(self._operations))
        self._operations.append(operation)

    def keep(self, tensor: Tensor) -> None:
        """Keeps the memory of a tensor, so that no other memory is taken for it."""
        self._storages[memory_of(tensor)] = tensor.untyped_storage()

    def prune(self, wanted: Iterable[Tensor]) -> None:
        """Forgets what neither these nor any tensor without memory depends on."""
        bare = {key for key, storage in self._storages.items() if storage.device.type == "meta"}
        kept = self.history(bare | {memory_of(tensor) for tensor in wanted})
        self._operations, self._writers = [], defaultdict(list)
        for operation in kept:
            self.add(operation)
        self._storages = {key: storage for key, storage in self._storages.items() if key in self._writers}

    def history(self, wanted: Iterable[int], skips: Callable[[Operation], bool] = lambda _: False) -> list[Operation]:
        """The operations on which some memory depends, in order, without those that `skips`."""
        found, seen, left = set[int](), set[int](), list(wanted)
        while left:
            memory = left.pop()
            if memory in seen:
                continue
            seen.add(memory)
            for number in self._writers.get(memory, ()):
                if number not in found and not skips(self._operations[number]):
                    found.add(number)
                    left.extend(self._operations[number].reads)
        return [self._operations[number] for number in sorted(found)]


def views_in(tree: Any) -> list[View]:
    """All views in nested lists, tuples and dicts."""
    return [each for each in tree_flatten(tree, is_leaf=is_view)[0] if is_view(each)]


def is_view(each: object) -> bool:
    """Whether it is a view, which is a leaf of nested tuples and no tuple."""
    return isinstance(each, View)
