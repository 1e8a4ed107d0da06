"""A member's share of a checkpoint or save, on its way to a store."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from evermoe.checkpoint.manifest import BYTES, Part, Row
from evermoe.state.unit import Unit


class Share(NamedTuple):
    """Bytes of a unit."""

    unit: Unit
    data: Tensor
    """uint8 `[nbytes]`, or `[end - start]` of a part."""
    part: Part | None = None
    """Range of these bytes, unless they are all."""
    digest: int = 0
    """Digest of all the unit's bytes, where this is a part of them."""
    is_frozen: bool = False
    """Whether no step writes the unit."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a file with these bytes, by name."""
        pieces = self.unit.tensors(self.data) if self.part is None else {BYTES: self.data}
        return {f"{self.unit.name}/{name}": tensor for name, tensor in pieces.items()}

    def row(self, file: str, digest: int | None = None) -> Row:
        """Return the row of a manifest for these bytes in a file; `digest`: that of the unit, if they are complete."""
        value = self.digest if digest is None else digest
        extents = {spec.name: spec.extent for spec in self.unit.specs if spec.extent is not None}
        names = [spec.name for spec in self.unit.specs]
        return Row(self.unit.name, file, value, names, self.part, extents=extents or None)
