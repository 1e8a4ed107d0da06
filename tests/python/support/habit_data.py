"""Data of the habits, and samplers and loaders of one's own."""

from __future__ import annotations

import torch

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
