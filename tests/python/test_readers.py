"""Readers: each member reads its own, and no sample is lost or repeated when the members change."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from evermoe import ElasticReaders
from evermoe.data.reader import Batch
from evermoe.data.reader_states import EXCHANGE_PERIOD, STATE_PERIOD
from evermoe.errors import UnsupportedState


class Documents:
    """Samples of a reader, with a state; counts those that it reads."""

    read: ClassVar[Counter[tuple[int, int]]] = Counter()

    def __init__(self, reader: int, size: int, *, has_state: bool = True) -> None:
        self.reader, self.size, self.at, self.epoch = reader, size, 0, 0
        if has_state:
            self.state_dict = lambda: {"at": self.at, "buffer": torch.arange(3)}
            self.load_state_dict = self._load

    def _load(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["buffer"], torch.arange(3))
        self.at = state["at"]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        order = list(range(self.size))
        random.Random(f"{self.reader} {self.epoch}").shuffle(order)
        while self.at < self.size:
            self.at += 1
            Documents.read[self.reader, self.at] += 1
            yield self.epoch, self.reader, order[self.at - 1]
        self.at = 0


class Job:
    """Members in one process, with an object each, as a session uses them."""

    def __init__(self, make: Any, members: int) -> None:
        self._make = make
        self.members: list[ElasticReaders] = [make() for _ in range(members)]

    def step(self, *, is_taken: bool = True) -> tuple[int, list[tuple[int, int, int]]]:
        """Return the epoch and the samples of a step, by their numbers in the epoch."""
        n = len(self.members)
        shares = [member.share(rank, n) for rank, member in enumerate(self.members)]
        found: dict[int, Any] = {}
        for share in shares:
            if share.weight:
                assert len(share.indices) == len(share.batch)
                found |= dict(zip(share.indices.tolist(), share.batch, strict=True))
        epochs = {member.epoch for member in self.members}
        missing, remaining = sum(share.missing for share in shares), sum(share.remaining for share in shares)
        assert sum(share.weight for share in shares) + missing == pytest.approx(1)
        if is_taken:
            self.commit(missing, remaining)
        (epoch,) = epochs
        return epoch, [found[number] for number in sorted(found)]

    def commit(self, missing: float, remaining: float) -> None:
        states = [member.states.own() for member in self.members] if self.members[0].states.is_due else None
        for member in self.members:
            if states is not None:
                member.states.keep(states)
            member.agree(missing, remaining)
            member.advance()

    def resize(self, members: int) -> None:
        """Keep some members, and start others with the state of the first."""
        kept = self.members[:members] if members < len(self.members) else self.members
        kept = random.Random(members).sample(kept, len(kept))
        new = [self._make() for _ in range(members - len(kept))]
        for member in new:
            self.restore(member, *self.saved())
        self.members = kept + new

    def saved(self) -> tuple[dict[str, Any], torch.Tensor]:
        first = self.members[0]
        return first.state_dict(), first.states.tensor.clone()

    @staticmethod
    def restore(member: ElasticReaders, state: dict[str, Any], states: torch.Tensor) -> None:
        member.states.tensor.copy_(states)
        member.load_state_dict(state)


SIZES = (40, 57, 40, 33, 41, 40, 12)


def make(*, has_state: bool = True, batch_size: int = 10, **options: Any) -> ElasticReaders:
    def open_reader(reader: int, readers: int) -> Documents:
        assert readers == len(SIZES)
        return Documents(reader, SIZES[reader], has_state=has_state)

    return ElasticReaders(open_reader, readers=len(SIZES), batch_size=batch_size, collate_fn=list, **options)


def reference(steps: int) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """Return the batches, computed from the definition."""
    found, epoch, start = [], 0, 0
    orders = {}
    for _ in range(steps):
        batch = []
        for number in range(start, start + 10):
            place, reader = divmod(number, len(SIZES))
            key = epoch, reader
            if key not in orders:
                orders[key] = list(range(SIZES[reader]))
                random.Random(f"{reader} {epoch}").shuffle(orders[key])
            if place < SIZES[reader]:
                batch.append((epoch, reader, orders[key][place]))
        found.append((epoch, batch))
        start += 10
        if all((start + len(SIZES) - 1 - reader) // len(SIZES) >= size for reader, size in enumerate(SIZES)):
            epoch, start = epoch + 1, 0
    return found


@pytest.mark.parametrize("has_state", [True, False], ids=["stateful", "plain"])
@pytest.mark.parametrize("members", [1, 2, 3, 5, 9])
def test_batches_are_the_same_for_any_number_of_members(members: int, has_state: bool) -> None:
    job = Job(lambda: make(has_state=has_state), members)
    assert [job.step() for _ in range(120)] == (expected := reference(120))
    assert {member.consumed for member in job.members} == {sum(len(batch) for _, batch in expected)}


@pytest.mark.parametrize("has_state", [True, False], ids=["stateful", "plain"])
@pytest.mark.parametrize("seed", range(8))
def test_members_change_at_random(seed: int, has_state: bool) -> None:
    chance, expected = random.Random(seed), reference(200)
    job = Job(lambda: make(has_state=has_state), 4)
    saved, step = (0, *job.saved()), 0
    while step < 200:
        match chance.choices(["step", "fail", "resize", "save", "restart"], [80, 5, 5, 5, 2])[0]:
            case "step":
                assert job.step() == expected[step]
                step += 1
            case "fail":
                assert job.step(is_taken=False) == expected[step]
            case "resize":
                job.resize(chance.randrange(1, 9))
            case "save":
                saved = (step, *job.saved())
            case "restart":
                step, *state = saved
                if chance.random() < 0.5:
                    job.members = [make(has_state=has_state) for _ in range(chance.randrange(1, 9))]
                for member in job.members:  # new ones, or those that go back
                    job.restore(member, *state)


def test_worker_processes_read_the_same_batches_through_a_change_of_members() -> None:
    job, expected = Job(lambda: make(num_workers=2), 2), reference(60)
    assert [job.step() for _ in range(25)] == expected[:25]
    assert job.step(is_taken=False) == expected[25]
    job.resize(1)
    assert [job.step() for _ in range(35)] == expected[25:]


def test_a_reader_that_moves_continues_from_its_latest_state() -> None:
    size = 2000

    def new() -> ElasticReaders:
        return ElasticReaders(lambda reader, _: Documents(reader, size), readers=4, batch_size=8, collate_fn=list)

    job = Job(new, 2)
    for _ in range(500):
        job.step()
    Documents.read.clear()
    job.members = job.members[1:]
    job.step()
    moved = [count for (reader, _), count in Documents.read.items() if reader < 2]
    assert 0 < len(moved) <= 2 * 2 * (STATE_PERIOD + EXCHANGE_PERIOD + 2)
    assert all(at > 900 for reader, at in Documents.read if reader < 2)
    assert sum(1 for reader, _ in Documents.read if reader >= 2) <= 6  # the others continue


@pytest.mark.parametrize("is_small", [True, False])
def test_worker_processes_of_a_member_that_stays_read_nothing_again(tmp_path: Path, is_small: bool) -> None:
    class Logged(Documents):
        def __iter__(self) -> Iterator[tuple[int, int, int]]:
            for sample in super().__iter__():
                with (tmp_path / str(self.reader)).open("a") as file:
                    file.write(f"{self.at}\n")
                yield sample

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "noise": random.Random(self.at).randbytes(0 if is_small else 10_000)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

    def new() -> ElasticReaders:
        return ElasticReaders(
            lambda reader, _: Logged(reader, 200, has_state=False),
            readers=2,
            batch_size=2,
            collate_fn=list,
            num_workers=1,
        )

    job = Job(new, 2)
    for _ in range(EXCHANGE_PERIOD + 9):
        job.step()
    job.members = job.members[:1]
    job.step()
    read = [int(line) for line in (tmp_path / "0").read_text().split()]
    again = [at for at, count in Counter(read).items() if count > 1]
    # Read ahead, and not yet used, when the other member was lost.
    assert (min(again) == EXCHANGE_PERIOD + 10) == is_small
    assert min(again) > EXCHANGE_PERIOD - STATE_PERIOD


def test_a_member_that_goes_back_offers_no_later_state() -> None:
    job = Job(make, 1)
    for _ in range(EXCHANGE_PERIOD + 2):
        job.step()
    saved = job.saved()
    for _ in range(STATE_PERIOD):
        job.step()
    (member,) = job.members
    assert member.states.own()
    job.restore(member, *saved)
    assert not member.states.own()


def test_data_with_an_index_is_not_read_again() -> None:
    class Rows(list[int]):
        read: ClassVar[list[int]] = []

        def __getitem__(self, index: Any) -> Any:
            Rows.read.append(index)
            return super().__getitem__(index)

    def new() -> ElasticReaders:
        return ElasticReaders(lambda *_: Rows(range(100)), readers=2, batch_size=2, collate_fn=list)

    job = Job(new, 2)
    for _ in range(70):
        job.step()
    Rows.read.clear()
    job.resize(1)
    assert job.step() == (0, [70, 70])
    assert sorted(Rows.read) in ([70, 71, 71], [70, 71, 71, 71])


def test_each_member_reads_its_own_readers_alone() -> None:
    opened: list[set[int]] = []

    def new() -> ElasticReaders:
        mine: set[int] = set()
        opened.append(mine)
        return ElasticReaders(
            lambda reader, _: mine.add(reader) or iter(range(100)), readers=8, batch_size=16, collate_fn=list
        )

    job = Job(new, 3)
    job.step()
    assert opened == [{0, 1}, {2, 3, 4}, {5, 6, 7}]


def test_a_batch_size_changes_within_an_epoch_and_at_a_restart() -> None:
    def new(batch_size: int = 10) -> ElasticReaders:
        return make(batch_size=batch_size)

    expected = [sample for epoch, batch in reference(60) for sample in batch if epoch == 0]
    job, found = Job(new, 3), []
    for sizes in (7, 25, 11):
        for _ in range(3):
            found += job.step()[1]
        job.step(is_taken=False)
        for member in job.members:
            member.change(batch_size=sizes)
    assert len(job.step(is_taken=False)[1]) == 10  # of 11: a reader has ended
    other = new(20)
    state, states = job.saved()
    job.restore(other, state | {"given_batch_size": 10}, states)
    job.members = [other]
    found += (last := job.step()[1])
    assert 16 <= len(last) <= 18
    assert found == expected[: len(found)]


def test_samples_are_read_with_seeds_of_their_own() -> None:
    def open_reader(reader: int, _: int) -> Iterator[tuple[float, float, float]]:
        return ((random.random(), np.random.rand(), torch.rand(()).item()) for _ in range(50))

    def new() -> ElasticReaders:
        return ElasticReaders(open_reader, readers=4, batch_size=6, collate_fn=list, seed=3)

    torch.manual_seed(5)
    before = torch.get_rng_state()
    alone, job = Job(new, 1), Job(new, 3)
    found = [alone.step() for _ in range(20)]
    assert torch.equal(torch.get_rng_state(), before)
    assert [job.step() for _ in range(13)] == found[:13]
    job.resize(2)
    assert [job.step() for _ in range(7)] == found[13:]
    draws = [sample for _, batch in found for sample in batch]
    assert len(set(draws)) == len(draws)


def test_default_batches_are_divided_into_micro_batches() -> None:
    data = ElasticReaders(lambda reader, _: ((torch.ones(2), reader) for _ in range(9)), readers=4, batch_size=4)
    parts = list(data.share(0, 2).parts(2))
    assert [part.batch[1].tolist() for part in parts] == [[0], [1]]
    assert sum(part.weight for part in parts) == 0.5


@pytest.mark.parametrize("members", [1, 2, 4, 8])
def test_batches_of_text_are_divided_by_samples_whatever_their_number(members: int) -> None:
    """A share may have as many samples as a sample has fields."""

    def open_reader(reader: int, _: int) -> list[tuple[str, dict[str, list[str]]]]:
        return [(f"{reader}", {"texts": ["a", f"b{reader}"]})] * 3

    data = ElasticReaders(open_reader, readers=8, batch_size=8)
    found = []
    for part in data.share(0, members).parts(2):
        if part.weight:
            numbers, fields = part.batch
            found += zip(numbers, *fields["texts"], strict=True)
    assert found == [(f"{reader}", "a", f"b{reader}") for reader in range(8 // members)]


def test_an_evaluation_reads_each_sample_once() -> None:
    data = make()
    found = [sample for position in range(3) for batch in data.once(position, 3) for sample in batch]
    assert Counter(found) == Counter((0, reader, at) for reader, size in enumerate(SIZES) for at in range(size))
    assert list(data.once(7, 8)) or list(data.once(6, 8))
    assert data.consumed == 0


def test_a_member_without_samples_gets_one_of_weight_zero() -> None:
    job = Job(make, 9)  # seven readers
    shares = [member.share(rank, 9) for rank, member in enumerate(job.members)]
    assert [share.weight > 0 for share in shares].count(False) == 2
    assert all(len(share.batch) == 1 for share in shares if not share.weight)


def test_refusals(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="readers=20 and batch_size=10"):
        ElasticReaders(lambda *_: [], readers=20, batch_size=10)
    with pytest.raises(ValueError, match="none of the 2 readers"):
        ElasticReaders(lambda *_: [], readers=2, batch_size=2).share(0, 1)
    with pytest.raises(ValueError, match="open_reader"):
        ElasticReaders([1, 2], readers=1, batch_size=2)  # type: ignore[arg-type]
    data = make()
    with pytest.raises(UnsupportedState, match="the job has 3 readers, and this script 7"):
        data.load_state_dict(data.state_dict() | {"readers": 3})
    job = Job(lambda: make(state_bytes=64), 1)
    for _ in range(30):
        job.step()
    assert caplog.text.count("state_bytes is 64") == 1
    assert not job.members[0].states.tensor.any()


def test_places_of_a_batch_are_those_of_its_samples() -> None:
    chance = random.Random(0)
    for _ in range(200):
        readers, batch = chance.randrange(1, 9), Batch(chance.randrange(99), chance.randrange(1, 30), 0)
        expected = [divmod(number, readers) for number in range(batch.start, batch.start + batch.size)]
        found = [(place, reader) for reader in range(readers) for place in batch.place_of(reader, readers)]
        assert sorted(found) == expected
