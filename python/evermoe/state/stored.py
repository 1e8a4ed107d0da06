"""Versions of units that a member has in addition to the state that it trains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from evermoe._native import digest
from evermoe.state.unit import read_tensors
from evermoe.state.version import step_of


class StoredUnit(Protocol):
    """A version of one unit that a member has in addition to the state that it trains."""

    @property
    def unit(self) -> str:
        """Name of the unit."""

    @property
    def version(self) -> int:
        """Version of its bytes."""

    @property
    def digest(self) -> int | None:
        """XXH3-64 of its bytes; None where they are still to be made, by steps that are repeated when it is read."""

    @property
    def data(self) -> Tensor:
        """uint8 `[nbytes]` on the CPU, read when it is asked for; empty if it cannot be read any more."""


@runtime_checkable
class ReadInPlace(Protocol):
    """A stored unit that can write its bytes where they are needed, without another copy."""

    def read(self, out: Tensor) -> int:
        """Write the unit's bytes to `out`, uint8 `[nbytes]`, and return their number: 0 if they are unreadable."""


@runtime_checkable
class Lending(Protocol):
    """A stored unit whose bytes can be used where they are."""

    def lend(self) -> Tensor | None:
        """uint8 `[nbytes]` on the CPU, not to be written, as it is until the next step; None to read it instead."""


def lent(found: StoredUnit) -> Tensor | None:
    """A stored unit's bytes where they are, uint8 `[nbytes]`, not to be written; None where they must be read."""
    return found.lend() if isinstance(found, Lending) else None


def read_stored(found: StoredUnit, out: Tensor) -> None:
    """Copies a stored unit's bytes to `out`, uint8 `[nbytes]`; those that cannot be read are zeros."""
    out[_read(found, out) :] = 0


def _read(found: StoredUnit, out: Tensor) -> int:
    if isinstance(found, ReadInPlace):
        return found.read(out)
    data = found.data
    out[: len(data)] = data
    return len(data)


class KeptCopies:
    """Units whose bytes members have in memory, as copies or trained, as of the version of all members.

    After a change of members these are not sent again: who is to keep a unit and has it already reads it here.

    Args:
        units_R: names of such units, by rank.
        rank: this one.
        own: those of this rank.
    """

    def __init__(
        self,
        units_R: Sequence[Collection[str]] = (),
        rank: int = 0,
        own: Mapping[str, StoredUnit] = MappingProxyType({}),
    ) -> None:
        self._units_R, self._rank, self._own = units_R, rank, own

    def __bool__(self) -> bool:
        """Whether it is known what members have."""
        return bool(self._units_R)

    def at(self, rank: int) -> Collection[str]:
        """Names of the units that a rank has."""
        return self._units_R[rank] if self._units_R else ()

    @property
    def here(self) -> Collection[str]:
        """Names of the units that this rank has."""
        return self.at(self._rank)

    def read(self, unit: str, out: Tensor) -> bool:
        """Writes the bytes of a unit that this rank has to `out`, uint8 `[nbytes]`; False if they cannot be read."""
        found = self._own.get(unit)
        is_there = found is not None and _read(found, out) == len(out)
        return is_there and (not isinstance(found, AwaitedUnit) or digest(out.numpy()) == found.digest)

    def forget(self) -> None:
        """No member has any, from now on: their memory is needed."""
        self._units_R, self._own = (), MappingProxyType({})


NO_COPIES = KeptCopies()
"""No member has any."""


@dataclass(frozen=True)
class TrainedUnit:
    """A unit that this member trains, as it is until the next update."""

    unit: str
    version: int
    digest: int
    nbytes: int
    reader: Callable[[str, Tensor], None]
    """Copies a unit's bytes now."""

    def read(self, out: Tensor) -> int:
        """Write its bytes to `out`, uint8 `[nbytes]`, and return their number."""
        self.reader(self.unit, out)
        return len(out)

    @property
    def data(self) -> Tensor:
        """Its bytes, uint8 `[nbytes]` on the CPU."""
        data = torch.empty(self.nbytes, dtype=torch.uint8)
        self.read(data)
        return data


@dataclass(frozen=True)
class AwaitedUnit:
    """A copy that is still to be brought to a version of which its trainer has told the digest."""

    found: StoredUnit
    digest: int
    """The trainer's, XXH3-64."""

    @property
    def unit(self) -> str:
        """Name of the unit."""
        return self.found.unit

    @property
    def version(self) -> int:
        """The version that it can be brought to."""
        return self.found.version

    def lend(self) -> Tensor | None:
        """The bytes where they are, whatever they are, as of `read`."""
        return lent(self.found)

    def read(self, out: Tensor) -> int:
        """Writes the bytes to `out`, uint8 `[nbytes]`, whatever they are: who reads in a recovery compares digests."""
        read_stored(self.found, out)
        return len(out)

    @property
    def data(self) -> Tensor:
        """Return uint8 `[nbytes]` on the CPU; empty if it cannot be read, or differs from its trainer's."""
        data = self.found.data
        return data if digest(data.numpy()) == self.digest else torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class RetainedUnit:
    """A unit that this member trained until a recovery moved it."""

    unit: str
    version: int
    digest: int
    tensors: Sequence[Tensor]
    """Whose bytes one after the other are the unit's; on the CPU."""

    def read(self, out: Tensor) -> int:
        """Write its bytes to `out`, uint8 `[nbytes]`, and return their number."""
        read_tensors(self.tensors, out)
        return len(out)

    @property
    def data(self) -> Tensor:
        """Its bytes, uint8 `[nbytes]`."""
        data = torch.empty(sum(tensor.nbytes for tensor in self.tensors), dtype=torch.uint8)
        self.read(data)
        return data


class RetainedUnits:
    """Units that a recovery has moved from this member to others, in host memory.

    Until the copies of the new arrangement are complete, the member that got a unit may be the only one that has it. So
    the one that gave it away retains its bytes until then: a failure in between finds them here.
    """

    def __init__(self, on_release: Callable[[], None] = lambda: None) -> None:
        self._on_release, self._version = on_release, 0
        self._units: dict[str, tuple[int, list[Tensor]]] = {}

    def begin(self, version: int, current: Collection[tuple[str, int]]) -> None:
        """A recovery to this version is adopted; what was retained before stays if it is of the same state.

        Args:
            version: that all members now get.
            current: unit and digest of all that this member has of it.
        """
        kept = {unit: found for unit, found in self._units.items() if (unit, found[0]) in current}
        self._version, self._units = version, kept

    def add(self, unit: str, digest: int, tensors: Sequence[Tensor]) -> None:
        """Retains a unit's tensors, on the CPU, of the version that was begun. `move` before their memory is used."""
        self._units[unit] = digest, list(tensors)

    def move(self) -> None:
        """Gives all that is retained memory of its own."""
        for _, tensors in self._units.values():
            tensors[:] = [tensor.clone() for tensor in tensors]

    def stored(self, version: int) -> Iterator[RetainedUnit]:
        """The retained units; `version` is that of this member's state.

        A recovery may give a state a new version without a step. Then what is retained of it has that version, too.
        """
        if step_of(version) != step_of(self._version):
            version = self._version
        for unit, (value, tensors) in self._units.items():
            yield RetainedUnit(unit, version, value, tensors)

    def release(self) -> None:
        """Frees the memory: the copies of the new arrangement are complete everywhere."""
        self._units = {}
        self._on_release()
