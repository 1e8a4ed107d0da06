"""Checks that an iterable continues exactly from each of its states, as a reader must."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch

from evermoe.data.plain_state import from_json, to_json
from evermoe.process.seeds import seeded


def plain(item: Any) -> Any:
    """Return an item as plain lists and numbers, to compare it."""
    if isinstance(item, dict):
        return {name: plain(value) for name, value in item.items()}
    return item.tolist() if isinstance(item, torch.Tensor | np.ndarray) else item


def opened(make: Callable[[], Iterable[Any]], epoch: int, state: Any = None, seed: int = 0) -> Any:
    """Open an epoch as a reader does, from a state if one is given."""
    torch.manual_seed(seed + epoch)
    made: Any = make()
    if hasattr(made, "set_epoch"):
        made.set_epoch(epoch)
    if state is not None:
        made.load_state_dict(state)
    return made


def state_of(made: Any) -> Any:
    """Return a state as it arrives in another process."""
    return from_json(json.loads(json.dumps(to_json(made.state_dict()))))


def check_resuming(make: Callable[[], Iterable[Any]], *, epochs: int = 2, at: Iterable[int] | None = None) -> list[Any]:
    """Check each state of an iterable, and some states of iterables that have been resumed; return the items by epoch.

    Args:
        make: opens it again.
        epochs: number of epochs.
        at: the numbers of items after which states are checked; None for all.
    """
    found = []
    with seeded(0):  # as readers do; otherwise each item restores all generators
        for epoch in range(epochs):
            expected = [plain(item) for item in opened(make, epoch)]
            found.append(expected)
            for count in range(len(expected) + 1) if at is None else at:
                made = opened(make, epoch)
                begun = [plain(item) for item in islice(made, count)]
                assert begun == expected[:count]
                state, taken = state_of(made), len(begun)
                while True:
                    resumed = opened(make, epoch, state, seed=1000)
                    more = random.Random(taken).randint(1, len(expected) + 1)
                    items = [plain(item) for item in islice(resumed, more)]
                    assert items == expected[taken : taken + more], f"resumed after {taken} items of epoch {epoch}"
                    taken += len(items)
                    if taken == len(expected):
                        break
                    state = state_of(resumed)
    return found
