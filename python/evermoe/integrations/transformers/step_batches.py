"""A session's steps as transformers' Trainer sees them: batches, an optimizer and a scheduler."""

from __future__ import annotations

import math
from typing import Any

from evermoe.data.sampler import ElasticSampler
from evermoe.session.step import Step


class StepBatches:
    """The samples of this member in each step, collated when the step is computed.

    Args:
        loader: of the Trainer; its data set and its collator are used.
        sampler: of the session.
    """

    def __init__(self, loader: Any, sampler: ElasticSampler) -> None:
        self.dataset, self._collate, self._sampler = loader.dataset, loader.collate_fn, sampler

    def __len__(self) -> int:
        """Return the steps of an epoch, rounded up."""
        return math.ceil(self._sampler.num_samples / self._sampler.batch_size)

    def of_step(self, step: Step, n: int) -> list[tuple[float, Any]]:
        """Return n parts of this member's batch in `with step:`, each with its weight and collated by itself."""
        samples = {i: self.dataset[i] for i in step.indices.tolist()}
        parts = [(step.weight, part.tolist()) for part in step.micro_batches(n)]
        return [(weight, self._collate([samples[i] for i in indices])) for weight, indices in parts]


class Epochs:
    """Epochs by the number of steps. A step may hold samples of two epochs: it belongs to the first one.

    Example: 10 samples in batches of 4 → the first epoch ends after step 3, the second after step 5.
    """

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self._num_samples, self._batch_size = num_samples, batch_size

    def end(self, epoch: int) -> int:
        """Return the number of steps after which an epoch ends."""
        return math.ceil((epoch + 1) * self._num_samples / self._batch_size)

    def of(self, steps: int) -> int:
        """Return the epoch of the step that follows this number of steps."""
        epoch = steps * self._batch_size // self._num_samples
        while epoch and self.end(epoch - 1) > steps:
            epoch -= 1
        return epoch

    def is_end(self, steps: int) -> bool:
        """Return whether an epoch ends after this number of steps."""
        return steps > 0 and self.of(steps) != self.of(steps - 1)

    def progress(self, steps: int) -> float:
        """Return the epochs after this number of steps, as an integer at the end of each."""
        epoch = self.of(steps)
        begin = self.end(epoch - 1) if epoch else 0
        return epoch + (steps - begin) / (self.end(epoch) - begin)


class Follower:
    """An optimizer or a scheduler as the Trainer sees it: the session steps the real one."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def step(self, *_: Any, **__: Any) -> None:
        """No-op: the session steps the real one after the vote."""


def check_place(sampler: ElasticSampler, steps: int) -> None:
    """Check that a job's batches so far were those by which its script counts epochs.

    Raises:
        ValueError: the job was trained with another batch size or data set.
    """
    if sampler.consumed != steps * sampler.batch_size or "order" in sampler.state_dict():
        raise ValueError(
            f"ElasticTrainer: the job continues after {steps} steps with {sampler.consumed} samples, in batches or of "
            f"a data set of another size than this script's: {sampler.batch_size} of {sampler.num_samples}. Epochs "
            "could not be counted: use the arguments of the job, or start another job from its weights"
        )
