"""Reproducible random numbers: seeds torch's, NumPy's and Python's global generators for a block."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class _Reading:
    depth = 0
    """Number of the `seeded_reading` blocks that this process is in."""


def seed_all(*numbers: int) -> None:
    """Seed all global random generators of this process: see `seeded`, which restores them."""
    seed = hash(numbers) % 2**63
    random.seed(seed)
    np.random.seed([seed % 2**32, seed >> 32, 1])  # without the last word it would draw the numbers of `random`
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # torch.manual_seed would format the stack in each step of a process without CUDA
        torch.cuda.manual_seed_all(seed)


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed all global random generators of this process for a block, and restore their states afterwards.

    These are `torch`'s (of the CPU and of CUDA devices), `numpy.random`'s and `random`'s. The same numbers give the
    same draws in every process. Generators that a script creates itself do not change.

        >>> def draw():
        ...     return random.random(), np.random.rand(), torch.rand(()).item()
        >>> with seeded(0, 7):
        ...     first = draw()
        >>> with seeded(0, 7):
        ...     assert draw() == first

    Args:
        numbers: whole numbers, such as (seed, step, rank).
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        seed_all(*numbers)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)


@contextmanager
def seeded_reading(*numbers: int) -> Iterator[None]:
    """Seed as `seeded` does for a block that only reads data, and draws nothing for another purpose."""
    with seeded(*numbers):
        _Reading.depth += 1
        try:
            yield
        finally:
            _Reading.depth -= 1


@contextmanager
def preserved() -> Iterator[None]:
    """Restore all global random generators after a block that seeds them, unless it is in a `seeded_reading` block.

    That one restores them at its end. To do so for each sample would take longer than to read many of them.
    """
    if _Reading.depth:
        yield
    else:
        with seeded(0):
            yield
