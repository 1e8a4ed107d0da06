"""Weights that replace the trained ones in a model between two steps, such as those of the best evaluation.

The state of the job stays the trained one: copies, checkpoints and recoveries know nothing of the substitute. So the
trained weights stay where they are, and the substitute takes as much memory again. The trained weights return to the
model before a step, a recovery and the end of the job. After a recovery all members read the substitute again, each for
the experts that it has then. Those that have joined read it as well: they serve their experts to others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from evermoe.moe.experts import Experts
from evermoe.moe.module_paths import named_parts
from evermoe.state.deferred import WeightSource
from evermoe.state.unit import own_tensors


@runtime_checkable
class PartialSource(Protocol):
    """A substitute for some of a model's tensors, which writes them itself."""

    tensors: Sequence[Tensor]
    """Tensors that `load` writes."""

    def load(self) -> None:
        """Write the values."""


class SubstituteWeights:
    """Reads a substitute for a model's weights, and puts the trained weights back.

    Args:
        model: with the experts of this member.
        settle: waits until no thread reads or writes the model's weights by the model.
    """

    def __init__(self, model: nn.Module, settle: Callable[[], None]) -> None:
        self._model, self._settle = model, settle
        self.source_of: Callable[[str], WeightSource | PartialSource] | None = None
        """Opens a substitute by its name; None if the script uses none."""
        self.name: str | None = None
        """Name of the substitute that members use after the latest step, the same on all; None for none."""
        self._trained: list[tuple[Tensor, Tensor]] = []
        """The model's tensors and the memory of their trained values; empty while the model has these."""

    def use(self, name: str) -> None:
        """Replace the model's weights, unless this substitute is in the model already.

        Raises:
            CorruptCopy: the source does not have the weights.
        """
        if self._trained and name == self.name:
            return
        assert self.source_of is not None
        source = self.source_of(name)
        self.put_back()
        self._settle()
        self.name = name
        tensors = source.tensors if isinstance(source, PartialSource) else self._tensors()
        self._trained = [(each, each.data) for each in tensors]
        for tensor, trained in self._trained:
            tensor.data = torch.empty_like(trained)
        try:
            source.load() if isinstance(source, PartialSource) else self._fill(source)
        except BaseException:
            self.put_back()
            raise

    def use_again(self) -> None:
        """Replace the weights after a recovery, as members have done before it."""
        if self.name is not None and self.source_of is not None:
            self.use(self.name)

    def put_back(self) -> None:
        """Return the trained weights to the model."""
        for tensor, trained in self._trained:
            tensor.data = trained
        self._trained = []

    def forget(self) -> None:
        """Return the trained weights: a step begins, after which the substitute is not used."""
        self.put_back()
        self.name = None

    def _tensors(self) -> Iterable[Tensor]:
        return {id(each): each for module in self._model.modules() for _, each in own_tensors(module)}.values()

    def _fill(self, source: WeightSource) -> None:
        seen: set[int] = set()
        for path, module in named_parts(self._model):
            if isinstance(module, Experts):
                for row, expert in zip(module.weights.detach(), module.ids, strict=False):
                    source.fill(path, module, {"weights": row}, expert)
                continue
            own = {name: tensor.detach() for name, tensor in own_tensors(module) if id(tensor) not in seen}
            seen |= {id(tensor) for _, tensor in own_tensors(module)}
            if own:
                source.fill(path, module, own, None)
