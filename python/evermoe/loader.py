"""Global batches of a data loader, divided among the members: for data that has no numbers to ask for."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from evermoe.options import checked
from evermoe.sampler import Share, sliced
from evermoe.seeds import seeded

_TENSOR = "__tensor__"


class ElasticLoader:
    """Divides the global batches of an iterable among the members: of a `DataLoader` over an `IterableDataset`, say.

    All members read the same global batches, and each keeps its part: `step.samples`, or `batch.samples` of a
    micro-batch. To resume, a loader that has `state_dict` and `load_state_dict`, such as torchdata's
    `StatefulDataLoader`, goes on from its state; any other one is opened again, and skips the batches of its epoch that
    were taken. At each epoch it is opened anew, after `set_epoch(epoch)` of itself, its sampler or its data set, where
    they have that. Each batch is read with the generators of `random`, NumPy and torch seeded from (seed, epoch,
    batch), and loader workers start with seeds from (seed, epoch): all members shuffle and augment the same way, and a
    batch that is read again is the same.

        loader = torch.utils.data.DataLoader(stream, batch_size=64)
        session = evermoe.Session(model, optimizer, evermoe.ElasticLoader(loader))
        for step in session.steps(1000):
            with step:
                step.backward(loss_of(step.samples))

    Args:
        loader: yields global batches: tensors, lists, or dicts and tuples of them, with the samples along the first
            dimension. Each epoch begins with `iter(loader)`, and has the same batches on all members.
        seed: of the epochs.
    """

    def __init__(self, loader: Iterable[Any], *, seed: int = 0) -> None:
        self._loader, self._seed = loader, checked("seed", seed, int)
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._taken = 0
        """The epoch, and its batches that are taken."""
        self.consumed = 0
        """Samples of the batches that were committed."""
        self._state: dict[str, Any] = {}
        """As of before the next batch."""
        self._batch: Any = None
        self._has_batch = False

    def batch(self) -> Any:
        """The next global batch; the same until `advance`.

        Raises:
            ValueError: the loader has none, or it is not made of tensors and lists of the same length.
        """
        if not self._has_batch:
            self._batch = self._next()
            self._has_batch = True
        return self._batch

    def share(self, rank: int, size: int) -> Share:
        """The part of `rank` among `size` members: contiguous, sizes within one of each other."""
        batch = self.batch()
        length = _length(batch)
        start, stop = (length * r // size for r in (rank, rank + 1))
        weight = (stop - start) / length
        if start == stop:
            start, stop = 0, 1
        numbers = torch.arange(self.consumed + start, self.consumed + stop)
        return Share(numbers, weight, sliced(batch, start, stop))

    def advance(self) -> None:
        """Counts the batch as consumed: its step is committed."""
        self.consumed += _length(self.batch())
        self._taken += 1
        self._batch, self._has_batch = None, False

    def settings(self) -> dict[str, Any]:
        """What all members of a job have alike."""
        found = {"loader": type(self._loader).__name__, "loader_seed": self._seed}
        return found | {"loader_batch_size": getattr(self._loader, "batch_size", None)}

    def state_dict(self) -> dict[str, Any]:
        """The state needed to resume."""
        self.batch()
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken."""
        if self._state and all(state[name] == self._state[name] for name in ("consumed", "epoch", "taken")):
            return  # where it is already
        self._epoch, self._taken, self.consumed = (int(state[name]) for name in ("epoch", "taken", "consumed"))
        self._has_batch, self._state = False, {}
        if self._is_stateful and "loader" in state:
            self._loader.load_state_dict(_decoded(state["loader"]))  # type: ignore[attr-defined]
            self._iterator = self._batches(self._taken)
        else:
            self._iterator = itertools.islice(self._open(), self._taken, None)

    @property
    def _is_stateful(self) -> bool:
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    def _open(self) -> Iterator[Any]:
        """The batches of the epoch."""
        loader: Any = self._loader
        parts = [loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)
        seed = (self._seed * 1_000_003 + self._epoch) % 2**63
        for generator in {id(part): part for part in (getattr(each, "generator", None) for each in parts)}.values():
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
        return self._batches(0)

    def _batches(self, taken: int) -> Iterator[Any]:
        """The batches of the epoch from the one that the loader is at, each read with random numbers of its own."""
        with seeded(self._seed, self._epoch):  # workers get their seeds here
            iterator = iter(self._loader)

        def read() -> Iterator[Any]:
            for number in itertools.count(taken):
                with seeded(self._seed, self._epoch, number):  # a sampler that shuffles gets its seed with the first
                    found = list(itertools.islice(iterator, 1))
                if not found:
                    return
                yield found[0]

        return read()

    def _next(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = self._open()
            self._state = {"consumed": self.consumed, "epoch": self._epoch, "taken": self._taken}
            if self._taken and self._is_stateful:
                self._state["loader"] = _encoded(self._loader.state_dict())  # type: ignore[attr-defined]
            for batch in self._iterator:
                _length(batch)
                return batch
            if not self._taken:
                break
            self._iterator, self._epoch, self._taken = None, self._epoch + 1, 0
        raise ValueError(f"ElasticLoader: expected at least one batch in epoch {self._epoch}, the loader has none")


def _length(batch: Any) -> int:
    """Samples of a batch."""
    leaves = tree_leaves(batch, is_leaf=lambda part: isinstance(part, list))
    lengths = {len(leaf) for leaf in leaves if isinstance(leaf, list) or (isinstance(leaf, Tensor) and leaf.dim())}
    if len(lengths) != 1 or not all(lengths):
        raise ValueError(
            "ElasticLoader: expected batches of tensors and lists of one length, the number of samples, got lengths "
            f"{sorted(lengths)}"
        )
    return lengths.pop()


def _encoded(state: Any) -> Any:
    """A loader's state as JSON: tensors, such as those of generators, as text."""
    if isinstance(state, Tensor):
        data = base64.b64encode(state.cpu().contiguous().view(torch.uint8).numpy().tobytes()).decode()
        return {_TENSOR: [str(state.dtype).removeprefix("torch."), list(state.shape), data]}
    if isinstance(state, dict):
        return {key: _encoded(value) for key, value in state.items()}
    return [_encoded(value) for value in state] if isinstance(state, list | tuple) else state


def _decoded(state: Any) -> Any:
    if isinstance(state, dict) and _TENSOR in state:
        name, shape, data = state[_TENSOR]
        return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=getattr(torch, name)).view(shape)
    if isinstance(state, dict):
        return {key: _decoded(value) for key, value in state.items()}
    return [_decoded(value) for value in state] if isinstance(state, list) else state
