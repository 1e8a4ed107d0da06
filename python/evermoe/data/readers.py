"""Global batches from readers: each member reads its part of the data alone, for data without access by index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch.utils.data import default_collate

from evermoe.data.batches import Reading, read_collated
from evermoe.data.reader import Batch, OpenReader, OwnReaders, ReaderPart, ReaderSettings, SampleFailure
from evermoe.data.reader_source import ReaderSource
from evermoe.data.reader_states import ReaderStates
from evermoe.data.sampler import Share
from evermoe.errors import UnsupportedState
from evermoe.options import checked
from evermoe.process.seeds import seeded_reading


class ElasticReaders:
    """Global batches from a fixed number of readers, which are divided among any number of members.

    A reader is one of `readers` parts of the data, such as some of its files. Sample j of an epoch comes from reader j
    modulo `readers`, and a global batch has `batch_size` consecutive samples, so that its samples are the same for any
    number of members. Each member opens and reads its own readers alone, and yields its samples of the batch,
    collated: `with step as batch`. An epoch ends when all readers have ended; its last batches have fewer samples if
    some readers end sooner, and a step's gradient is the mean over those that there are. A reader without end makes an
    epoch without end.

        def open_reader(reader, readers):
            return datasets.distributed.split_dataset_by_node(dataset, reader, readers, strategy="shards")

        data = evermoe.ElasticReaders(open_reader, readers=64, batch_size=512, num_workers=4)
        session = evermoe.Session(model, optimizer, data)
        for step in session.steps(10_000):
            with step as batch:
                step.backward(loss_of(batch))

    When members change, the others take over the readers of those that left. A reader whose iterable has `state_dict`
    and `load_state_dict` continues from its latest state that the members have exchanged, and reads again the few
    samples since, without returning them; one with access by index continues at an index, and any other reads again
    from the start of its epoch. So an iterable must yield the same samples in the same order whenever it is opened in
    the same epoch. Each sample is read with the global generators of `random`, NumPy and torch seeded from (seed,
    epoch, reader, sample).

    Args:
        open_reader: `open_reader(reader, readers)` returns the samples of a reader as a new iterable. It is called for
            each epoch, in the process or worker process that reads, and `set_epoch(epoch)` of the iterable and of its
            `dataset`, if they have it, before it is iterated. `state_dict()` is called between two samples.
        readers: number of readers, the same for the entire job: at least that of the members that may ever train, and
            at most the batch size.
        batch_size: samples of a global batch, over all members.
        collate_fn: makes a batch of a list of samples.
        seed: of the generators.
        num_workers: processes that read for each member; 0 to read in the training process.
        prefetch_factor: batches that each of them reads ahead. What no step has used is read again after a change of
            members.
        state_bytes: bytes kept on each member for the state of each reader, compressed; the same for the entire job,
            as its checkpoints have them.
        on_error: action where a sample raises an exception. "raise": end the member with a `RuntimeError` that names
            the reader, the epoch and the number of the sample; the others, which take its readers over, end the same
            way. "skip": leave the sample out, with a warning and the event `SampleSkipped`. It keeps its number: all
            other samples stay in their batches, and its batch has one less. A failed item of a source of
            `evermoe.data.Packed`, `Mixture` or `Shuffled` is left out of what these make. A generator cannot continue
            after an exception, so "skip" needs data with access by index, `map(function, items)`, or an iterator whose
            `__next__` continues.

    Raises:
        ValueError: an option is wrong.
    """

    def __init__(
        self,
        open_reader: OpenReader,
        *,
        readers: int,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        seed: int = 0,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        state_bytes: int = 64 << 10,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        if not callable(open_reader):
            raise ValueError(f"expected open_reader to be a function of (reader, readers), got {open_reader!r}")
        skips_errors = checked("on_error", on_error, Literal["raise", "skip"]) == "skip"
        count, seed = checked("readers", readers, int, least=1), checked("seed", seed, int)
        self._settings = ReaderSettings(open_reader, count, seed, skips_errors)
        self.batch_size = self._checked_size(batch_size)
        self._given_size, self._collate = self.batch_size, collate_fn
        workers = checked("num_workers", num_workers, int, least=0)
        ahead = checked("prefetch_factor", prefetch_factor, int, least=1)
        self.states = ReaderStates(readers, checked("state_bytes", state_bytes, int, least=64))
        """States of the readers, which a session exchanges among the members."""
        self._source = ReaderSource(self._settings, self.states, workers, ahead)
        self.epoch = 0
        """Epoch of the next batch."""
        self.consumed = 0
        """Samples of all committed batches."""
        self._batch = Batch(0, self.batch_size, 0)
        """The next batch."""
        self._parts: list[ReaderPart] = []
        """This member's parts of the next batch."""
        self._share: tuple[range, Share] | None = None
        """This member's readers, and its share of the next batch."""
        self._agreed: tuple[float, float] | None = None
        """Sums over all members: the missing part of the batch, and readers that have more samples."""

    def _checked_size(self, batch_size: int) -> int:
        size = checked("batch_size", batch_size, int, least=1)
        if size < self._settings.readers:
            raise ValueError(
                f"expected readers to be at most batch_size, as each gives at least one sample to each batch, got "
                f"readers={self._settings.readers} and batch_size={size}"
            )
        return size

    def change(self, *, batch_size: int) -> None:
        """Continue with another batch size from the next batch on; call it on all members, before `with step:`.

        Raises:
            ValueError: it is below the number of readers.
        """
        self.batch_size = self._checked_size(batch_size)
        if self._batch.size != batch_size:
            self._batch, self._share = self._batch._replace(size=batch_size), None

    def share(self, rank: int, size: int) -> Share:
        """Return the samples of the readers of `rank` among `size` members in the next global batch, collated.

        A member whose readers have none left gets another sample of weight 0.
        """
        count = self._settings.readers
        owned = range(count * rank // size, count * (rank + 1) // size)
        if self._share is None or self._share[0] != owned:
            self.states.owned = owned
            self._parts = self._source.read(self.epoch, owned, self._batch)
            self._share = owned, self._make_share()
        return self._share[1]

    def _make_share(self) -> Share:
        count, size = self._settings.readers, self._batch.size
        found = [
            (number * count + part.reader, sample) for part in self._parts for number, sample in part.samples.items()
        ]
        found.sort(key=lambda each: each[0])
        weight = len(found) / size
        if not found:
            found = [(self._batch.start, self._source.spare(self.epoch))]
        batch = self._collate([sample for _, sample in found])
        return Share(
            torch.tensor([number for number, _ in found]),
            weight,
            batch,
            self._reading(batch, len(found)),
            missing=sum(part.missing for part in self._parts) / size,
            remaining=sum(part.has_more for part in self._parts),
        )

    def _reading(self, batch: Any, size: int) -> Reading | None:
        """Return how to divide a batch further, if torch's function has made it."""
        return read_collated(batch, size) if self._collate is default_collate else None

    def agree(self, missing: float, remaining: float) -> None:
        """Note the sums of all members' shares of the next batch, by which all of them end the epoch."""
        self._agreed = missing, remaining

    @property
    def failures(self) -> list[tuple[int, SampleFailure]]:
        """Samples and items of this member's part of the next batch that are left out, each with its reader."""
        return [(part.reader, each) for part in self._parts for each in part.failures]

    def advance(self) -> None:
        """Count the batch as consumed: its step is committed."""
        missing, remaining = self._agreed or self._own_sums()
        for part in self._parts:
            if part.state is not None:
                self.states.add(part.reader, part.state)
        self.consumed += self._batch.size - round(missing * self._batch.size)
        self._batch = self._batch.next._replace(size=self.batch_size)
        self.states.batch = self._batch.number
        if not remaining:
            self.epoch, self._batch = self.epoch + 1, self._batch._replace(start=0)
        self._parts, self._share, self._agreed = [], None, None

    def _own_sums(self) -> tuple[float, float]:
        share = self.share(0, 1) if self._share is None else self._share[1]
        return share.missing, share.remaining

    def once(self, position: int, n: int) -> Iterator[Any]:
        """Yield batches of the readers of one of n members, through the first epoch: for an evaluation."""
        count, batch = self._settings.readers, Batch(0, self.batch_size, 0)
        owned, own = range(count * position // n, count * (position + 1) // n), OwnReaders(self._settings, 0)
        has_more = bool(owned)
        while has_more:
            with seeded_reading(self._settings.seed, 0):
                parts = own.read(owned, batch, lambda *_: None)
            samples = list(itertools.chain.from_iterable(part.samples.values() for part in parts))
            if samples:
                yield self._collate(samples)
            has_more, batch = any(part.has_more for part in parts), batch.next

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be the same on all members of a job."""
        found = {"readers": self._settings.readers, "readers_seed": self._settings.seed}
        return found | {"readers_batch_size": self._given_size, "readers_state_bytes": self.states.tensor.shape[1]}

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume, without those of the readers: plain numbers."""
        return {
            "consumed": self.consumed,
            "epoch": self.epoch,
            "batch": list(self._batch),
            "readers": self._settings.readers,
            "batch_size": self.batch_size,
            "given_batch_size": self._given_size,
            "exchange_at": self.states.exchange_at,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, with this object's batch size if it differs from that of the job's script.

        Raises:
            UnsupportedState: the state is of another number of readers.
        """
        if state["readers"] != self._settings.readers:
            raise UnsupportedState(
                f"the job has {state['readers']} readers, and this script {self._settings.readers}: the samples that "
                "the job has consumed are known for its readers alone. Use as many, or start another job"
            )
        self.consumed, epoch, batch = state["consumed"], state["epoch"], Batch(*state["batch"])
        self.states.batch, self.states.exchange_at = batch.number, state["exchange_at"]
        if (epoch, batch) != (self.epoch, self._batch):
            self.states.forget_own()
            self._share, self.epoch, self._batch = None, epoch, batch
        is_other = self._given_size != state["given_batch_size"]
        self.change(batch_size=self._given_size if is_other else state["batch_size"])
        self._agreed = None
