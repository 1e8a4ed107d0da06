"""List of all units: names, byte layouts, and the digest by which members know that theirs are equal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from evermoe._native import digest
from evermoe.state.unit import TensorSpec, Unit, complete_name


class Part(Protocol):
    """The units of one stage of a pipeline, as one of its ranks reports them."""

    @property
    def stage(self) -> int:
        """Number of the stage."""

    @property
    def layout(self) -> str:
        """Layout digest of its units."""

    @property
    def units(self) -> Sequence[tuple[str, int]]:
        """Name and bytes of each."""

    @property
    def own(self) -> Sequence[str]:
        """Of these, experts that this rank alone holds."""


class UnitCatalog:
    """All units of a job, in the order that all members share.

    Args:
        units: in order.
        layout: digest that stands for all of them; None to derive it from names, shapes and types.
    """

    def __init__(self, units: Iterable[Unit], layout: str | None = None) -> None:
        self.units = tuple(units)
        self.by_name = {unit.name: unit for unit in self.units}
        self._complete = {unit.complete for unit in self.units}
        self.layout = layout_of(self.units) if layout is None else layout
        """Digest of all units; see `layout_of`. Where an island divides them, that of the complete ones."""

    def is_divided_otherwise(self, name: str) -> bool:
        """Return whether a unit that is none of these has tensors of one, as another mesh has divided them."""
        return name not in self.by_name and complete_name(name) in self._complete

    def sizes(self) -> list[tuple[str, int]]:
        """Name and bytes of each unit."""
        return [(unit.name, unit.nbytes) for unit in self.units]

    def experts(self) -> list[str]:
        """Names of the units that are experts."""
        return [unit.name for unit in self.units if unit.layer is not None]

    def dense(self) -> list[str]:
        """Names of the other units, which every training rank holds."""
        return [unit.name for unit in self.units if unit.layer is None]

    def merged(self, parts: Iterable[Part]) -> UnitCatalog:
        """The units of all stages, stage by stage: of this catalog's own units the layout, of all others the size.

        Those that one rank alone holds are experts in the catalogs of all ranks.

        Raises:
            ValueError: ranks of one stage differ in their model or optimizer.
        """
        found: dict[int, Part] = {}
        experts: set[str] = set()
        for part in parts:
            experts |= {*part.own}
            if found.setdefault(part.stage, part).layout != part.layout:
                raise ValueError(
                    f"ranks of stage {part.stage} have units with different names, shapes or types: build the same "
                    "stage and the same optimizer on all of them"
                )
        stages = sorted(found)
        units = [self._known_or_opaque(*each, experts) for stage in stages for each in found[stage].units]
        return UnitCatalog(units, _digest_of([(stage, found[stage].layout) for stage in stages]))

    def _known_or_opaque(self, name: str, nbytes: int, experts: Collection[str]) -> Unit:
        layer, _, number = name.rpartition(".")
        place = (layer, int(number)) if name in experts else (None, None)
        return self.by_name.get(name) or Unit(name, (TensorSpec("all", (nbytes,), torch.uint8),), *place)


def layout_of(units: Iterable[Unit]) -> str:
    """Return the digest of units' names, shapes and types, without what only some presets add."""
    described = [
        (unit.name, [(s.name, s.shape, str(s.dtype)) for s in unit.specs if not s.is_optional]) for unit in units
    ]
    return _digest_of(described)


def _digest_of(described: object) -> str:
    return f"{digest(np.frombuffer(repr(described).encode(), np.uint8)):016x}"
