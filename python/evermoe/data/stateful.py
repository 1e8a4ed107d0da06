"""Iterables that are made of others, with a state from which they continue exactly.

Why such a state is not made of buffers: a shuffle buffer or the rest of a document may be large, and a job keeps the
states of all readers on every member. So a state names a place in the source and the number of items read since. To
continue, these few items are read again.
"""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from evermoe.errors import UnsupportedState
from evermoe.process.seeds import preserved, seed_all

END = object()
"""Returned instead of an item where there is none left."""
FAILED = object()
"""Returned instead of an item that has raised and is left out."""

OnError = Callable[[int, Exception], None]
"""Called with the number of an item that is left out, and what it has raised."""


def check_resumes(items: Any) -> None:
    """Check that the state of an iterable describes its place, as far as that can be seen.

    Raises:
        UnsupportedState: the state would lose samples: it is a stream of Hugging Face datasets with a shuffle buffer,
            or one of which each reader keeps every n-th example; a `StatefulDataLoader` of data without a state; or its
            `state_dict` needs arguments.
    """
    if not has_state(items):
        return  # it is read again from its start
    if _needs_arguments(items.state_dict):
        raise UnsupportedState(
            f"state_dict() of {type(items).__name__} needs arguments, so its state does not describe its own place: "
            "expected state_dict() and load_state_dict(state) as torchdata defines them. Read a StreamingDataset of "
            "mosaicml-streaming by index: torch.utils.data.Subset(dataset, range(start, stop))"
        )
    data = getattr(items, "dataset", None)
    for part in (items, data):
        if hasattr(part, "_ex_iterable"):
            _check_stream(part)
    is_stateless = isinstance(data, IterableDataset) and not has_state(data)
    if type(items).__name__ == "StatefulDataLoader" and is_stateless:
        raise UnsupportedState(
            "torchdata's StatefulDataLoader counts items twice when it resumes data without a state, and would skip "
            f"some. Give {type(data).__name__} state_dict() and load_state_dict(), or use torch's DataLoader, which is "
            "read again from the start of its epoch"
        )


def _needs_arguments(function: Callable[..., Any]) -> bool:
    given = inspect.signature(function).parameters.values()
    return any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in given)


def _check_stream(stream: Any) -> None:
    """Check a stream of Hugging Face datasets."""
    split, shards = stream._distributed, stream._ex_iterable.num_shards
    if split is not None and _reads_all(split, shards):
        raise UnsupportedState(
            f"split_dataset_by_node has each of {split.world_size} readers read all {shards} shards and keep every n-th"
            " example, and such readers share one state. Give it strategy='shards', and at most as many readers as "
            "shards; dataset.reshard() may make more shards"
        )
    nodes = [stream._ex_iterable]
    for node in nodes:  # which grows
        if type(node).__name__ == "BufferShuffledExamplesIterable" and node.buffer_size > 1:
            raise UnsupportedState(
                f"the state of this {type(stream).__name__} of datasets omits its shuffle buffer of {node.buffer_size} "
                "examples, which would be skipped when a reader moves to another member. Use shuffle(buffer_size=1) to "
                "shuffle the shards, and evermoe.data.Shuffled(dataset, buffer_size) for the examples"
            )
        nodes += [node.ex_iterable] if hasattr(node, "ex_iterable") else getattr(node, "ex_iterables", [])


def _reads_all(split: Any, shards: int) -> bool:
    return bool(split.strategy == "examples" or (split.strategy == "auto" and shards % split.world_size))


class Source:
    """The items of an iterable, from a position on.

    An iterable with `state_dict` and `load_state_dict` continues from its last marked state, one with access by index
    from the item's index, and any other from its start. Each item is read with the global generators of `random`, NumPy
    and torch seeded from its number, so that it is the same when it is read again.

    Raises:
        UnsupportedState: the iterable's state does not describe its place.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        if not isinstance(items, Iterable) and not _has_indices(items):
            raise ValueError(f"expected an iterable of items, got {type(items).__name__}")
        check_resumes(items)
        self.items: Any = items
        """The iterable."""
        self.has_state = has_state(items)
        """Whether it can describe its place and continue from it."""
        self._iterator: Iterator[Any] | None = None
        """None where no item is left."""
        self._seed = self._number = 0
        """Number of items read since the beginning."""
        self._mark: tuple[int, Any] = (0, None)
        """A number of items, and the state of the iterable after them; None for the beginning."""
        self._beginning: Any = None
        """The state of the iterable before another one was loaded."""
        self._on_error: OnError | None = None
        """Called with items that are left out; None to leave out none."""
        self._has_failed = False
        """Whether the item before the next one has raised."""

    def skip_errors(self, on_error: OnError) -> None:
        """Leave out items that raise an exception, also of the sources of which the items are made."""
        self._on_error = on_error
        for source in self.items._sources if isinstance(self.items, Stateful) else ():
            source.skip_errors(on_error)

    def open(self, seed: int, *, epoch: int, position: Mapping[str, Any] | None = None) -> None:
        """Begin an epoch, or continue from a position in it.

        Args:
            seed: of the items.
            epoch: passed to `set_epoch` of the iterable and of its `dataset`, if they have it.
            position: what `position` has returned.
        """
        self._seed, self._mark, number = seed, (0, None), 0
        if position is not None:
            number, self._mark = position["number"], (position["at"], position["state"])
        self._number, state = self._mark
        self._has_failed = False
        if state is not None or self._beginning is not None:
            self._load(state)
        parts: tuple[Any, ...] = (self.items, getattr(self.items, "dataset", None))
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        seed_all(seed)
        if position is not None and position["is_over"]:
            self._iterator, self._number = None, number
            return
        self._iterator = self._from(0) if self._has_indices else iter(self.items)
        if not self.skip_to(number):
            raise ValueError(
                f"expected the {number} items that {type(self.items).__name__} had before, and it has "
                f"{self._number}: an iterable must yield the same items in the same order when it is read again"
            )

    def _load(self, state: Any) -> None:
        if self._beginning is None:
            self._beginning = copy.deepcopy(self.items.state_dict())
        self.items.load_state_dict(copy.deepcopy(self._beginning if state is None else state))

    def _from(self, number: int) -> Iterator[Any]:
        return (self.items[index] for index in range(number, len(self.items)))

    def skip_to(self, number: int) -> bool:
        """Leave out the items before that of a number; return whether the iterable has that many."""
        if self._has_indices and number > self._number:
            self._number, self._iterator = min(number, len(self.items)), self._from(number)
        while self._number < number and self.next_or_failed() is not END:
            pass
        return self._number >= number

    def next(self) -> Any:
        """Return the next item that is not left out, or `END`."""
        while (item := self.next_or_failed()) is FAILED:
            pass
        return item

    def next_or_failed(self) -> Any:
        """Return the next item, `FAILED` for one that is left out, or `END`.

        Raises:
            RuntimeError: the iterator has ended at an item that was left out, and may have lost those after it.
        """
        if self._iterator is None:
            return END
        if not isinstance(self.items, Stateful):  # which does so for its own items
            seed_all(self._seed, self._number)
        try:
            item = next(self._iterator, END)
        except UnsupportedState:
            raise
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(self._number, error)
            item = FAILED
        if item is END:
            self._check_end()
            self._iterator = None
            return END
        self._number, self._has_failed = self._number + 1, item is FAILED
        if item is FAILED and self._has_indices:
            self._iterator = self._from(self._number)
        return item

    @property
    def _has_indices(self) -> bool:
        """Whether items are read by their indices."""
        return not self.has_state and _has_indices(self.items)

    def _check_end(self) -> None:
        continues = self._has_indices or isinstance(self._iterator, map)
        if self._has_failed and not continues:
            raise RuntimeError(
                f"the iterator of {type(self.items).__name__} has ended with item {self._number - 1}, which has "
                "raised an exception, and may have lost all items after it, as a generator does. To leave such items "
                "out, return data with access by index, map(function, items), or an iterator whose __next__ continues"
            )

    @property
    def number(self) -> int:
        """Number of items read since the beginning."""
        return self._number

    @property
    def is_over(self) -> bool:
        """Whether it is known that no item is left."""
        return self._iterator is None

    def mark(self) -> None:
        """Note the state of the iterable, so that the items before it need not be read again."""
        if self.has_state and self._iterator is not None and self._number > self._mark[0]:
            self._mark = self._number, copy.deepcopy(self.items.state_dict())

    def position(self, back: int = 0) -> dict[str, Any]:
        """Return the position before the items that were read last.

        Args:
            back: number of these items, which were read since the last mark.
        """
        at, state = self._mark
        is_over = self._iterator is None and not back
        return {"number": self._number - back, "at": at, "state": state, "is_over": is_over}


def has_state(items: Any) -> bool:
    """Return whether an iterable can describe its place and continue from it."""
    return hasattr(items, "state_dict") and hasattr(items, "load_state_dict")


def parts_with_a_place(items: Any) -> Iterator[Any]:
    """Yield the objects that keep a place in the items: iterators, and what has a state, through all layers."""
    if has_state(items) or isinstance(items, Iterator):
        yield items
    if has_state(items) and has_state(data := getattr(items, "dataset", None)):  # which it may restore from its own
        yield data
    for source in items._sources if isinstance(items, Stateful) else ():
        yield from parts_with_a_place(source.items)


def shared_part(parts: Iterable[Any]) -> Any:
    """Return an object that comes twice; None without one."""
    known: dict[int, Any] = {}  # which keeps them, so that their ids stay theirs
    for part in parts:
        if id(part) in known:
            return part
        known[id(part)] = part
    return None


def _has_indices(items: Any) -> bool:
    if isinstance(items, Mapping | IterableDataset):  # which inherits a `__getitem__` that raises
        return False
    return hasattr(items, "__getitem__") and hasattr(items, "__len__")


class Stateful(IterableDataset[Any]):
    """An iterable over the items of sources, whose state describes its place exactly.

    `state_dict()` describes the place after the item that was yielded last; after `load_state_dict(state)`, `iter()`
    yields the others of the epoch. Each epoch begins with `iter()`, after `set_epoch(epoch)`. What is drawn in it
    follows from torch's global generator at its beginning, as in a `DataLoader` that shuffles.
    """

    def __init__(self, sources: Sequence[Iterable[Any]]) -> None:
        self._sources = [Source(each) for each in sources]
        self._epoch = self._seed = self._number = 0
        """Epoch, its seed, and the number of its items that were yielded."""
        self._loaded: Mapping[str, Any] | None = None
        """State from which the next iterator begins."""
        self._has_begun = False
        parts = [part for source in self._sources for part in parts_with_a_place(source.items)]
        if (shared := shared_part(parts)) is not None:
            raise ValueError(
                f"expected sources that are objects of their own, got the same {type(shared).__name__} twice: it has "
                "one state, from which only one of them could continue. Make it once for each, or copy it by "
                "copy.deepcopy"
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that begins with the next `iter()`, also of the sources."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last item: numbers, and states of the sources."""
        if self._loaded is not None:
            return dict(self._loaded)
        if not self._has_begun:
            return {"epoch": self._epoch}
        return {"epoch": self._epoch, "seed": self._seed, "number": self._number, "place": self._place()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `iter()` continue where `state` was taken."""
        self._loaded, self._epoch = state, state["epoch"]

    def __iter__(self) -> Iterator[Any]:
        state, self._loaded = self._loaded or {}, None
        self._seed = state["seed"] if "seed" in state else int(torch.randint(2**62, ()))
        self._number = state.get("number", 0)
        with preserved():
            self._begin(state.get("place"))
        self._has_begun = True
        return self._yielded()

    def _yielded(self) -> Iterator[Any]:
        while True:
            with preserved():
                item = self._next()
                seed_all(self._seed, self._number, 1)  # for code around it, however far ahead it has read
            if item is END:
                return
            self._number += 1
            yield item

    @abstractmethod
    def _begin(self, place: Any) -> None:
        """Open the sources for the epoch: at a place, or at the beginning for None."""

    @abstractmethod
    def _next(self) -> Any:
        """Return the next item, or `END`."""

    @abstractmethod
    def _place(self) -> Any:
        """Return the place after the item that was returned last."""
