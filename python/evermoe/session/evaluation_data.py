"""Divides the data of an evaluation among the members, and adds up their results."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from evermoe.data.readers import ElasticReaders

LOADER_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
)
"""Options of a `DataLoader` that the loader of a part takes over."""

Sums = dict[str, float]
"""By name, a sum over samples."""


class _Every:
    """Each n-th item, from a position on."""

    def __init__(self, items: Iterable[Any], position: int, n: int) -> None:
        self._items, self._position, self._n = items, position, n

    def __iter__(self) -> Iterator[Any]:
        return islice(self._items, self._position, None, self._n)


def own_batches(data: Any, position: int, n: int) -> Iterable[Any]:
    """Return the batches of one of n members: those at `position`, `position` + n, and so on.

    Args:
        data: a `DataLoader`, an `ElasticReaders`, whose readers are divided, or an iterable whose items are batches.
            Only these batches are loaded of data with a length and indices; of other iterables each member reads all
            batches. The order must be the same on all members.
        position: number of the member.
        n: number of members.

    Raises:
        ValueError: a `DataLoader` shuffles or divides its data already, or the data is no iterable, or one that can be
            read once.
    """
    if isinstance(data, ElasticReaders):
        return data.once(position, n)
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        return _own_loader(data, position, n)
    if isinstance(data, Mapping) or not (isinstance(data, Iterable) or hasattr(data, "__getitem__")):
        raise ValueError(
            f"evaluate: expected a DataLoader, a list of batches or another iterable of them, got {type(data).__name__}"
        )
    if isinstance(data, Iterator):
        raise ValueError(
            f"evaluate: expected data that can be read again, as an evaluation is repeated after a loss, got a "
            f"{type(data).__name__}, which can be read once: give a list of its batches, or a DataLoader"
        )
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return (data[number] for number in range(position, len(data), n))
    return _Every(data, position, n)


def check_order(loader: DataLoader[Any], where: str) -> None:
    """Check that all members read the same batches of a loader in the same order.

    Args:
        loader: over a data set with indices.
        where: who asks, for the message.

    Raises:
        ValueError: its sampler draws an order of its own on each member, or divides the samples already.
    """
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler):
        raise ValueError(
            f"{where}: expected a DataLoader of all samples, got one with a DistributedSampler: its batches are "
            "divided among the members anyway, so that most samples would be left out. Leave the sampler out"
        )
    if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        raise ValueError(
            f"{where}: expected a DataLoader with shuffle=False, got one with a {type(sampler).__name__}: each member "
            "would draw an order of its own, and some samples would count twice"
        )


def _own_loader(loader: DataLoader[Any], position: int, n: int) -> DataLoader[Any]:
    check_order(loader, "evaluate")
    options: dict[str, Any] = {name: getattr(loader, name) for name in LOADER_OPTIONS}
    if loader.batch_sampler is None:
        part: Any = _Every(loader.sampler, position, n)
        return DataLoader(loader.dataset, batch_size=None, sampler=part, **options)
    part = _Every(loader.batch_sampler, position, n)
    return DataLoader(loader.dataset, batch_sampler=part, **options)


def sum_over(batches: Iterable[Any], fn: Callable[[Any], Mapping[str, float | Tensor]]) -> Sums:
    """Return the sums over all batches of what `fn` returns for each, in float64.

    Raises:
        TypeError: it returns something else than numbers by name.
    """
    sums: dict[str, float | Tensor] = {}
    for batch in batches:
        found = fn(batch)
        if not isinstance(found, Mapping):
            raise TypeError(f"evaluate: expected fn to return sums by name, got {type(found).__name__}")
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + _number(name, value)
    return {name: float(value) for name, value in sums.items()}


def _number(name: str, value: Any) -> float | Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(()).to(torch.float64)
    if isinstance(value, numbers.Real):
        return float(value)
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise TypeError(f"evaluate: expected fn to return a number or a tensor of one as {name!r}, got {what}")


def add_up(parts: list[Sums]) -> Sums:
    """Return the sums of all members, added in the order of ranks."""
    total: Sums = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
