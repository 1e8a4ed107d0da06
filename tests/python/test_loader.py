"""A data loader whose global batches members divide: nothing is repeated or skipped, and all shuffle the same way."""

import gc
import itertools
import json
import multiprocessing
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from evermoe import ElasticLoader
from evermoe.data.sampler import Sampler, Share
from support.habit_data import DATA, StatefulLoader, Stream

LOADERS = {
    "stream": lambda: DataLoader(Stream(), batch_size=13),
    "shuffled": lambda: DataLoader(DATA, batch_size=13, shuffle=True),
    "own generator": lambda: DataLoader(DATA, batch_size=13, shuffle=True, generator=torch.Generator()),
    "with state": StatefulLoader,
    "list": lambda: [{"x": DATA[i : i + 20], "names": list("abcdefghijklmnopqrst")} for i in (0, 20, 40)],
}


def take(loader, n):
    found = []
    for _ in range(n):
        found.append(flat(loader.batch()))
        loader.advance()
    return found


def flat(batch):
    return (batch["x"] if isinstance(batch, dict) else batch).tolist()


@pytest.mark.parametrize("kind", LOADERS)
def test_shares_are_the_batch(kind):
    loader = ElasticLoader(LOADERS[kind]())
    assert isinstance(loader, Sampler)
    for size in (1, 3, 4):
        shares = [loader.share(rank, size) for rank in range(size)]
        samples = [share.samples for share in shares]
        assert [row for part in samples for row in flat(part)] == flat(loader.batch())
        assert sum(share.weight for share in shares) == pytest.approx(1)
        numbers = torch.cat([share.indices for share in shares])
        assert torch.equal(numbers, torch.arange(loader.consumed, loader.consumed + len(numbers)))
        loader.advance()


@pytest.mark.parametrize("kind", LOADERS)
def test_a_new_process_continues_where_the_state_was_taken(kind):
    """Over the ends of epochs, whatever torch's generator has drawn before."""
    expected = take(ElasticLoader(LOADERS[kind]()), 14)
    for steps in range(12):
        first = ElasticLoader(LOADERS[kind]())
        torch.manual_seed(steps)
        assert take(first, steps) == expected[:steps]
        state = first.state_dict()
        second = ElasticLoader(LOADERS[kind]())
        second.batch()
        second.load_state_dict(state)
        assert take(second, 2) == expected[steps : steps + 2]
        assert second.consumed >= steps
        second.load_state_dict(state)
        assert take(second, 1) == expected[steps : steps + 1], "and back again"


@pytest.mark.parametrize("size", [1, 5, 26, 40])
def test_another_batch_size_or_data_set_continues_with_the_next_sample(size):
    def of(batch_size, data=DATA):
        return ElasticLoader(DataLoader(data, batch_size=batch_size, shuffle=len(data) == len(DATA)))

    def read(loader, samples):
        found = []
        while len(found) < samples:
            found += take(loader, 1)[0]
        return found

    expected = read(of(12), 120)
    first = of(12)
    used = read(first, 24)
    for other in (size, 12):  # and back again
        again = of(other)
        again.load_state_dict(json.loads(json.dumps(first.state_dict())))
        used, first = used + read(again, 20), again
    assert used == expected[: len(used)]
    of_epoch = len(used) % len(DATA)
    for length in (of_epoch + 1, max(1, of_epoch)):  # with too few samples for this epoch, the next one begins
        shorter = of(12, DATA[:length])
        shorter.load_state_dict(first.state_dict())
        assert take(shorter, 1)[0][0] == DATA[of_epoch if of_epoch < length else 0].tolist()


def test_each_epoch_is_shuffled_by_the_seed():
    batches = take(ElasticLoader(LOADERS["shuffled"]()), 10)
    assert batches[0] != batches[5]
    assert sorted(itertools.chain(*batches[:5])) == sorted(itertools.chain(*batches[5:])) == sorted(DATA.tolist())
    assert take(ElasticLoader(LOADERS["shuffled"](), seed=1), 1) != batches[:1]


def test_torchs_generator_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    ElasticLoader(LOADERS["shuffled"]()).batch()
    assert torch.equal(torch.rand(3), expected)


def test_sampler_of_the_loader_gets_the_epoch():
    epochs = []

    class Told(IterableDataset):
        def set_epoch(self, epoch):
            epochs.append(epoch)

        def __iter__(self):
            yield from DATA[:4]

    take(ElasticLoader(DataLoader(Told(), batch_size=2)), 5)
    assert epochs == [0, 1, 2]


def test_more_members_than_samples():
    loader = ElasticLoader(DataLoader(DATA[:2], batch_size=2))
    shares = [loader.share(rank, 3) for rank in range(3)]
    assert [share.weight for share in shares] == [0.0, 0.5, 0.5]
    assert all(len(share.samples) == 1 for share in shares)


def test_worker_processes_end_with_the_loader():
    """Not in a garbage collection, which another worker process may run that was forked meanwhile."""
    gc.disable()
    try:
        loader = ElasticLoader(DataLoader(DATA, batch_size=4, num_workers=1))
        others = set(multiprocessing.active_children())
        loader.batch()
        (worker,) = set(multiprocessing.active_children()) - others
        del loader
        assert not worker.is_alive()
    finally:
        gc.enable()


def test_a_loader_without_a_batch_is_named():
    with pytest.raises(ValueError, match="ElasticLoader: expected at least one batch in epoch 0"):
        ElasticLoader([]).batch()


def test_parts_of_a_share_have_their_samples():
    tensors = TensorDataset(DATA)[:7]
    share = Share(torch.arange(7), 0.5, (tensors, {"names": list("abcdefg"), "rate": 3.0}))
    parts = list(share.parts(3))
    assert [len(part.indices) for part in parts] == [2, 2, 3]
    assert [part.weight for part in parts] == pytest.approx([1 / 7, 1 / 7, 1.5 / 7])
    assert [part.samples[1]["names"] for part in parts] == [["a", "b"], ["c", "d"], ["e", "f", "g"]]
    assert all(part.samples[1]["rate"] == 3.0 for part in parts)
    assert torch.equal(torch.cat([part.samples[0][0] for part in parts]), tensors[0])


class Augmented(Dataset):
    """Samples with noise of all three global generators, as transforms draw it."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("steps", [1, 4])
def test_augmentation_is_the_same_for_all_members_and_when_it_is_read_again(workers, steps):
    """Whatever a process has drawn before; what the script draws between batches is not changed."""

    def loader():
        draw()
        return ElasticLoader(DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers))

    expected = take(loader(), 6)
    assert len({tuple(row[1:]) for batch in expected for row in batch}) == 24, "no draw comes twice"
    first = loader()
    before = [draw() for _ in range(2)]
    assert take(first, steps) == expected[:steps]
    assert draw() not in before
    second = loader()
    second.load_state_dict(first.state_dict())
    assert take(second, 2) == expected[steps : steps + 2]


def draw():
    """A number of each global generator, which no test seeds."""
    return random.random(), np.random.rand(), torch.rand(()).item()
