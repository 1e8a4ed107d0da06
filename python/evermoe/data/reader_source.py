"""Reads a member's readers, in its own process or in worker processes ahead of their use."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from evermoe.data.reader import Batch, OwnReaders, Reader, ReaderPart, ReaderSettings
from evermoe.data.reader_states import ReaderState, ReaderStates
from evermoe.process.seeds import seeded_reading

SPARE_SAMPLES = 16
"""Samples of a reader among which one is looked for that raises no exception."""


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays: torch's own way takes 0.1 ms for each."""

    def reducer_override(self, value: Any) -> Any:
        is_plain = type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu"
        if not is_plain or value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        return _as_tensor, (value.reshape(-1).view(torch.uint8).numpy(), value.dtype, value.shape)


def _as_tensor(data: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)


def _pickled(parts: list[ReaderPart]) -> Tensor:
    """Return one tensor, as each takes a file descriptor on its way to another process."""
    file = io.BytesIO()
    _Pickler(file, 5).dump(parts)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


class Feed(IterableDataset[Tensor]):
    """The parts of a member's batches from one on, without end: read by worker processes, each with some readers."""

    def __init__(
        self,
        settings: ReaderSettings,
        epoch: int,
        owned: range,
        batch: Batch,
        states: dict[int, ReaderState | None],
    ) -> None:
        self._settings, self._epoch, self._owned, self._batch, self._states = settings, epoch, owned, batch, states

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        assert worker is not None
        parts = OwnReaders(self._settings, self._epoch, takes_small_states=True)
        batch = self._batch
        owned = self._owned[worker.id :: worker.num_workers]
        # Data sets that divide themselves among worker processes, as those of Hugging Face, would do so to each reader.
        torch.utils.data._utils.worker._worker_info = None
        with seeded_reading(self._settings.seed, self._epoch):
            while True:
                found = parts.read(owned, batch, lambda number, *_: self._states.get(number))
                yield _pickled(found)
                batch = batch.next


class ReaderSource:
    """Reads a member's parts of global batches, in this process or in worker processes."""

    def __init__(self, settings: ReaderSettings, states: ReaderStates, num_workers: int, prefetch_factor: int) -> None:
        self._settings, self._states = settings, states
        self._num_workers, self._prefetch_factor = num_workers, prefetch_factor
        self._own: OwnReaders | None = None
        self._workers: Iterator[list[ReaderPart]] | None = None
        self._next: tuple[int, range, Batch] | None = None
        """Epoch, readers and place of the batch that the workers give next."""
        self._spare: list[Any] = []

    def read(self, epoch: int, owned: range, batch: Batch) -> list[ReaderPart]:
        """Return the samples of these readers for a batch."""
        with seeded_reading(self._settings.seed, epoch):  # reading seeds the generators
            if self._num_workers and owned:
                parts = self._from_workers(epoch, owned, batch)
            else:
                if self._own is None or self._own.epoch != epoch:
                    self._own = OwnReaders(self._settings, epoch)
                parts = self._own.read(owned, batch, self._states.before)
        for part in parts:
            self._spare = list(part.samples.values())[:1] or self._spare
        return parts

    def _from_workers(self, epoch: int, owned: range, batch: Batch) -> list[ReaderPart]:
        if self._workers is None or self._next != (epoch, owned, batch):
            self._workers = None  # its processes end before others start
            count = self._settings.readers
            starts = {number: batch.place_of(number, count).start for number in owned}
            known = {number: self._states.before(number, epoch, start) for number, start in starts.items()}
            feed = Feed(self._settings, epoch, owned, batch, known)
            self._workers = _batches_of_workers(feed, min(self._num_workers, len(owned)), self._prefetch_factor)
        self._next = epoch, owned, batch.next
        return next(self._workers)

    def spare(self, epoch: int) -> Any:
        """Return any sample, for a member that has none in a batch.

        Raises:
            ValueError: no reader has a sample.
        """
        count = self._settings.readers
        for number in range(count) if not self._spare else ():
            with seeded_reading(self._settings.seed, epoch):
                part = Reader(self._settings, number, epoch, 0, None).read(range(SPARE_SAMPLES), keeps_state=False)
            self._spare = list(part.samples.values())[:1]
            if self._spare:
                break
        if not self._spare:
            raise ValueError(f"expected a sample in epoch {epoch}: none of the {count} readers has one")
        return self._spare[0]


def _batches_of_workers(feed: Feed, workers: int, prefetch_factor: int) -> Iterator[list[ReaderPart]]:
    """Yield the parts of a member's batches, which worker processes read ahead."""
    iterator = iter(DataLoader(feed, batch_size=None, num_workers=workers, prefetch_factor=prefetch_factor))
    while True:  # the workers take turns
        yield [part for _ in range(workers) for part in pickle.loads(next(iterator).numpy())]
