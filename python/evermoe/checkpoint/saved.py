"""A member's part of a version, on its way to a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from evermoe.checkpoint.manifest import Entry, Part, manifest_text


@dataclass(frozen=True)
class SavedUnit:
    """A unit, or a part of its bytes."""

    digest: int
    """Digest of all the unit's bytes."""
    names: Sequence[str]
    """Names of the unit's tensors."""
    tensors: Mapping[str, Tensor]
    """The saved tensors, by name."""
    part: Part | None = None
    """Range of the saved bytes, unless they are all."""

    @property
    def nbytes(self) -> int:
        """Number of saved bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Saved:
    """A member's share of a version."""

    version: int
    member: str
    units: Mapping[str, SavedUnit]
    members: Sequence[str] = ()
    """Members that save the version's units which may not lag; empty where this one saves all of them."""

    def tensors(self, units: Iterable[str]) -> dict[str, Tensor]:
        """Return the content of a file of some of its units."""
        return {f"{name}/{key}": each for name in units for key, each in self.units[name].tensors.items()}

    def manifest(self, layout: str, files: Mapping[str, str]) -> str:
        """Return the text of its manifest.

        Args:
            layout: of the model.
            files: of its units, by name.
        """
        entries: dict[str, Entry] = {name: (files[name], each.digest, each.names) for name, each in self.units.items()}
        parts = {name: each.part for name, each in self.units.items() if each.part is not None}
        return manifest_text(self.version, layout, entries, parts, self.members)
