"""Samplers of global batches: no sample is repeated or skipped when the members change."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from evermoe.data.batches import Reading, read
from evermoe.options import checked

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Share:
    """One member's part of a global batch.

    `indices`: int64 sample numbers. `weight`: this member's fraction of the global batch, in [0, 1]; the weights of all
    members sum to one. With more members than samples, a member without a sample gets one of weight 0. `samples`: the
    samples themselves if the sampler has them, as `ElasticLoader` does. `reading`: used to divide them further; None:
    the reading that `evermoe.data.batches.read` finds.
    """

    indices: Tensor
    weight: float
    samples: Any = None
    reading: Reading | None = field(default=None, repr=False, compare=False)
    missing: float = 0.0
    """Part of the global batch that this member should have had, but that its data no longer has in this epoch."""
    remaining: int = 0
    """Readers of this member that have more samples in this epoch; see `ElasticReaders`."""

    @property
    def batch(self) -> Any:
        """Input of the training loop: the samples if the sampler has them, otherwise their indices."""
        return self.indices if self.samples is None else self.samples

    def parts(self, n: int) -> Iterator[Share]:
        """Yield n parts, with sizes that differ by at most one; a part without samples gets one with weight 0.

        Raises:
            ValueError: `samples` cannot be divided, or their number differs from that of `indices`.
        """
        size = len(self.indices)
        reading = self.reading or read(self.samples, size=size)
        if self.reading is None and reading.length not in (size, None):
            raise ValueError(f"Share: expected samples for {size} indices, got {reading.length}")
        bounds = [size * number // n for number in range(n + 1)]
        for start, stop in zip(bounds, bounds[1:], strict=False):
            weight = self.weight * (stop - start) / size
            place = slice(start, stop) if stop > start else slice(1)
            yield Share(self.indices[place], weight, reading.cut(self.samples, place), reading)


def bounds(length: int, rank: int, size: int, proportions: Sequence[float] | None = None) -> tuple[int, int]:
    """Return start and stop of the part of `rank` among `size` members, of a batch of `length` samples.

    Without `proportions` (numbers by rank, of which one is above 0) sizes differ by at most one.

        >>> [bounds(8, rank, 3) for rank in range(3)], [bounds(8, rank, 3, [1, 0.5, 1]) for rank in range(3)]
        ([(0, 2), (2, 5), (5, 8)], [(0, 3), (3, 5), (5, 8)])

    Raises:
        ValueError: the number of proportions is not that of the members.
    """
    if proportions is None:
        return length * rank // size, length * (rank + 1) // size
    if len(proportions) != size:
        raise ValueError(f"proportions: expected one for each of {size} members, got {len(proportions)}")
    total = sum(proportions)
    start, stop = (round(length * sum(proportions[:end]) / total) for end in (rank, rank + 1))
    return start, stop


@runtime_checkable
class Sampler(Protocol):
    """Interface that a session needs of a sampler: `ElasticSampler`, `ElasticLoader`, or your own."""

    def share(self, rank: int, size: int) -> Share:
        """Return the part of `rank` among `size` members of the next global batch; the same until `advance`."""

    def advance(self) -> None:
        """Count the batch as consumed: its step is committed."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be the same on all members of a job, by name."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume, the same on all members: numbers, strings, lists and dicts."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""


@dataclass(frozen=True)
class _Order:
    """The samples of an epoch, or of its rest after a change, in the order in which they are read."""

    epoch: int
    num_samples: int
    shuffle: bool
    seed: int
    begin: int = 0
    """Samples consumed before this order."""
    start: int = 0
    """Position in the epoch at which it begins."""
    limit: int = sys.maxsize
    """Samples from this number on no longer exist, and are left out."""

    def __len__(self) -> int:
        return self.num_samples - self.start if self.limit >= self.num_samples else len(self._numbers)

    @property
    def end(self) -> int:
        """Samples consumed with the end of this order."""
        return self.begin + len(self)

    def read(self, start: int, stop: int) -> Tensor:
        """Return samples `start` to `stop` of those of the order: int64; fewer at its end."""
        numbers = self._numbers[start:stop]
        return numbers if isinstance(numbers, Tensor) else torch.arange(numbers.start, numbers.stop)

    @functools.cached_property
    def _numbers(self) -> Tensor | range:
        if not self.shuffle:
            return range(self.start, max(self.start, min(self.num_samples, self.limit)))
        left = self._permutation[self.start :]
        return left if self.limit >= self.num_samples else left[left < self.limit]

    @property
    def _permutation(self) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(self.num_samples, generator=generator)

    def rest(self, consumed: int, limit: int) -> _Order:
        """Return what is left of the order after `consumed` samples in all, without samples from `limit` on."""
        number = consumed - self.begin
        next_sample = self.read(number, number + 1)
        start = int((self._permutation == next_sample).nonzero()) if self.shuffle else int(next_sample)
        return replace(self, begin=consumed, start=start, limit=min(limit, self.limit))


class ElasticSampler:
    """Global batches of a fixed size, shuffled again each epoch, and divided among any number of members.

    Batch b takes samples b·B … b·B+B−1 of the endless sequence of epochs, each a permutation drawn from (seed, epoch).
    The state is the number of consumed samples and a few constants, so that it fits in every copy and checkpoint.

    `change` sets another batch size or data set during the run. A script that is started again with other arguments
    changes them at the sample from which it resumes.

    Args:
        num_samples: samples in the data set.
        batch_size: B, samples of a global batch, over all members.
        shuffle: False goes through the samples in order.
        seed: of the permutations.
    """

    def __init__(self, num_samples: int, batch_size: int, *, shuffle: bool = True, seed: int = 0) -> None:
        self.num_samples = checked("num_samples", num_samples, int, least=1)
        self.batch_size = checked("batch_size", batch_size, int, least=1)
        self.shuffle, self.seed = checked("shuffle", shuffle, bool), checked("seed", seed, int)
        self.proportions: Sequence[float] | None = None
        """Relative sizes of the members' parts, by rank; None: equal. Sessions set it: see `Membership.on_slow`."""
        self.consumed = 0
        self._read = 0
        """Samples of the batch that was read last; 0 if it is consumed."""
        self._given = self._current()
        self._first = self._order(0)
        """The epoch of the latest change, or its rest."""
        self._recent: list[_Order] = []
        """The orders that were read last: two, as a batch may begin in one and end in the next."""

    def change(
        self,
        *,
        num_samples: int | None = None,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
    ) -> None:
        """Continue with other settings from the next batch on. Values that are None or equal change nothing.

            for step in session.steps(10_000):
                if step.number >= 1000:
                    sampler.change(batch_size=256)
                with step as indices:
                    ...

        The epoch under way is finished in its order, without the samples that a smaller data set no longer has; the
        other settings count from the next epoch on. So each sample of an epoch is still read once. In a session, call
        it on all members, before `with step:`. Members that join get the settings with the state.

        Args:
            num_samples: samples in the data set.
            batch_size: samples of a global batch.
            shuffle: whether epochs are shuffled.
            seed: of the permutations.

        Raises:
            ValueError: a value is wrong, and nothing is changed.
        """
        old = self._current()
        given = {"num_samples": num_samples, "batch_size": batch_size, "shuffle": shuffle, "seed": seed}
        new = old | {name: value for name, value in given.items() if value is not None}
        if new == old:
            return
        new = ElasticSampler(**new)._current()  # checks them
        if new | {"batch_size": old["batch_size"]} != old:
            at = self._order_at(self.consumed)
            if at.begin == self.consumed and not at.start:
                self._first = _Order(at.epoch, new["num_samples"], new["shuffle"], new["seed"], at.begin)
            else:
                self._first = at.rest(self.consumed, new["num_samples"])
            self._recent = []
        for name, value in new.items():
            setattr(self, name, value)

    def _current(self) -> dict[str, Any]:
        names = ("num_samples", "batch_size", "shuffle", "seed")
        return {name: getattr(self, name) for name in names}

    @property
    def epoch(self) -> float:
        """Epochs consumed: 1.25 after a quarter of the second one."""
        order = self._order_at(self.consumed)
        return order.epoch + (order.start + self.consumed - order.begin) / order.num_samples

    def _order(self, epoch: int, begin: int = 0) -> _Order:
        return _Order(epoch, self.num_samples, self.shuffle, self.seed, begin)

    def _order_at(self, consumed: int) -> _Order:
        """Return the order in which the sample after `consumed` others is."""
        for known in (*self._recent, replace(self._first)):  # a copy, which takes its permutation along when it goes
            if known.begin <= consumed < known.end:
                return known
        number = (consumed - self._first.end) // self.num_samples
        return self._order(self._first.epoch + 1 + number, self._first.end + number * self.num_samples)

    def batch(self) -> Tensor:
        """Return the next global batch: int64 `[B]`; the same until `advance`."""
        parts, at, self._read = [], self.consumed, self.batch_size
        while at < self.consumed + self.batch_size:
            order = self._order_at(at)
            self._recent = [*(each for each in self._recent if each is not order), order][-2:]
            parts.append(order.read(at - order.begin, self.consumed + self.batch_size - order.begin))
            at += len(parts[-1])
        return torch.cat(parts)

    def share(self, rank: int, size: int) -> Share:
        """Return the part of `rank` among `size` members: contiguous, with sizes that differ by at most one.

        Example: B = 8, size = 3 → samples 0–1 to rank 0, 2–4 to rank 1, 5–7 to rank 2. With `proportions`, sizes follow
        these.
        """
        if not 0 <= rank < size:
            raise ValueError(f"ElasticSampler.share: expected 0 <= rank < size, got rank={rank}, size={size}")
        batch = self.batch()
        start, stop = bounds(self.batch_size, rank, size, self.proportions)
        if start == stop:
            return Share(batch[:1], 0.0)
        return Share(batch[start:stop], (stop - start) / self.batch_size)

    def advance(self) -> None:
        """Count the batch as consumed: its step is committed."""
        self.consumed += self._read or self.batch_size
        self._read = 0

    def settings(self) -> dict[str, int | bool]:
        """Return the constructor's arguments, which must be the same on all members of a job."""
        return {"sampler_seed" if name == "seed" else name: value for name, value in self._given.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume: plain numbers."""
        state = {"consumed": self.consumed, **self._current()}
        if self._given != self._current():
            state["given"] = self._given
        return state if self._first == self._order(0) else state | {"order": asdict(self._first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Arguments of this sampler that differ from those with which the state was taken count from its next batch on, as
        by `change`; a warning names each that changes the samples.
        """
        names = self._given.keys()
        given = state.get("given", {name: state[name] for name in names})
        self.consumed, self._read = int(state["consumed"]), 0
        for name in names:
            setattr(self, name, state[name])
        self._first = _Order(**state["order"]) if "order" in state else self._order(0)
        self._recent = []
        changed = {name: value for name, value in self._given.items() if value != given[name]}
        self.change(**changed)
        for name in changed.keys() - {"batch_size"}:
            logger.warning(
                "the sampler's %s was %s where its state was taken, and is %s now: the epoch under way is finished "
                "with the samples that it had, as far as they exist, and the next one has all",
                name,
                given[name],
                changed[name],
            )
