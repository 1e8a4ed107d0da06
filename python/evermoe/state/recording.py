"""How the tensors of a model come about: recorded while it is built, repeated later for those that are wanted.

While a `Recording` is entered, large tensors are made on the `meta` device: they have a shape and no memory. Small ones
are made as always, so that a constructor can read them. Every operation is recorded with the places that it reads and
writes; `Replay` repeats those on which a tensor depends. Each that draws random numbers has a seed of its own, so that
it draws the same wherever, whenever and beside whatever else it is repeated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from evermoe._native import digest
from evermoe.errors import UnsupportedState

LARGE = 1 << 14
"""Elements from which on a tensor has no memory while a model is built."""
_PLACES = ("device", "pin_memory", "generator")
"""Arguments of which a repetition takes no notice."""
_NOWHERE = torch.device("meta")
_EMPTY = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
_FILLED = ("aten::empty", "aten::zeros", "aten::ones", "aten::full", "aten::rand", "aten::randn")
"""Makers of tensors from a shape, each element independently."""
_COPIES = ("aten::clone", "aten::_to_copy")
_ELEMENTWISE = (
    *("aten::add_", "aten::sub_", "aten::mul_", "aten::div_", "aten::neg_", "aten::clamp_", "aten::clamp_min_"),
    *("aten::clamp_max_", "aten::erfinv_", "aten::fill_", "aten::zero_", "aten::copy_", "aten::uniform_"),
    *("aten::normal_", "aten::exponential_", "aten::bernoulli_"),
)
"""Operations in place that treat all elements alike, so that a part of a tensor can be written alone."""


class View(NamedTuple):
    """Where a tensor is: in which memory, and its layout there."""

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
    """What tells a tensor's memory from others, as long as it is there."""
    return int(tensor.untyped_storage()._cdata)


class Recording(TorchDispatchMode):
    """Records how tensors come about while it is entered. See the module's head.

    Args:
        seed: of all random numbers that a replay draws.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self._operations: list[Operation] = []
        self._writers = defaultdict[int, list[int]](list)
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._draws = 0

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor was made, or changed, while the recording was entered."""
        return memory_of(tensor) in self._storages

    def note_constant(self, tensor: Tensor) -> None:
        """Records a tensor that came from elsewhere, with its values now."""
        if not self.knows(tensor):
            self._storages[memory_of(tensor)] = tensor.untyped_storage()
            clone, view = torch.ops.aten.clone.default, View.of(tensor)
            writes = frozenset({view.memory})
            self._add(Operation(clone, (tensor.detach().clone(),), {}, (view,), frozenset(), writes, -1))

    def _add(self, operation: Operation) -> None:
        for memory in operation.writes:
            self._writers[memory].append(len(self._operations))
        self._operations.append(operation)

    def prune(self, wanted: Iterable[Tensor]) -> None:
        """Forgets what neither these nor any tensor without memory depends on."""
        bare = {key for key, storage in self._storages.items() if storage.device.type == "meta"}
        kept = self.history(bare | {memory_of(tensor) for tensor in wanted})
        self._operations, self._writers = [], defaultdict(list)
        for operation in kept:
            self._add(operation)
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

    # ---- while a model is built

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        changed = [memory_of(each) for each in _changed(func, args, kwargs)]
        for tensor in tensors:
            if not tensor.is_meta:
                self.note_constant(tensor)
        if any(each.is_meta for each in tensors):
            result = self._run_without_memory(func, args, kwargs)
        else:
            result = _make_large(func, args, kwargs) if _is_maker(func) else None
            result = func(*args, **kwargs) if result is None else result
        self._record(func, args, kwargs, result, changed)
        return result

    def _run_without_memory(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation some of whose tensors have no memory; what must know values gets them."""
        gives_tensors = any("Tensor" in str(each.type) for each in func._schema.returns)
        if gives_tensors and all(each.is_meta for each in _changed(func, args, kwargs)):
            try:
                return func(*tree_map(_bare, args), **_elsewhere(tree_map(_bare, kwargs)))
            except (NotImplementedError, RuntimeError):  # its shape depends on values
                pass
        known = self._with_values((args, kwargs))
        return func(*known[0], **known[1])

    def _with_values(self, tree: Any) -> Any:
        replay = Replay(self)
        return tree_map(lambda each: replay.value(each) if isinstance(each, Tensor) and each.is_meta else each, tree)

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any, changed: list[int]) -> None:
        made = [each if isinstance(each, Tensor) else None for each in tree_flatten(result)[0]]
        new = tuple(View.of(each) if each is not None and not self.knows(each) else None for each in made)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self._draws += draws
        if not changed and not any(new):
            return
        self._storages |= {memory_of(each): each.untyped_storage() for each in made if each is not None}
        kept = {key: value for key, value in kwargs.items() if key not in _PLACES}
        args, kept = tree_map(lambda each: View.of(each) if isinstance(each, Tensor) else each, (tuple(args), kept))
        reads = frozenset(each.memory for each in _views((args, kept)))
        writes = frozenset([*changed, *(each.memory for each in new if each is not None)])
        draw = self._draws if draws else -1
        self._add(Operation(func, args, kept, new, reads, writes, draw))


class Replay:
    """Repeats recorded operations on the CPU.

    Args:
        recording: of them.
        given: memory that is there already, to write to.
    """

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
        """Elements in a row, of the stack and of other stacks of so many rows from which its rows come one by one."""
        history = self._recording.history([stack.memory])
        by_row = [each for each in history if each.name in (*_FILLED, *_COPIES)]
        makers = {view.memory: view for each in by_row for view in each.results if view is not None}
        lengths = {stack.memory: stack.stride[0]}
        for operation in reversed(history):
            made = next((v for v in operation.results if v is not None and v.memory in lengths), None)
            target = _written(operation, lengths) if made is None else made
            if target is None or not target.row(stack.shape[0], lengths[target.memory], 0)[1]:
                continue
            for view in _views((operation.args, operation.kwargs)):
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


def _views(tree: Any) -> list[View]:
    return [each for each in tree_flatten(tree, is_leaf=_is_view)[0] if _is_view(each)]


def _mapped(tensor: Callable[[View], Tensor], tree: Any) -> Any:
    return tree_map(lambda each: tensor(each) if _is_view(each) else each, tree, is_leaf=_is_view)


def _is_view(each: object) -> bool:
    return isinstance(each, View)


def _bare(each: Any) -> Any:
    """A tensor of the same layout without memory."""
    if isinstance(each, Tensor) and not each.is_meta:
        return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
    return each


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]
    return found


def _elsewhere(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments for a tensor without memory."""
    kept = {key: value for key, value in kwargs.items() if key not in _PLACES}
    return kept | ({"device": _NOWHERE} if kwargs.get("device") is not None else {})


def _is_maker(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _make_large(func: Any, args: Any, kwargs: Any) -> Any:
    """What a maker of tensors makes, without memory; None if it is small, or not made so."""
    try:
        made = func(*args, **_elsewhere(kwargs) | {"device": _NOWHERE})
    except (NotImplementedError, RuntimeError, TypeError):
        return None
    return made if isinstance(made, Tensor) and made.numel() >= LARGE else None
