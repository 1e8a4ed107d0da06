"""Samplers of global batches: no sample is repeated or skipped when the members change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from evermoe.data.batches import Reading, read
from evermoe.options import checked


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


class ElasticSampler:
    """Global batches of a fixed size, shuffled again each epoch, and divided among any number of members.

    Batch b takes samples b·B … b·B+B−1 of the endless sequence of epochs, each a permutation drawn from (seed, epoch).
    The state is the number of consumed samples and three constants, so that it fits in every copy and checkpoint.

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
        self.consumed = 0
        self._permutations: dict[int, Tensor] = {}

    def batch(self) -> Tensor:
        """Return the next global batch: int64 `[B]`; the same until `advance`."""
        parts, left = [], self.batch_size
        while left:
            epoch, start = divmod(self.consumed + self.batch_size - left, self.num_samples)
            stop = min(start + left, self.num_samples)
            parts.append(self._permutation(epoch)[start:stop] if self.shuffle else torch.arange(start, stop))
            left -= stop - start
        return torch.cat(parts)

    def share(self, rank: int, size: int) -> Share:
        """Return the part of `rank` among `size` members: contiguous, with sizes that differ by at most one.

        Example: B = 8, size = 3 → samples 0–1 to rank 0, 2–4 to rank 1, 5–7 to rank 2.
        """
        if not 0 <= rank < size:
            raise ValueError(f"ElasticSampler.share: expected 0 <= rank < size, got rank={rank}, size={size}")
        batch = self.batch()
        start, stop = (self.batch_size * r // size for r in (rank, rank + 1))
        if start == stop:
            return Share(batch[:1], 0.0)
        return Share(batch[start:stop], (stop - start) / self.batch_size)

    def advance(self) -> None:
        """Count the batch as consumed: its step is committed."""
        self.consumed += self.batch_size

    def settings(self) -> dict[str, int | bool]:
        """Return the constructor's arguments, which must be the same on all members of a job."""
        return {
            "num_samples": self.num_samples,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "sampler_seed": self.seed,
        }

    def state_dict(self) -> dict[str, int | bool]:
        """Return the state needed to resume: plain numbers."""
        return {
            "consumed": self.consumed,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Continue where `state` was taken; the batch size may differ, the data may not.

        Raises:
            ValueError: the state belongs to another number of samples, seed or order.
        """
        mine = self.state_dict()
        for key in ("num_samples", "seed", "shuffle"):
            if state[key] != mine[key]:
                raise ValueError(
                    f"ElasticSampler: the state was taken with {key}={state[key]}, this sampler has {mine[key]}; "
                    "create the sampler with the values of the run that it continues"
                )
        self.consumed = int(state["consumed"])

    def _permutation(self, epoch: int) -> Tensor:
        if epoch not in self._permutations:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            self._permutations = {e: p for e, p in self._permutations.items() if e >= epoch - 1}
            self._permutations[epoch] = torch.randperm(self.num_samples, generator=generator)
        return self._permutations[epoch]
