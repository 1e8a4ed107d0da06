"""An evaluation divided among members: each computes some batches, and all gather the results.

The batches are those of one process. Once all results are known, transformers' own evaluation loop reads them in the
order of the batches, so that its metrics are those of one process.
"""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset


class Result(NamedTuple):
    """Result of a model for one batch: nested tensors on the CPU, or None."""

    size: int
    """Samples of the batch."""
    losses: Any
    logits: Any
    labels: Any
    inputs: Any
    """Tokens that the model read, if the metrics need them."""


class Replay(DataLoaderStateMixin):
    """A loader of results, in place of the batches that they were computed from.

    Args:
        results: of all batches, in their order.
        dataset: that the batches were read from.
        batch_size: samples of a batch, but for the last one.
        name: of the inputs among a model's arguments.
    """

    def __init__(self, results: Sequence[Result], dataset: Any, batch_size: int, name: str) -> None:
        self._results, self.dataset, self._name = results, dataset, name
        self.gradient_state, self._drop_last, self.total_batch_size = GradientState(), False, batch_size

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.begin()
        try:
            for number, result in enumerate(self._results, 1):
                self.end_of_dataloader = number == len(self._results)
                inputs = torch.empty(result.size, 0) if result.inputs is None else result.inputs
                yield {self._name: inputs, "result": result}
        finally:
            self.end()


def batches_of(loader: Any, place: int, places: int) -> Iterator[tuple[int, int, Any]]:
    """Yield number, size and content of the batches of one of n members: each n-th.

    Every member reads all batches of data that has no length. The size is 0 where no sampler knows it.
    """
    if isinstance(loader.dataset, IterableDataset) or getattr(loader, "batch_sampler", None) is None:
        for number, batch in itertools.islice(enumerate(loader), place, None, places):
            yield number, 0, batch
        return
    names = "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn"
    mine = list(itertools.islice(loader.batch_sampler, place, None, places))
    reader = DataLoader(loader.dataset, batch_sampler=mine, **{name: getattr(loader, name) for name in names})
    for number, (rows, batch) in enumerate(zip(mine, reader, strict=True)):
        yield place + number * places, len(rows), batch


def on_cpu(value: Any) -> Any:
    """Return nested tensors on the CPU."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)


def to_text(results: dict[int, Result]) -> str:
    """Return results by the number of their batch, as text for JSON."""
    written = io.BytesIO()
    torch.save({number: tuple(result) for number, result in results.items()}, written)
    return base64.b64encode(written.getvalue()).decode()


def from_texts(texts: Sequence[str]) -> list[Result]:
    """Return the results of all members in the order of their batches."""
    found: dict[int, tuple[Any, ...]] = {}
    for text in texts:
        found |= torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return [Result(*found[number]) for number in sorted(found)]
