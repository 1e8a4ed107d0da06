"""Batches of an evaluation are divided so that each counts once, whatever the data is."""

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from evermoe.session.evaluation_data import own_batches

SAMPLES = torch.arange(19)


class Stream(IterableDataset):
    def __iter__(self):
        yield from SAMPLES


class Again:
    """An iterable without a length."""

    def __iter__(self):
        return iter(SAMPLES.split(4))


def found(batch):
    return (batch[0] if isinstance(batch, list) else batch).tolist()


@pytest.mark.parametrize("members", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(TensorDataset(SAMPLES), batch_size=4),
        lambda: DataLoader(SAMPLES, batch_size=4, num_workers=1),
        lambda: DataLoader(Stream(), batch_size=4),
        lambda: list(SAMPLES.split(4)),
        Again,
    ],
    ids=["map-style", "a worker process", "iterable-style", "list", "iterable"],
)
def test_each_sample_is_of_one_member_also_when_it_is_read_again(make, members):
    data = make()
    for _ in range(2):
        parts = [[found(batch) for batch in own_batches(data, member, members)] for member in range(members)]
        assert sorted(number for part in parts for batch in part for number in batch) == SAMPLES.tolist()
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(SAMPLES),
        SubsetRandomSampler(range(9)),
        WeightedRandomSampler([1.0] * 19, 19, replacement=False),
        DistributedSampler(SAMPLES, 2, 0, shuffle=False),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_that_would_count_samples_twice_or_not_at_all_is_named(sampler):
    with pytest.raises(ValueError, match=rf"got one with a {type(sampler).__name__}"):
        own_batches(DataLoader(SAMPLES, batch_size=4, sampler=sampler), 0, 2)


@pytest.mark.parametrize("data", [iter([SAMPLES]), (each for each in [SAMPLES])], ids=["iterator", "generator"])
def test_what_can_be_read_once_is_refused(data):
    with pytest.raises(ValueError, match="data that can be read again"):
        own_batches(data, 0, 2)
