"""Global batches of a data loader, divided among the members: for data without random access by index."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate, default_convert

from evermoe.data.batches import Reading, Way, describe, read
from evermoe.data.plain_state import from_json, to_json
from evermoe.data.reader_states import STATE_PERIOD, ReaderState, ReaderStates, packed, unpacked
from evermoe.data.sampler import Share, bounds
from evermoe.data.stateful import check_resumes, has_state
from evermoe.errors import UnsupportedState
from evermoe.options import checked
from evermoe.process.seeds import seeded_reading

logger = logging.getLogger(__name__)

_END = object()
_COUNTS = {"consumed": "consumed", "epoch": "_epoch", "taken": "_taken", "samples": "_samples"}
"""Attributes that say where the loader is, by their names in its state."""


class ElasticLoader:
    """Divides the global batches of an iterable among the members, such as a `DataLoader` over an `IterableDataset`.

    All members read the same global batches, and each keeps its part, which `with step as batch` yields.

    To resume, a loader with `state_dict` and `load_state_dict`, such as torchdata's `StatefulDataLoader`, continues
    from its latest state that the members have kept, and skips the few batches since by reading them. Any other loader
    is opened again and skips the samples of its epoch that were consumed. So is one whose state would lose samples,
    such as those in a shuffle buffer of Hugging Face datasets. Its batch size may have changed; the first batch is then
    cut where those samples end. Each epoch opens the loader again, after `set_epoch(epoch)` of the loader, its sampler
    and its data set, if they have that method.

    Each batch is read with the generators of `random`, NumPy and torch seeded from (seed, epoch, batch), and loader
    workers start with seeds from (seed, epoch). So all members shuffle and augment the same way, and reading a batch
    again yields the same batch.

        loader = torch.utils.data.DataLoader(stream, batch_size=64)
        session = evermoe.Session(model, optimizer, evermoe.ElasticLoader(loader))
        for step in session.steps(1000):
            with step as batch:
                step.backward(loss_of(batch))

    Args:
        loader: yields global batches. Tensors and NumPy arrays have one row per sample, lists and tuples one entry per
            sample, alone or in mappings, sequences, named tuples and dataclasses; all with the same number of samples.
            Numbers, strings, None and tensors without dimensions are shared by all samples. A list of tensors, such as
            those of `default_collate`, may consist of fields or of samples. The loader's batch size and `collate_fn`
            decide between these readings; a batch that still has two readings is refused. Each epoch begins with
            `iter(loader)`, and has the same batches on all members.
        seed: of the epochs.
        batch_size: samples of a global batch, if `loader.batch_size` does not give it.
        state_bytes: bytes kept on each member for the loader's state, compressed. Without one that fits, a process
            that resumes reads the batches of the job again.
    """

    def __init__(
        self, loader: Iterable[Any], *, seed: int = 0, batch_size: int | None = None, state_bytes: int = 64 << 10
    ) -> None:
        self._loader, self._seed = loader, checked("seed", seed, int)
        self._batch_size = checked("batch_size", batch_size, int | None, least=1) or _batch_size(loader)
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._taken = 0
        """The epoch, and the number of its batches that were consumed."""
        self._samples = 0
        """Samples of the epoch that were consumed."""
        self._skipped = 0
        """Those of them that are yet to be skipped by reading them."""
        self.proportions: Sequence[float] | None = None
        """As of `ElasticSampler`."""
        self.consumed = 0
        """Samples of all committed batches."""
        self._batch: tuple[Any, Reading] | None = None
        """The next batch, and its reading."""
        self._lists: dict[str, Way] = {}
        """Readings of lists in the batches so far, by their path."""
        nbytes = checked("state_bytes", state_bytes, int, least=64)
        self.states = ReaderStates(1, nbytes) if _resumes(loader) else None
        """The loader's state, which a session exchanges among the members; None without one."""
        self._first = None if self.states is None else self._state_at_start()
        self._noted = 0
        """Number in the job of the batch before which the loader's state was taken last."""

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
        """Return the part of `rank` among `size` members: contiguous, of equal sizes or in `proportions`."""
        batch, reading = self._read()
        length = _length(reading)
        if self.states is not None:
            self.states.owned = [0] if rank == 0 else []
        start, stop = bounds(length, rank, size, self.proportions)
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
        if self.states is not None:
            self.states.batch += 1

    @property
    def epoch(self) -> float:
        """Epochs consumed: 1.25 after a quarter of the second one. Without a length of the loader, complete epochs."""
        try:
            return self._epoch + min(1.0, self._taken / len(self._loader))  # type: ignore[arg-type]
        except (TypeError, NotImplementedError, ZeroDivisionError):
            return float(self._epoch)

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be the same on all members of a job."""
        found = {"loader": type(self._loader).__name__, "loader_seed": self._seed}
        return found | {"loader_batch_size": self._batch_size}

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume, without that of the loader."""
        self._read()
        found = {name: getattr(self, attribute) for name, attribute in _COUNTS.items()}
        found |= {"lists": dict(self._lists)} if self._lists else {}
        if self.states is None:
            return found
        return found | {"batches": self.states.batch, "exchange_at": self.states.exchange_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        is_there = self._batch is not None and all(getattr(self, each) == state[name] for name, each in _COUNTS.items())
        if self.states is not None:
            self.states.batch, self.states.exchange_at = state["batches"], state["exchange_at"]
        if is_there:
            return
        if self.states is not None:
            self.states.forget_own()
        self._iterator = None  # its worker processes end before others start
        self._batch, self._lists = None, dict(state.get("lists", {}))
        epoch, samples = state["epoch"], state["samples"]
        self._epoch, self._taken, self._samples = epoch, 0, 0
        if self.states is None:
            self._prepare()
        else:
            self._load_loader(self.states.latest(0, epoch, samples))
            self._noted = self.states.batch
        self._iterator = self._batches(self._taken)
        while self._epoch < epoch:
            for _ in self._iterator:
                pass
            self._iterator, self._epoch, self._samples = None, self._epoch + 1, 0
            self._iterator = self._open()
        self._skipped = samples - self._samples
        for name, attribute in _COUNTS.items():
            setattr(self, attribute, state[name])

    def _load_loader(self, state: ReaderState | None) -> None:
        """Put the loader to a place before the one that is wanted: that of a state, or its start."""
        place = self._first
        self._epoch = 0
        if state is not None:
            found = unpacked(state.data)
            self._epoch, self._samples, self._taken, place = state.epoch, state.number, found["taken"], found["loader"]
        self._prepare()
        if place is not None:
            self._loader.load_state_dict(place)  # type: ignore[attr-defined]

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
        return self._batches(0)

    def _state_at_start(self) -> Any:
        """Return the loader's state before its first batch; None if it has none yet."""
        with contextlib.suppress(Exception):  # loaders without a state before their first batch raise any exception
            return from_json(to_json(self._loader.state_dict()))  # type: ignore[attr-defined]
        return None

    def _batches(self, taken: int) -> Iterator[Any]:
        """Return the batches of the epoch from the loader's position on, each read with its own random seed."""
        with seeded_reading(self._seed, self._epoch):  # workers get their seeds here
            iterator = iter(self._loader)
        return _read_seeded(iterator, self._seed, self._epoch, taken)

    def _next(self) -> tuple[Any, Reading]:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = self._open()
            state = self._state_if_due()
            for batch in self._iterator:
                if state is not None and self.states is not None:  # the loader does not end here
                    self.states.add(0, state)
                    self._noted, state = self.states.batch, None
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

    def _state_if_due(self) -> ReaderState | None:
        """Return the loader's state before the next batch, if the latest one is some batches old."""
        if self.states is None or not self._taken or self.states.batch - self._noted < STATE_PERIOD:
            return None
        state = packed({"taken": self._taken, "loader": self._loader.state_dict()})  # type: ignore[attr-defined]
        return ReaderState(self._epoch, self._samples, state)

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
        with seeded_reading(seed, epoch, number):  # a sampler that shuffles gets its seed with the first
            batch = next(iterator, _END)
        if batch is _END:
            return
        yield batch


def _resumes(loader: Any) -> bool:
    """Return whether a loader has a state that describes its place."""
    try:
        check_resumes(loader)
    except UnsupportedState as error:
        logger.warning("a process that resumes reads the batches of the epoch again: %s", error)
        return False
    return has_state(loader)


def _length(reading: Reading) -> int:
    """Return the number of samples of a batch."""
    assert reading.length
    return reading.length


def _batch_size(loader: Any) -> int | None:
    """Return the batch size of a `DataLoader` or its batch sampler; None if unknown."""
    sizes = (getattr(each, "batch_size", None) for each in (loader, getattr(loader, "batch_sampler", None)))
    return next((size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 0), None)
