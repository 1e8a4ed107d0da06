"""Makes tensors of a recording: repeats the operations on which they depend, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from evermoe._native import digest
from evermoe.errors import UnsupportedState
from evermoe.state.recording import Operation, Recording, View, is_view, views_in

_EMPTY = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
_FILLED = ("aten::empty", "aten::zeros", "aten::ones", "aten::full", "aten::rand", "aten::randn")
"""Makers of tensors from a shape, each element independently."""
_COPIES = ("aten::clone", "aten::_to_copy")
_ELEMENTWISE = (
    *("aten::add_", "aten::sub_", "aten::mul_", "aten::div_", "aten::neg_", "aten::clamp_", "aten::clamp_min_"),
    *("aten::clamp_max_", "aten::erfinv_", "aten::fill_", "aten::zero_", "aten::copy_", "aten::uniform_"),
    *("aten::normal_", "aten::exponential_", "aten::bernoulli_"),
)
"""Operations in place that treat all elements the same way, so that a part of a tensor can be written alone."""


class Rebuild:
    """Repeats recorded operations on the CPU."""

    def __init__(self, recording: Recording, given: Mapping[int, torch.UntypedStorage] | None = None) -> None:
        self._recording = recording
        self._given = dict(given or {})
        self._memory: dict[int, torch.UntypedStorage] = dict(self._given)

    def value(self, tensor: Tensor) -> Tensor:
        """A tensor with memory and its values."""
        return self.values([View.of(tensor)])[0]

    @torch.no_grad()
    def values(self, wanted: Sequence[View]) -> list[Tensor]:
        """Tensors with memory and their values."""
        with own_random_numbers():
            for operation in self._recording.history([view.memory for view in wanted]):
                self._repeat(operation)
        return [self._tensor(view) for view in wanted]

    @torch.no_grad()
    def write_row(self, stack: View, row: int, out: Tensor) -> None:
        """Writes one row of a stack `[rows, length]` alone.

        Args:
            stack: contiguous.
            row: its number.
            out: `[length]` on the CPU, contiguous, of the stack's dtype.

        Raises:
            UnsupportedState: the rows do not come about each by itself.
        """
        rows, lengths = stack.shape[0], self._stacks(stack)

        def is_elsewhere(operation: Operation) -> bool:
            target = _written(operation, lengths)
            return target is not None and target.row(rows, lengths[target.memory], row)[0] is None

        with own_random_numbers():
            for operation in self._recording.history([stack.memory], is_elsewhere):
                if operation.writes & lengths.keys():
                    self._repeat_row(operation, rows, row, lengths)
                else:
                    self._repeat(operation)
        out.copy_(self._row_in(stack.memory, stack.dtype, stack.shape[1]))

    def _stacks(self, stack: View) -> dict[int, int]:
        """Elements in a row, of the stack and of other stacks of as many rows, from which its rows come one by one."""
        history = self._recording.history([stack.memory])
        by_row = [each for each in history if each.name in (*_FILLED, *_COPIES)]
        makers = {view.memory: view for each in by_row for view in each.results if view is not None}
        lengths = {stack.memory: stack.stride[0]}
        for operation in reversed(history):
            made = next((v for v in operation.results if v is not None and v.memory in lengths), None)
            target = _written(operation, lengths) if made is None else made
            if target is None or not target.row(stack.shape[0], lengths[target.memory], 0)[1]:
                continue
            for view in views_in((operation.args, operation.kwargs)):
                maker = makers.get(view.memory)
                is_stack = maker is not None and maker.shape[:1] == view.shape[:1] == target.shape[:1]
                if maker is not None and is_stack and maker.is_contiguous and len(view.shape) == len(target.shape):
                    lengths.setdefault(view.memory, maker.stride[0])
        return lengths

    def _row_in(self, memory: int, dtype: torch.dtype, length: int) -> Tensor:
        return View(memory, dtype, (length,), (1,), 0).on(self._memory[memory])

    def _repeat_row(self, operation: Operation, rows: int, row: int, lengths: Mapping[int, int]) -> None:
        made = next((view for view in operation.results if view is not None), None)
        if made is not None:
            source = operation.args[0]
            if operation.name in _FILLED and tuple(source) == made.shape:
                _seed(self._seed(operation, row))
                result = operation.run([1, *made.shape[1:]], *operation.args[1:], **operation.kwargs)
            elif operation.name in _COPIES and isinstance(source, View) and source.memory in lengths:
                memory = self._row_in(source.memory, source.dtype, lengths[source.memory])
                result = operation.run(memory, **{k: v for k, v in operation.kwargs.items() if k != "memory_format"})
            else:
                raise UnsupportedState(f"{operation.name} makes the weights of all experts of a layer together")
            self._memory[made.memory] = result.contiguous().untyped_storage()
            return
        target = _written(operation, lengths)
        spans = target is not None and target.row(rows, lengths[target.memory], row)[1]
        if target is None or (spans and operation.name not in _ELEMENTWISE):
            raise UnsupportedState(f"{operation.name} changes the weights of all experts of a layer together")

        def part(view: View) -> Tensor:
            if view.memory in lengths:
                own = view.row(rows, lengths[view.memory], row)[0]
                assert own is not None
                return self._tensor(own)
            tensor = self._tensor(view)
            is_stack = spans and len(view.shape) == len(target.shape) and view.shape[0] == rows
            return tensor[row] if is_stack else tensor

        _seed(self._seed(operation, row if spans else -1))
        args, kwargs = _mapped(part, (operation.args, operation.kwargs))
        operation.run(*args, **kwargs)

    def _repeat(self, operation: Operation) -> None:
        made = next((view for view in operation.results if view is not None), None)
        if made is not None and made.memory in self._given and operation.name in _EMPTY:
            return
        _seed(self._seed(operation))
        args, kwargs = _mapped(self._tensor, (operation.args, operation.kwargs))
        results = tree_flatten(operation.run(*args, **kwargs))[0]
        for view, result in zip(operation.results, results, strict=True):
            if view is not None:
                self._keep(view, result)

    def _keep(self, view: View, result: Tensor) -> None:
        if view.memory not in self._given:
            if (tuple(result.stride()), result.storage_offset()) == (view.stride, view.offset):
                self._memory[view.memory] = result.untyped_storage()
                return
            elements = view.offset + view._reach(0) if result.numel() else 0
            self._memory[view.memory] = torch.empty(elements, dtype=view.dtype).untyped_storage()
        self._tensor(view).copy_(result)

    def _tensor(self, view: View) -> Tensor:
        return view.on(self._memory[view.memory])

    def _seed(self, operation: Operation, row: int = -1) -> int | None:
        return seed_of(self._recording.seed, operation.draw, row) if operation.draw >= 0 else None


def _written(operation: Operation, memories: Collection[int]) -> View | None:
    """Where an operation in place writes to one of some memories."""
    places = operation.kwargs.get("out"), *operation.args[:1]
    targets = [each for each in places if isinstance(each, View) and each.memory in operation.writes]
    return targets[0] if targets and targets[0].memory in memories else None


def seed_of(*parts: object) -> int:
    """A seed of torch's generators that depends on all parts, the same everywhere."""
    return digest(np.frombuffer(repr(parts).encode(), np.uint8)) >> 1


@contextmanager
def own_random_numbers(seed: int = 0) -> Iterator[None]:
    """Seeds torch's generator of the CPU for the block alone."""
    with torch.random.fork_rng(devices=[]):
        _seed(seed)
        yield


def _seed(seed: int | None) -> None:
    if seed is not None:
        torch.default_generator.manual_seed(seed)


def _mapped(tensor: Callable[[View], Tensor], tree: Any) -> Any:
    return tree_map(lambda each: tensor(each) if is_view(each) else each, tree, is_leaf=is_view)
