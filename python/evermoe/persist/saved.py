"""What a member saves of a version at a time, on its way to a place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from evermoe.persist.manifest import Entry, Part, manifest_text


@dataclass(frozen=True)
class SavedUnit:
    """A unit, or a part of its bytes."""

    digest: int
    """Of all the unit's bytes."""
    names: Sequence[str]
    """Names of the unit's tensors."""
    tensors: Mapping[str, Tensor]
    """What is saved of it, by name."""
    part: Part | None = None
    """Which bytes these are, if not all."""

    @property
    def nbytes(self) -> int:
        """Of what is saved."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Saved:
    """A member's share of a version."""

    version: int
    member: str
    units: Mapping[str, SavedUnit]
    members: Sequence[str] = ()
    """Those that save what may not lag of the version; none where this one has all."""

    def tensors(self, units: Iterable[str]) -> dict[str, Tensor]:
        """Content of a file of some of its units."""
        return {f"{name}/{key}": each for name in units for key, each in self.units[name].tensors.items()}

    def manifest(self, layout: str, files: Mapping[str, str]) -> str:
        """Text of its manifest.

        Args:
            layout: of the model.
            files: of its units, by name.
        """
        entries: dict[str, Entry] = {name: (files[name], each.digest, each.names) for name, each in self.units.items()}
        parts = {name: each.part for name, each in self.units.items() if each.part is not None}
        return manifest_text(self.version, layout, entries, parts, self.members)
