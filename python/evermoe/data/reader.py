"""Readers: the parts into which the data of a job is divided."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from evermoe.data.reader_states import SMALL_STATE, STATE_PERIOD, ReaderState, packed, unpacked
from evermoe.data.stateful import END, FAILED, Source, parts_with_a_place, shared_part
from evermoe.errors import UnsupportedState
from evermoe.process.seeds import seed_all

OpenReader = Callable[[int, int], Iterable[Any]]
"""Opens a reader: gets its number and that of all readers, and returns its samples in an order of their own."""


class SampleFailure(NamedTuple):
    """A sample of a reader, or an item of which it makes samples, that is left out."""

    number: int
    """Number of the sample in the epoch of the reader, or of the item in its source."""
    reason: str
    """Class and message of what it has raised."""


class ReaderPart(NamedTuple):
    """Samples of one reader for a global batch."""

    reader: int
    samples: dict[int, Any]
    """By their numbers in the reader."""
    missing: int
    """Samples that it should have given: it has no more in this epoch, or they are left out."""
    has_more: bool
    """Whether it has another sample in this epoch."""
    state: ReaderState | None
    """Its state after these samples, every `STATE_PERIOD` batches."""
    failures: list[SampleFailure]
    """Samples and items that are left out."""


class Batch(NamedTuple):
    """A place in an epoch: the samples of one global batch."""

    start: int
    """Number in the epoch of the first sample."""
    size: int
    number: int
    """Number of the batch in the job."""

    def place_of(self, reader: int, readers: int) -> range:
        """Return the samples of a reader, by their numbers in the reader.

        Sample j of an epoch is that of reader j modulo the number of readers.

        >>> [Batch(6, 4, 0).place_of(reader, 3) for reader in range(3)]
        [range(2, 4), range(2, 3), range(2, 3)]
        """
        first, last = (-((reader - at) // readers) for at in (self.start, self.start + self.size))
        return range(first, last)

    @property
    def next(self) -> Batch:
        """The batch after this one in the same epoch."""
        return Batch(self.start + self.size, self.size, self.number + 1)

    def keeps_state_of(self, reader: int) -> bool:
        """Return whether a reader's state is taken after it: those of some readers in each batch."""
        return (self.number + 1 + reader) % STATE_PERIOD == 0


class ReaderSettings(NamedTuple):
    """Settings that all readers of a job share."""

    open_reader: OpenReader
    readers: int
    seed: int
    skips_errors: bool
    """Whether samples that raise an exception are left out."""

    def check_makes_new(self, number: int, items: Any) -> None:
        """Check that a reader that is opened again begins at its start, and not where `items`, opened before, is.

        Raises:
            ValueError: `open_reader` returns an object that it has returned before, or makes its iterable of one.
        """
        opened = items, self.open_reader(number, self.readers)
        shared = shared_part(part for each in opened for part in parts_with_a_place(each))
        if shared is not None:
            raise ValueError(
                f"expected open_reader to return a new iterable in each call, got the same {type(shared).__name__} "
                f"twice for reader {number}: a reader that is opened again would begin where the other one is, and "
                "lose samples. Make the iterable, and what it is made of, inside open_reader, or copy it by "
                "copy.deepcopy"
            )


class Reader:
    """One part of the data in one epoch, from a sample on.

    The global random generators are seeded for opening it and for each sample.

    Args:
        settings: of all readers.
        number: of this one.
        epoch: of its samples.
        start: number of the first sample to return.
        state: not after that sample; None to read all samples before it and drop them.

    Raises:
        UnsupportedState: the state of its iterable does not describe its place.
        RuntimeError: a sample has raised an exception; the message names it.
    """

    def __init__(
        self, settings: ReaderSettings, number: int, epoch: int, start: int, state: ReaderState | None
    ) -> None:
        self.number, self.epoch = number, epoch
        self.position = start
        """Number of the next sample to return."""
        self._ahead: deque[Any] = deque()
        """Samples that were read and are not returned yet."""
        self._last: list[Any] = []
        """Samples that were returned last, and `FAILED` for those that are left out."""
        self._skips_errors = settings.skips_errors
        self._failures: dict[int, list[SampleFailure]] = {}
        """Samples and items that were left out, by the number of the sample with which they are reported."""
        self._new: list[SampleFailure] = []
        """Those since the last sample."""
        self.state_bytes = 0
        """Bytes of the state that was taken last."""
        seed = hash((settings.seed, epoch, number)) % 2**62
        seed_all(seed)
        self._source = Source(settings.open_reader(number, settings.readers))
        if self._skips_errors:
            self._source.skip_errors(lambda item, error: self._new.append(SampleFailure(item, _reason(error))))
        with self._naming():
            self._source.open(seed, epoch=epoch, position=None if state is None else unpacked(state.data))
            self._source.skip_to(start)
        if start:
            self._new.clear()  # they were reported with the samples before

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Name the sample that raises an exception."""
        try:
            yield
        except UnsupportedState:
            raise
        except Exception as error:
            hint = "" if self._skips_errors else ". ElasticReaders(on_error='skip') leaves out samples that raise"
            raise RuntimeError(
                f"sample {self._source.number} of reader {self.number} in epoch {self.epoch} has raised "
                f"{_reason(error)}{hint}"
            ) from error

    @property
    def items(self) -> Any:
        """Its iterable."""
        return self._source.items

    def continues_at(self, start: int) -> bool:
        """Return whether the sample of this number is the next one, or the first of those that were returned last."""
        has_ended = self._source.is_over and not self._ahead
        return start in (self.position, self.position - len(self._last)) or (has_ended and start > self.position)

    def read(self, place: range, *, keeps_state: bool) -> ReaderPart:
        """Return samples by their numbers in the reader, which begin at `position`, or where the last call did."""
        if place.start < self.position:
            self._ahead.extendleft(reversed(self._last))
            self.position -= len(self._last)
        while len(self._ahead) < len(place) and self._fetch():
            pass
        self._last = [self._ahead.popleft() for _ in range(min(len(place), len(self._ahead)))]
        self.position += len(self._last)
        state = self._state() if keeps_state and self._last and not self._ahead else None
        while not (has_more := any(sample is not FAILED for sample in self._ahead)) and self._fetch():
            pass
        samples = {number: sample for number, sample in zip(place, self._last, strict=False) if sample is not FAILED}
        self._failures = {number: found for number, found in self._failures.items() if number >= place.start}
        end = place.stop if has_more else sys.maxsize
        failures = [each for number, found in self._failures.items() if number < end for each in found]
        return ReaderPart(self.number, samples, len(place) - len(samples), has_more, state, failures)

    def _fetch(self) -> bool:
        """Read a sample ahead, or `FAILED` in place of one that is left out; return whether there was any."""
        with self._naming():
            sample = self._source.next_or_failed()
        if sample is not END:
            self._ahead.append(sample)
        if self._new:
            self._failures.setdefault(max(0, self._source.number - 1), []).extend(self._new)
            self._new = []
        return sample is not END

    def _state(self) -> ReaderState | None:
        if not self._source.has_state:
            return None
        self._source.mark()
        data = packed(self._source.position())
        self.state_bytes = len(data)
        return ReaderState(self.epoch, self._source.number, data)


class OwnReaders:
    """Reads the parts of one member in an epoch, batch by batch, in this process.

    Args:
        settings: of all readers.
        epoch: of the samples.
        takes_small_states: whether small states are taken after each batch: in a worker process, which no step waits
            for, and which ends when members change. Its member then continues without reading again.
    """

    def __init__(self, settings: ReaderSettings, epoch: int, *, takes_small_states: bool = False) -> None:
        self._settings, self.epoch, self._takes_small_states = settings, epoch, takes_small_states
        self._readers: dict[int, Reader] = {}
        self._has_checked = False
        """Whether `open_reader` is known to return new objects."""

    def read(
        self, owned: range, batch: Batch, states: Callable[[int, int, int], ReaderState | None]
    ) -> list[ReaderPart]:
        """Return the parts of a batch that is the last one again, or the next.

        Args:
            owned: the member's readers. Those that it had before continue; the others are opened.
            batch: the place in the epoch.
            states: returns the latest state of a reader in an epoch that is not after a sample; None without one.
        """
        count = self._settings.readers
        self._readers = {number: self._readers[number] for number in owned if number in self._readers}
        found = []
        for number in owned:
            place = batch.place_of(number, count)
            known = self._readers.get(number)
            if known is None or not known.continues_at(place.start):
                state = states(number, self.epoch, place.start)
                self._readers[number] = Reader(self._settings, number, self.epoch, place.start, state)
                if not self._has_checked:
                    self._settings.check_makes_new(number, self._readers[number].items)
                    self._has_checked = True
            reader = self._readers[number]
            is_small = self._takes_small_states and reader.state_bytes <= SMALL_STATE
            found.append(reader.read(place, keeps_state=is_small or batch.keeps_state_of(number)))
        return found


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
