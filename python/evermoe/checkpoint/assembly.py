"""Reads units that are divided otherwise than those of a checkpoint: shards of any size, or complete units.

    in the checkpoint   head@0of2: rows 0 to 15        head@1of2: rows 16 to 31
    wanted              head@0of3: rows 0 to 10    head@1of3: rows 11 to 21    head@2of3: rows 22 to 31

Each piece that overlaps what is wanted is read once, completely, and compared with its digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evermoe.checkpoint.manifest import Manifest, Saved, read_units
from evermoe.errors import CorruptCopy
from evermoe.state.extent import Extent


class Wanted(NamedTuple):
    """A unit that is to be read."""

    name: str
    """Its name."""
    complete: str
    """Name of the unit of which it is a shard; its own name if it is complete."""
    extents: Mapping[str, Extent | None]
    """Place of each of its tensors in the complete one, by name; None for a complete tensor."""


def complete_units(manifest: Manifest) -> list[Wanted]:
    """Return all units of a manifest, without the division into shards."""
    return [
        Wanted(name, name, dict.fromkeys(tensor for each in pieces for tensor in each.tensors))
        for name, pieces in manifest.divided.items()
    ]


def read_wanted(manifest: Manifest, wanted: Iterable[Wanted]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the tensors of units in any order, in that of their `extents`; without those that no piece has.

    Raises:
        CorruptCopy: a unit is missing in part or completely, or cannot be read, or a piece of it does not match its
            digest, or the tensors have other shapes.
    """
    by_piece: dict[str, list[_Assembly]] = {}
    for each in wanted:
        assembly = _Assembly(manifest, each)
        for piece in assembly.missing:
            by_piece.setdefault(piece, []).append(assembly)
    for piece, tensors in read_units(manifest, list(by_piece)):
        for assembly in by_piece.pop(piece):
            assembly.add(manifest.units[piece], tensors)
            if not assembly.missing:
                yield assembly.wanted.name, assembly.tensors()


class _Assembly:
    """A unit on the way from its pieces."""

    def __init__(self, manifest: Manifest, wanted: Wanted) -> None:
        self.wanted, self._path = wanted, manifest.path
        self.missing = {each.unit for each in _choose(manifest, wanted)}
        """Names of the pieces that are still to be read."""
        self._found: dict[str, Tensor] = {}
        self._covered: dict[str, Tensor] = {}
        """By the names of tensors that have several pieces, bool of their shapes: True where an element has arrived."""

    def add(self, piece: Saved, tensors: Mapping[str, Tensor]) -> None:
        """Take what is wanted of a piece."""
        self.missing.discard(piece.unit)
        for name, extent in self.wanted.extents.items():
            if name not in tensors:
                continue
            tensor = tensors[name]
            has = piece.extents.get(name) or Extent.complete(tensor.shape)
            wants = extent or Extent.complete(has.full)
            if has.shape != tensor.shape or has.full != wants.full:
                raise CorruptCopy(
                    f"{piece.unit}/{name} in {self._path} has the shape {list(tensor.shape)} and belongs to "
                    f"{list(has.full)}; expected {list(has.shape)} of {list(wants.full)}"
                )
            self._copy(name, tensor, has, wants)

    def _copy(self, name: str, tensor: Tensor, has: Extent, wants: Extent) -> None:
        if has == wants:
            self._found[name] = tensor
            self._covered.pop(name, None)
            return
        if name in self._found and name not in self._covered:  # another piece has had all of it
            return
        places = wants.overlap(has)
        if name not in self._found:
            self._found[name] = torch.empty(wants.shape, dtype=tensor.dtype)
            self._covered[name] = torch.zeros(wants.shape, dtype=torch.bool)
        found, covered = self._found[name], self._covered[name]
        if found.dtype != tensor.dtype:
            unit = self.wanted.complete
            raise CorruptCopy(f"{unit}/{name} in {self._path} has pieces of {found.dtype} and {tensor.dtype}")
        if places is not None:
            found[places[0]] = tensor[places[1]]
            covered[places[0]] = True

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors; all pieces have arrived."""
        for name, covered in self._covered.items():
            if not covered.all():
                raise CorruptCopy(
                    f"{self._path} lacks {int((~covered).sum())} of the {covered.numel()} numbers of "
                    f"{self.wanted.name}/{name}: a shard of {self.wanted.complete} is missing"
                )
        return {name: self._found[name] for name in self.wanted.extents if name in self._found}


def _choose(manifest: Manifest, wanted: Wanted) -> Sequence[Saved]:
    """Return the pieces to read: one that is divided in the same way, or all that overlap with what is wanted."""
    pieces = manifest.divided.get(wanted.complete, [])
    if not pieces:
        raise CorruptCopy(f"{manifest.path} has no unit {wanted.name}: it was written for another model")
    if len({each.version for each in pieces}) > 1:
        raise CorruptCopy(f"{manifest.path} has shards of {wanted.complete} of several versions")
    same = next((each for each in pieces if each.unit == wanted.name), None)
    if same is not None and all(
        name in same.tensors and same.extents.get(name) == extent for name, extent in wanted.extents.items()
    ):
        return [same]
    found = [each for each in pieces if any(_meets(each, *item) for item in wanted.extents.items())]
    for name in wanted.extents:  # a number, or a tensor that is not divided: one piece has all of it
        if not any(name in each.tensors for each in found):
            found += [each for each in pieces if name in each.tensors][:1]
    return found or pieces[:1]


def _meets(piece: Saved, name: str, wants: Extent | None) -> bool:
    """Return whether a piece has elements of a divided tensor that are wanted."""
    has = piece.extents.get(name)
    if name not in piece.tensors or (has is None and wants is None):
        return False
    is_comparable = has is not None and wants is not None and has.full == wants.full
    return not is_comparable or wants.overlap(has) is not None  # type: ignore[union-attr,arg-type]
