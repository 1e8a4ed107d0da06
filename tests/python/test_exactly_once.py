"""Every sampler, with members that come and go: each sample is committed once an epoch, in one order."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from evermoe import ElasticLoader, ElasticReaders, ElasticSampler
from evermoe.data import Mixture, Packed, Shuffled, loader, reader, reader_states
from support.exactly_once import Data, Job, changes, check_exactly_once, run

SAMPLES, BATCH, EPOCHS = 37, 8, 4
STEPS = 40
"""They take `EPOCHS` epochs, also where each ends with shorter batches."""
SIZES = (9, 12, 6, 10)
"""Samples of each reader."""
PADDING = -1
RESIZED = [("commit", 4)] * 5 + [("leave", 2)] + [("commit", 2)] * 5 + [("join", 3)] + [("commit", 3)] * 5
RESIZED += [("join", 5)]


class Stream(IterableDataset):
    """Samples in order, or in another order in each epoch."""

    def __init__(self, is_shuffled: bool = False) -> None:
        self._is_shuffled, self._epoch = is_shuffled, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self):
        order = list(range(SAMPLES))
        if self._is_shuffled:
            random.Random(self._epoch).shuffle(order)
        yield from order


class Stateful:
    """A loader of batches with a state, which is its own iterator."""

    batch_size = BATCH

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self):
        self.place %= SAMPLES
        return self

    def __next__(self) -> torch.Tensor:
        if self.place == SAMPLES:
            raise StopIteration
        first, self.place = self.place, min(SAMPLES, self.place + BATCH)
        return torch.arange(first, self.place)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Part:
    """The samples of a reader, shuffled again in each epoch, with a state."""

    def __init__(self, reader: int, readers: int) -> None:
        self.samples, self.place = numbers(reader), 0

    def set_epoch(self, epoch: int) -> None:
        random.Random(epoch).shuffle(self.samples)

    def __iter__(self):
        while self.place < len(self.samples):
            self.place += 1
            yield self.samples[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Damaged(list):
    """The samples of a reader by index, some of which raise an exception: in a row, the first and the last."""

    def __init__(self, reader: int, _: int) -> None:
        super().__init__(numbers(reader))

    def __getitem__(self, index: int) -> Any:
        found = super().__getitem__(index)
        if is_damaged(found):
            raise OSError("damaged")
        return found


def is_damaged(sample: tuple[int, int]) -> bool:
    reader, number = sample
    return number in {0: (0, 3, 4, 5, SIZES[0] - 1), 1: (7,), 2: range(SIZES[2])}.get(reader, ())


def readers(open_reader: Any, collate_fn: Any = list, **options: Any) -> ElasticReaders:
    options |= {"collate_fn": collate_fn, "state_bytes": 512}
    return ElasticReaders(open_reader, readers=len(SIZES), batch_size=BATCH, **options)


def numbers(reader: int) -> list[tuple[int, int]]:
    return [(reader, number) for number in range(SIZES[reader])]


def mixed(reader: int, _: int) -> Mixture:
    every = numbers(reader)
    parts = [Shuffled(every[:5], 3), every[5:]]
    return Mixture(parts, weights=[2, 1], stopping_strategy="all_exhausted_without_replacement")


def documents(reader: int) -> list[list[int]]:
    """Documents of 1 to 7 tokens, each of which occurs once."""
    first = 1000 * reader
    return [[first + 10 * number + place for place in range(1 + 3 * number % 7)] for number in range(2 * SIZES[reader])]


def packed(split: bool) -> Data:
    """Sequences of seven tokens, of documents in random order."""
    make = lambda reader, _: Packed(Shuffled(documents(reader), 4), 7, split=split, pad_id=PADDING)  # noqa: E731
    tokens = Counter(token for reader in range(len(SIZES)) for document in documents(reader) for token in document)
    collate = lambda samples: [tuple(sample["input_ids"].tolist()) for sample in samples]  # noqa: E731
    return Data(
        lambda: readers(make, collate), tokens, lambda sequence: [token for token in sequence if token != PADDING]
    )


NUMBERS = Counter(range(SAMPLES))
OF_READERS = Counter((reader, number) for reader, size in enumerate(SIZES) for number in range(size))
DAMAGED = frozenset(filter(is_damaged, OF_READERS))
DATA = {
    "map-style": Data(lambda: ElasticSampler(SAMPLES, BATCH, shuffle=False), NUMBERS),
    "map-style, shuffled": Data(lambda: ElasticSampler(SAMPLES, BATCH), NUMBERS),
    "iterable": Data(lambda: ElasticLoader(DataLoader(Stream(), batch_size=BATCH)), NUMBERS),
    "iterable, shuffled": Data(lambda: ElasticLoader(DataLoader(Stream(True), batch_size=BATCH)), NUMBERS),
    "loader that shuffles": Data(
        lambda: ElasticLoader(DataLoader(range(SAMPLES), batch_size=BATCH, shuffle=True)), NUMBERS
    ),
    "loader with a state": Data(lambda: ElasticLoader(Stateful()), NUMBERS),
    "loader of torchdata": Data(
        lambda: ElasticLoader(StatefulDataLoader(Stream(True), batch_size=BATCH, num_workers=0)), NUMBERS
    ),
    "readers": Data(lambda: readers(lambda reader, _: numbers(reader)), OF_READERS),
    "readers with states": Data(lambda: readers(Part), OF_READERS),
    "readers, shuffled": Data(lambda: readers(lambda reader, _: Shuffled(numbers(reader), 4)), OF_READERS),
    "readers with samples that raise": Data(
        lambda: readers(Damaged, on_error="skip"), Counter(OF_READERS.keys() - DAMAGED), failing=DAMAGED
    ),
    "readers, shuffled, with items that raise": Data(
        lambda: readers(lambda reader, _: Shuffled(Damaged(reader, 0), 4), on_error="skip"),
        Counter(OF_READERS.keys() - DAMAGED),
        failing=DAMAGED,
    ),
    "readers, mixed": Data(lambda: readers(mixed), OF_READERS),
    "readers, packed": packed(True),
    "readers, packed without splits": packed(False),
}


@pytest.fixture(scope="module", autouse=True)
def short_periods():
    """States of readers are taken and exchanged so often that an epoch has several of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_states, "EXCHANGE_PERIOD", 2)
        for module in (reader, loader):
            patch.setattr(module, "STATE_PERIOD", 2)
        yield


@pytest.fixture(scope="module", params=DATA)
def job(request) -> tuple[Data, Job]:
    """The data, and what one member commits that nothing happens to."""
    data = DATA[request.param]
    return data, run(data, STEPS)


def test_alone(job) -> None:
    data, expected = job
    check_exactly_once(data, expected, epochs=EPOCHS)


@pytest.mark.parametrize("size", [5])
def test_the_order_is_that_of_any_number_of_members(job, size) -> None:
    data, expected = job
    assert run(data, STEPS, size=size).committed == expected.committed


def test_resized(job) -> None:
    """4 → 2 → 3 → 5."""
    data, expected = job
    found = run(data, STEPS, RESIZED, 4)
    assert (found.committed, found.failures) == (expected.committed, expected.failures)
    check_exactly_once(data, found, epochs=EPOCHS)


@pytest.mark.parametrize("seed", range(3))
def test_members_come_and_go_at_random(job, seed) -> None:
    data, expected = job
    size = 1 + seed % 4
    found = run(data, STEPS, changes(seed, size), size, seed)
    check_exactly_once(data, found, epochs=EPOCHS)
    assert found.committed == expected.committed
    assert found.failures == expected.failures


# ---- the harness finds what is wrong


class Forgets(ElasticSampler):
    """Does not load its state: a member that joins begins at the start."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class CountsDrawn(ElasticSampler):
    """Counts a batch when it is drawn, as loaders without commits do: a failed step loses its samples."""

    def share(self, rank: int, size: int) -> Any:
        found = super().share(rank, size)
        self.consumed += self.batch_size
        return found

    def advance(self) -> None:
        pass


class Interleaves(ElasticSampler):
    """Divides each batch by turns, so that the order depends on the number of members."""

    def share(self, rank: int, size: int) -> Any:
        found = super().share(rank, size)
        return type(found)(self.batch()[rank::size], len(self.batch()[rank::size]) / self.batch_size)


class Repeats(ElasticSampler):
    """Reads a sample of an epoch twice, and another one never."""

    def batch(self) -> torch.Tensor:
        return super().batch().clamp(max=SAMPLES - 2)


@pytest.mark.parametrize(
    ("kind", "planned", "message"),
    [
        (Forgets, [("commit", 2), ("join", 3)], "members have different states"),
        (CountsDrawn, [("fail", 2)], "the order"),
        (Interleaves, [], "epoch 0: too often"),
        (Repeats, [], r"epoch 0: too often Counter\({35: 1}\), too seldom Counter\({36: 1}\)"),
    ],
)
def test_what_is_wrong_is_found(kind, planned, message) -> None:
    data = Data(lambda: kind(SAMPLES, BATCH, shuffle=False), NUMBERS)
    expected = run(DATA["map-style"], STEPS).committed
    with pytest.raises(AssertionError, match=message):
        found = run(data, STEPS, planned, 2)
        check_exactly_once(data, found, epochs=EPOCHS)
        assert found.committed == expected, "the order"
