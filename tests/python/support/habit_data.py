"""Data of the habits, and samplers and loaders of one's own."""

from __future__ import annotations

import itertools

import torch

import evermoe
from evermoe.data.sampler import Share

VOCABULARY, SAMPLES = 16, 60


def dataset():
    """int64 `[SAMPLES, 7]`."""
    return torch.randint(0, VOCABULARY, (SAMPLES, 7), generator=torch.Generator().manual_seed(1))


DATA = dataset()


class OwnSampler:
    """Samples in order, as a script of one's own divides them."""

    def __init__(self):
        self.place = 0

    def share(self, rank, size):
        batch = torch.arange(self.place, self.place + 12) % SAMPLES
        part = batch.tensor_split(size)[rank]
        return Share(part, len(part) / len(batch))

    def advance(self):
        self.place += 12

    def settings(self):
        return {"samples": SAMPLES}

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Stream(torch.utils.data.IterableDataset):
    """Samples without numbers."""

    def __iter__(self):
        yield from DATA


class StatefulLoader:
    """Shuffled batches of an epoch, with a state of its own, as torchdata's loader."""

    def __init__(self):
        self._generator = torch.Generator()
        self._place = 0
        self._restored = False

    def __iter__(self):
        self._generator.manual_seed(7)
        order = torch.randperm(SAMPLES, generator=self._generator)
        self._place, self._restored = (self._place if self._restored else 0), False
        while self._place + 12 <= SAMPLES:
            self._place += 12
            yield DATA[order[self._place - 12 : self._place]]

    def state_dict(self):
        return {"place": self._place, "generator": self._generator.get_state()}

    def load_state_dict(self, state):
        self._place, self._restored = state["place"], True
        self._generator.set_state(state["generator"])


READER_SIZES = (12, 8, 6, 6, 4)
"""Samples of each reader: an epoch has five batches of twelve, the last ones shorter."""


class Documents:
    """The samples of a reader, in another order in each epoch, with a state."""

    def __init__(self, reader, readers):
        assert readers == len(READER_SIZES)
        self._first, self._size = sum(READER_SIZES[:reader]), READER_SIZES[reader]
        self._epoch = self._place = 0

    def set_epoch(self, epoch):
        self._epoch = epoch

    def __iter__(self):
        while self._place < self._size:
            self._place += 1
            yield DATA[self._first + (self._place + self._epoch) % self._size]

    def state_dict(self):
        return {"place": self._place}

    def load_state_dict(self, state):
        self._place = state["place"]


def readers():
    return evermoe.ElasticReaders(Documents, readers=len(READER_SIZES), batch_size=12, num_workers=1)


def batches_of_readers():
    """All batches, from the definition of their order."""
    for epoch in itertools.count():
        for first in range(0, 60, 12):
            places = (divmod(number, len(READER_SIZES)) for number in range(first, first + 12))
            yield torch.stack(
                [
                    DATA[sum(READER_SIZES[:reader]) + (place + 1 + epoch) % READER_SIZES[reader]]
                    for place, reader in places
                    if place < READER_SIZES[reader]
                ]
            )


class Overflow(torch.autograd.Function):
    """The same loss, whose gradient is infinite where it is larger than about 2**18.5."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor / ctx.factor, None
