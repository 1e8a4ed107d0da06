"""Units cut into parts, so that ranks that hold the same units can share the work of copying them equally."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evermoe.planning.selection import shard_modules
from evermoe.state.unit import TensorSpec, Unit


class UnitPart(NamedTuple):
    """Some bytes of a unit, as a unit of its own."""

    of: Unit
    start: int
    end: int
    """After the last."""

    @property
    def unit(self) -> Unit:
        """The unit that the part is: the complete one, or one whose tensors are bytes."""
        if self.end - self.start == self.of.nbytes:
            return self.of
        specs = [TensorSpec(spec.name, (last - first,), torch.uint8) for spec, first, last in self._pieces()]
        return Unit(f"{self.of.name}[{self.start}:{self.end}]", tuple(specs))

    def tensors(self, of_unit: Iterable[Tensor]) -> list[Tensor]:
        """Views of the part's bytes in the tensors of the unit, which are contiguous; its tensors if it is not cut."""
        if self.end - self.start == self.of.nbytes:
            return list(of_unit)
        by_name = dict(zip((spec.name for spec in self.of.specs), of_unit, strict=True))
        return [by_name[spec.name].reshape(-1).view(torch.uint8)[a:b] for spec, a, b in self._pieces()]

    def _pieces(self) -> Iterator[tuple[TensorSpec, int, int]]:
        """Of each tensor that has bytes of the part, the first of these and the one after the last."""
        at = 0
        for spec in self.of.specs:
            first, last = max(self.start - at, 0), min(self.end - at, spec.nbytes)
            if first < last:
                yield spec, first, last
            at += spec.nbytes


class UnitViews:
    """Units that are parts of a rank's units or their weights alone, and bytes that stand in for units.

    Without any of them, each unit has its own tensors.
    """

    def __init__(self) -> None:
        self.parts: dict[str, UnitPart] = {}
        """Parts by name."""
        self.stand_ins: dict[str, Tensor] = {}
        """Bytes that stand in for units, by name."""
        self._weights_of: dict[str, str] = {}
        """By name of a unit that consists of another one's weights, the name of that one."""

    def name_weights(self, names: Mapping[str, str], units: Mapping[str, Unit]) -> list[Unit]:
        """Add the weights of units as units of their own, in place of the previous ones, and return them.

        Args:
            names: by new name, the name of the unit.
            units: by name.
        """
        self._weights_of = dict(names)
        return [
            Unit(name, tuple(spec for spec in units[unit].specs if not spec.is_state)) for name, unit in names.items()
        ]

    def tensors(self, unit: Unit, stored: Callable[[Unit], list[Tensor]]) -> list[Tensor]:
        """Return the tensors of a unit.

        Args:
            unit: any unit.
            stored: returns the tensors of a unit of the model.
        """
        if unit.name in self.stand_ins:
            return [self.stand_ins[unit.name]]
        part = self.parts.get(self._weights_of.get(unit.name, unit.name))
        if part is None:
            return stored(unit)
        tensors = part.tensors(stored(part.of))
        if unit.name not in self._weights_of:
            return tensors
        return [tensor for spec, tensor in zip(part.of.specs, tensors, strict=True) if not spec.is_state]


def cut(units: Sequence[Unit], ranks: int, may_cut: Callable[[Unit], bool]) -> list[UnitPart]:
    """The units, cut where a rank has its equal share of them (see `equal_shares`): `ranks - 1` cuts at most.

        >>> module = Unit("a", (TensorSpec("weight", (96,), torch.float32), TensorSpec("bias", (32,), torch.float32)))
        >>> [(part.unit.name, part.unit.nbytes) for part in cut([module], 2, lambda unit: True)]  # 512 bytes
        [('a[0:256]', 256), ('a[256:512]', 256)]

    Args:
        units: that all ranks hold.
        ranks: that share them.
        may_cut: whether a unit may be cut; one that may not goes with the first of its bytes.
    """
    found: dict[int, list[UnitPart]] = {}
    for parts in shard_modules([unit.nbytes for unit in units], ranks):
        for number, start, end in parts:
            found.setdefault(number, []).append(UnitPart(units[number], start, end))
    uncut = [[UnitPart(unit, 0, unit.nbytes)] for unit in units]
    return [part for n, unit in enumerate(units) for part in (found.get(n, uncut[n]) if may_cut(unit) else uncut[n])]


def equal_shares(nbytes: Sequence[int], ranks: Collection[int]) -> list[int]:
    """For each unit that all of the ranks hold, the one that copies it, each about as many bytes (BAFT).

    Units of `cut` are where the ranks' shares end, so that these differ by less than 64 bytes for each cut.

        >>> equal_shares([256, 128, 128], [4, 7])
        [4, 7, 7]

    Args:
        nbytes: size of each unit, in the order of `cut`.
        ranks: that hold them, one or more.
    """
    shares = shard_modules(nbytes, len(ranks))
    of = {number: rank for rank, parts in zip(ranks, shares, strict=True) for number, start, _ in parts if start == 0}
    last = list(ranks)[-1]
    return [of.get(number, last) for number in range(len(nbytes))]
