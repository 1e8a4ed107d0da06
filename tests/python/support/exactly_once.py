"""Jobs in one process whose members come and go at random, and an independent count of the samples that they commit.

Members are real samplers. They are called as sessions call them: all draw their shares of a step; if it is taken, all
advance; after each change all load the state that one of them has, as JSON, or that of an earlier version.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from evermoe.data.reader_states import states_of
from evermoe.data.readers import ElasticReaders
from evermoe.data.sampler import Sampler, Share

Change = tuple[str, int]
"""An event in the life of a job, and the number of its members after it."""

MAX_MEMBERS = 6


@dataclass(frozen=True)
class Data:
    """A sampler, and what an epoch of its data has."""

    make: Callable[[], Sampler]
    """Makes the sampler of a member."""
    epoch: Counter[Hashable]
    """Number of times that each item is in an epoch; a sample that is made of several items counts as all of them."""
    items: Callable[[Any], Iterable[Hashable]] = lambda sample: [sample]
    """The items of a sample."""
    failing: frozenset[tuple[int, int]] = frozenset()
    """Readers and numbers of items that raise exceptions, and are left out."""


class Job:
    """The members of a job, and what they have committed.

    Args:
        data: of all members.
        size: number of members.
        seed: of the members that are lost, and of their new ranks.
    """

    def __init__(self, data: Data, size: int, seed: int = 0) -> None:
        self._make, self._chance = data.make, random.Random(seed)
        self.members = [self._make() for _ in range(size)]
        self.committed: list[list[Any]] = []
        """The samples of each committed step, in the order of the global batch."""
        self.failures: list[list[Any]] = []
        """Samples and items that were left out of each committed step, as they have raised exceptions."""
        self._versions = [self._state()]
        """The state after each number of committed steps."""

    def step(self, *, is_taken: bool = True) -> None:
        """Draw the shares of a step, and commit it if all take it."""
        size = len(self.members)
        shares = [member.share(rank, size) for rank, member in enumerate(self.members)]
        missing, remaining = sum(share.missing for share in shares), sum(share.remaining for share in shares)
        samples = in_order(shares)
        total = round(len(samples) / (1 - missing))
        for share in shares:
            own = len(share.indices) if share.weight else 0
            assert abs(share.weight - own / total) < 1e-6, "a weight is not the part of the batch"
        if not is_taken:
            return
        self.failures.append(sorted(each for member in self.members for each in getattr(member, "failures", ())))
        for member, given in zip(self.members, self._exchange(), strict=True):
            if given is not None:
                states_of(member).keep(given)
            if isinstance(member, ElasticReaders):
                member.agree(missing, remaining)
            member.advance()
        self.committed.append(samples)
        self._versions.append(self._state())

    def change(self, kind: str, size: int) -> None:
        """Let members come and go.

        Args:
            kind: `kill`, in a step; `leave` or `join`, between two; `restart`: all are lost, and new ones load an
                earlier version; `back`: a step fails, and all load an earlier version.
            size: number of members after it.
        """
        if kind in ("kill", "back"):
            self.step(is_taken=False)
        if kind in ("restart", "back"):
            version = self._chance.randrange(max(0, len(self.committed) - 30), len(self.committed) + 1)
            del self.committed[version:], self.failures[version:], self._versions[version + 1 :]
        state = self._versions[-1]
        kept = [] if kind == "restart" else self._chance.sample(self.members, min(size, len(self.members)))
        new = [self._make() for _ in range(size - len(kept))]
        for member in kept if kind == "back" else new:
            load_tensor(member, state[1])
        self.members = kept + new
        self._chance.shuffle(self.members)
        for member in self.members:
            member.load_state_dict(json.loads(state[0]))

    def _exchange(self) -> list[list[bytes] | None]:
        """Return the states of all readers for each member; None before their next exchange."""
        states = [states_of(member) for member in self.members]
        exchanges = {each is not None and each.is_due for each in states}
        assert len(exchanges) == 1, "members disagree whether to exchange states"
        if exchanges == {False}:
            return [None] * len(states)
        own = [each.own() for each in states if each is not None]
        return [own] * len(states)

    def _state(self) -> tuple[str, torch.Tensor | None]:
        found = {json.dumps(member.state_dict(), sort_keys=True) for member in self.members}
        assert len(found) == 1, f"members have different states: {found}"
        tensors = [states.tensor for states in map(states_of, self.members) if states is not None]
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors), "members keep different states of readers"
        return found.pop(), tensors[0].clone() if tensors else None


def load_tensor(member: Sampler, tensor: torch.Tensor | None) -> None:
    """Give a member the states that the job has exchanged, as its copy of the unit has them."""
    states = states_of(member)
    if states is not None and tensor is not None:
        states.tensor.copy_(tensor)


def in_order(shares: list[Share]) -> list[Any]:
    """Return the samples of a global batch: by their numbers where shares have samples, otherwise by ranks."""
    found: list[tuple[int, Any]] = []
    for share in shares:
        if not share.weight:
            continue
        samples = share.indices if share.samples is None else share.samples
        samples = samples.tolist() if isinstance(samples, torch.Tensor) else samples
        numbers = itertools.repeat(0) if share.samples is None else share.indices.tolist()
        assert len(samples) == len(share.indices)
        found += zip(numbers, samples, strict=False)
    return [sample for _, sample in sorted(found, key=lambda each: each[0])]


def changes(seed: int, size: int) -> Iterator[Change]:
    """Yield what happens at random to a job that begins with some members, without end."""
    chance = random.Random(seed)
    kinds = {"commit": 80, "fail": 6, "kill": 4, "leave": 3, "join": 4, "back": 4, "restart": 2}
    while True:
        (kind,) = chance.choices(list(kinds), list(kinds.values()))
        if kind in ("kill", "leave") and size > 1:
            size -= 1
        elif kind == "join" and size < MAX_MEMBERS:
            size += 1
        elif kind == "restart":
            size = chance.randrange(1, MAX_MEMBERS)
        elif kind not in ("commit", "fail", "back"):
            continue
        yield kind, size


def run(data: Data, steps: int, planned: Iterable[Change] = (), size: int = 1, seed: int = 0) -> Job:
    """Return a job after a number of committed steps.

    Args:
        data: of the job.
        steps: that it takes.
        planned: what happens; afterwards it commits.
        size: number of members that it begins with.
        seed: of the members that are lost.
    """
    job, rest = Job(data, size, seed), iter(planned)
    while len(job.committed) < steps:
        kind, size = next(rest, ("commit", 0))
        if kind in ("commit", "fail"):
            job.step(is_taken=kind == "commit")
        else:
            job.change(kind, size)
    return job


def check_exactly_once(data: Data, job: Job, *, epochs: int) -> None:
    """Check that each of the first epochs has every item as often as the data has it, and not one more."""
    every = [item for batch in job.committed for sample in batch for item in data.items(sample)]
    size = data.epoch.total()
    assert len(every) >= epochs * size, f"{len(every)} items are committed, expected {epochs} epochs of {size}"
    for number in range(epochs):
        found = Counter(every[number * size : (number + 1) * size])
        assert found == data.epoch, f"epoch {number}: too often {found - data.epoch}, too seldom {data.epoch - found}"
    reported = Counter((reader, failure.number) for failures in job.failures for reader, failure in failures)
    assert reported.keys() == data.failing and all(count >= epochs for count in reported.values())
