"""Global batches of a data loader, divided among the members: for data without random access by index."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate, default_convert

from evermoe.data.batches import Reading, Way, describe, read
from evermoe.data.plain_state import from_json, to_json
from evermoe.data.sampler import Share
from evermoe.options import checked
from evermoe.process.seeds import seeded

logger = logging.getLogger(__name__)

_END = object()
MAX_OPENED_BYTES = 4096
"""Maximum size as JSON of a loader's state at the start of an epoch that is kept through the epoch."""


class ElasticLoader:
    """Divides the global batches of an iterable among the members, such as a `DataLoader` over an `IterableDataset`.

    All members read the same global batches, and each keeps its part, which `with step as batch` yields.

    To resume, a loader with `state_dict` and `load_state_dict`, such as torchdata's `StatefulDataLoader`, continues
    from its state. Any other loader is opened again and skips the samples of its epoch that were consumed. Its batch
    size may have changed; the first batch is then cut where those samples end. Each epoch opens the loader again, after
    `set_epoch(epoch)` of the loader, its sampler and its data set, if they have that method.

    Each batch is read with the generators of `random`, NumPy and torch seeded from (seed, epoch, batch), and loader
    workers start with seeds from (seed, epoch). So all members shuffle and augment the same way, and reading a batch
    again yields the same batch.

        loader = torch.utils.data.DataLoader(stream, batch_size=64)
        session = evermoe.Session(model, optimizer, evermoe.ElasticLoader(loader))
        for step in session.steps(1000):
            with step as batch:
                step.backward(loss_of(batch))

    A loader's state that does not fit into the job's copies is omitted for the rest of its epoch, with a warning: to
    resume, the loader is opened as at the start of the epoch, and skips the consumed batches.

    Args:
        loader: yields global batches. Tensors and NumPy arrays have one row per sample, lists and tuples one entry per
            sample, alone or in mappings, sequences, named tuples and dataclasses; all with the same number of samples.
            Numbers, strings, None and tensors without dimensions are shared by all samples. A list of tensors, such as
            those of `default_collate`, may consist of fields or of samples. The loader's batch size and `collate_fn`
            decide between these readings; a batch that still has two readings is refused. Each epoch begins with
            `iter(loader)`, and has the same batches on all members.
        seed: of the epochs.
        batch_size: samples of a global batch, if `loader.batch_size` does not give it.
    """

    def __init__(self, loader: Iterable[Any], *, seed: int = 0, batch_size: int | None = None) -> None:
        self._loader, self._seed = loader, checked("seed", seed, int)
        self._batch_size = checked("batch_size", batch_size, int | None, least=1) or _batch_size(loader)
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._taken = 0
        """The epoch, and the number of its batches that were consumed."""
        self._samples = 0
        """Samples of the epoch that were consumed."""
        self._skipped = 0
        """Those of them that are yet to be skipped by reading them."""
        self.consumed = 0
        """Samples of all committed batches."""
        self._state: dict[str, Any] = {}
        """State before the next batch."""
        self._batch: tuple[Any, Reading] | None = None
        """The next batch, and its reading."""
        self._lists: dict[str, Way] = {}
        """Readings of lists in the batches so far, by their path."""
        self._opened: Any = None
        """The loader's state as JSON at the start of the epoch; None without one, or if it is large."""
        self._is_large = False
        """Whether the loader's state is omitted until the end of the epoch."""
        self._has_warned = False

    def batch(self) -> Any:
        """Return the next global batch; the same until `advance`.

        Raises:
            ValueError: the loader has no batch, or the batch has no reading, or more than one.
        """
        return self._read()[0]

    def _read(self) -> tuple[Any, Reading]:
        if self._batch is None:
            self._batch = self._next()
        return self._batch

    def share(self, rank: int, size: int) -> Share:
        """Return the part of `rank` among `size` members: contiguous, with sizes that differ by at most one."""
        batch, reading = self._read()
        length = _length(reading)
        start, stop = (length * r // size for r in (rank, rank + 1))
        weight = (stop - start) / length
        place = slice(start, stop) if stop > start else slice(1)
        numbers = torch.arange(self.consumed, self.consumed + length)[place]
        return Share(numbers, weight, reading.cut(batch, place), reading)

    def advance(self) -> None:
        """Count the batch as consumed: its step is committed."""
        length = _length(self._read()[1])
        self.consumed, self._samples = self.consumed + length, self._samples + length
        self._taken += 1
        self._batch = None

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be the same on all members of a job."""
        found = {"loader": type(self._loader).__name__, "loader_seed": self._seed}
        return found | {"loader_batch_size": self._batch_size}

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume."""
        self._read()
        return dict(self._state)

    def shorten(self) -> None:
        """Omit the loader's own state from `state_dict`, from this batch to the end of the epoch."""
        if "loader" not in self._state:
            return
        nbytes = _nbytes(self._state.pop("loader"))
        self._is_large = self._state["is_large"] = True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the loader's state_dict() takes %d bytes as JSON, too many to be kept with each step: a process that "
                "resumes opens the loader as at the start of the epoch, and skips the consumed batches by reading them",
                nbytes,
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        if self._state and all(state[name] == self._state[name] for name in ("consumed", "epoch", "taken")):
            return  # already at that batch
        self._epoch, self._taken, self.consumed = (int(state[name]) for name in ("epoch", "taken", "consumed"))
        self._samples, self._skipped = int(state["samples"]), 0
        self._iterator = None  # its worker processes end before others start
        self._lists, self._opened = dict(state.get("lists", {})), state.get("opened")
        self._is_large, self._batch, self._state = state.get("is_large", False), None, {}
        self._prepare()
        place = state.get("loader", self._opened) if self._is_stateful else None
        if place is not None:
            self._loader.load_state_dict(from_json(place))  # type: ignore[attr-defined]
        if place is not None and "loader" in state:
            self._iterator = self._batches(self._taken)
        else:
            self._iterator, self._skipped = self._batches(0), self._samples

    @property
    def _is_stateful(self) -> bool:
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    def _prepare(self) -> None:
        """Set the epoch of the loader and its parts, and seed their generators."""
        loader: Any = self._loader
        parts = [loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)
        seed = (self._seed * 1_000_003 + self._epoch) % 2**63
        for generator in {id(part): part for part in (getattr(each, "generator", None) for each in parts)}.values():
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)

    def _open(self) -> Iterator[Any]:
        """Open the loader, and return the batches of the epoch."""
        self._prepare()
        ended = self._loader_state() if self.consumed else None  # before the first batch it may have no state
        iterator = self._batches(0)
        self._is_large, self._opened = False, self._state_at_start(ended)
        return iterator

    def _loader_state(self) -> Any:
        """Return the loader's own state as JSON; None without one."""
        return to_json(self._loader.state_dict()) if self._is_stateful else None  # type: ignore[attr-defined]

    def _state_at_start(self, ended: Any) -> Any:
        """Return the loader's state at the start of the epoch, if it differs from that at the previous end; else None.

        A loader whose `__iter__` is a generator has no state yet, or still the previous one.
        """
        found = None
        with contextlib.suppress(Exception):  # loaders without a state before their first batch raise any exception
            found = self._loader_state()
        return None if found == ended or _nbytes(found) > MAX_OPENED_BYTES else found

    def _batches(self, taken: int) -> Iterator[Any]:
        """Return the batches of the epoch from the loader's position on, each read with its own random seed."""
        with seeded(self._seed, self._epoch):  # workers get their seeds here
            iterator = iter(self._loader)
        return _read_seeded(iterator, self._seed, self._epoch, taken)

    def _next(self) -> tuple[Any, Reading]:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = self._open()
            self._state = self._state_now()
            for batch in self._iterator:
                reading = self._reading(batch)
                self._lists |= reading.lists
                skipped, self._skipped = self._skipped, max(0, self._skipped - _length(reading))
                if skipped < _length(reading):
                    return self._without(skipped, batch, reading) if skipped else (batch, reading)
            if not self._taken:
                break
            self._iterator, self._epoch, self._taken = None, self._epoch + 1, 0
            self._samples = self._skipped = 0
        raise ValueError(f"ElasticLoader: expected at least one batch in epoch {self._epoch}, the loader has none")

    def _without(self, skipped: int, batch: Any, reading: Reading) -> tuple[Any, Reading]:
        """Return a batch without its first samples; the loader's batches had another size when these were consumed."""
        rest = reading.cut(batch, slice(skipped, None))
        return rest, self._reading(rest)

    def _state_now(self) -> dict[str, Any]:
        """Return the state before the next batch is read."""
        state: dict[str, Any] = {"consumed": self.consumed, "epoch": self._epoch, "taken": self._taken}
        state["samples"] = self._samples
        if self._lists:
            state["lists"] = dict(self._lists)
        if self._opened is not None:
            state["opened"] = self._opened
        if self._is_large:
            state["is_large"] = True
        elif self._taken and self._is_stateful:
            state["loader"] = self._loader_state()
        return state

    def _reading(self, batch: Any) -> Reading:
        has_fields = getattr(self._loader, "collate_fn", None) in (default_collate, default_convert)
        try:
            reading = read(batch, size=self._batch_size, known=self._lists, has_fields=has_fields)
            if not reading.length:
                raise ValueError(f"expected a batch with samples, got {describe(batch)}")
        except ValueError as error:
            raise ValueError(f"ElasticLoader: batch {self._taken} of epoch {self._epoch}: {error}") from None
        return reading


def _read_seeded(iterator: Iterator[Any], seed: int, epoch: int, taken: int) -> Iterator[Any]:
    """Yield batches from number `taken` on, each read with its own random seed.

    It holds no reference to the `ElasticLoader`: in a reference cycle, torch's iterator with its worker processes would
    live until a garbage collection, which may run in a process that was forked meanwhile.
    """
    for number in itertools.count(taken):
        with seeded(seed, epoch, number):  # a sampler that shuffles gets its seed with the first
            batch = next(iterator, _END)
        if batch is _END:
            return
        yield batch


def _length(reading: Reading) -> int:
    """Return the number of samples of a batch."""
    assert reading.length
    return reading.length


def _batch_size(loader: Any) -> int | None:
    """Return the batch size of a `DataLoader` or its batch sampler; None if unknown."""
    sizes = (getattr(each, "batch_size", None) for each in (loader, getattr(loader, "batch_sampler", None)))
    return next((size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 0), None)


def _nbytes(state: Any) -> int:
    """Return the bytes of a state as JSON; 0 if JSON cannot represent it, which the code that stores it reports."""
    try:
        return len(json.dumps(state))
    except TypeError:
        return 0
