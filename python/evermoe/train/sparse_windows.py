"""Sparse versions of a pipeline's stages: a slice of the state in each step, made dense by replay (MoEvement).

Where versions are sparse, a window of n steps takes the place of a version. From version v on, step i of it captures
slice i of each rank's units as of version v + i, and the weights of the slices to come (see `snapshot.slices`). So no
step captures all of the state. After a loss there are two ways back:

    dense     all units of one version are left: with peers of the lost ranks, or in the copies of the last recovery
    window    else from the newest window that is whole; the ranks of a lost stage load slice 0 and all other weights,
              compute step v from what their neighbours have logged (`train.localised`), load slice 1 as of v + 1, ...

Every step of a replay updates all that is there. What has no optimizer state yet gets wrong values by that, which are
overwritten by its weights of the next version, before anybody computes with them: an update of one element depends on
nothing but this element's state and gradient. All weight gradients are made, as the clipping factor and the vote need
their norm. With the last slice the state is dense again, and the same to the bit as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from evermoe._native import digest
from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.snapshot.bundles import Bundle
from evermoe.snapshot.slices import even_slices, newest_dense, newest_window, parts_of, weights_of
from evermoe.snapshot.store import SnapshotStore, SnapshotUnit
from evermoe.state.catalog import UnitCatalog
from evermoe.state.unit import TensorSpec, Unit
from evermoe.state.version import step_of
from evermoe.train.localised import LocalisedRecovery
from evermoe.train.slice_choice import SliceChoice, units_to_slice
from evermoe.train.stages import StageRank, StageState


def slice_places(seats: Sequence[StageRank], steps: int) -> dict[str, int]:
    """For each unit of all stages the number of its slice: each rank's share of its stage is cut evenly.

    The training loop's state is in the first slice: it follows by itself as steps are taken.

        >>> units = [(f"stage0.{name}", 12) for name in "abcd"]
        >>> slice_places([StageRank(0, 0, "", "", units, weights=[4] * 4)], 2)
        {'stage0.a': 0, 'stage0.b': 0, 'stage0.c': 1, 'stage0.d': 1}

    Args:
        seats: by rank; stage by stage.
        steps: of a window; 1 where versions are not sparse.
    """
    found: dict[str, int] = {}
    for rank in range(len(seats)):
        units = units_to_slice(seats, rank)
        found |= zip(units, even_slices([*units.values()], steps), strict=True)
    return found


def sliced(planned: Sequence[Bundle], places: Mapping[str, int], steps: int) -> tuple[list[Bundle], list[int]]:
    """The bundles of each step of a window in place of those of a version, and the steps; none is without units.

        >>> found, numbers = sliced([Bundle((0, 1), ("a", "b"))], {"a": 0, "b": 1}, 2)
        >>> [bundle.units for bundle in found], numbers
        ([('a', 'b@0'), ('b',)], [0, 1])

    Args:
        planned: for whole versions.
        places: number of each unit's slice.
        steps: of a window.
    """
    found, numbers = [], []
    for bundle in planned:
        for step in range(steps):
            whole = [unit for unit in bundle.units if places[unit] == step]
            weights = [weights_of(unit, step) for unit in bundle.units if places[unit] > step]
            if whole or weights:
                found.append(Bundle(bundle.holders, (*whole, *weights)))
                numbers.append(step)
    return found, numbers


class SparseWindows:
    """The windows of a rank: what is captured when, which way back there is, and what a newcomer loads in each step.

    With windows of one step, versions are not sparse, and all ways back are dense.

    Args:
        state: of the stage.
        store: this node's arenas.
        localised: says whether this rank's state is needed still.
        choice: of the number of slices.
    """

    def __init__(
        self, state: StageState, store: SnapshotStore, localised: LocalisedRecovery, choice: SliceChoice
    ) -> None:
        self._state, self._store, self._localised, self.choice = state, store, localised, choice
        self._places: dict[str, int] = {}
        self._dense = self._all = state.catalog
        """Units alone, and with the weights that windows have of them."""
        self._is_window = False
        """Whether the recovery that is under way goes back to a window."""
        self._window_at = 0
        """The version with which the window begins that was fetched last."""
        self._begun = 0
        """Steps taken in the first version of the window that is replayed."""
        self._has_other_way = False
        """Whether there is another way back, which was not tried as yet."""
        self._kept: list[SnapshotUnit] = []
        """What an interrupted recovery had fetched of a window, whose copies may not be whole."""
        self._coming: dict[str, Tensor] = {}
        """What is loaded in later steps, by name; empty where nothing is replayed."""
        self.numbers: list[int] = []
        """By bundle, the step of a window in which it is captured; empty where versions are not sparse."""

    @property
    def steps(self) -> int:
        """Steps of a window."""
        return self.choice.steps

    @property
    def are_used(self) -> bool:
        """Whether versions are sparse."""
        return self.steps > 1

    # ---- what is captured

    def weights(self) -> list[int]:
        """What this rank tells of its stage's units: see `StageRank.weights`."""
        units = self._state.own.units
        return [unit.nbytes - unit.state_nbytes for unit in units] if self.choice.may_be_sparse else []

    def learn(self, seats: Sequence[StageRank]) -> None:
        """What units the stages have; cuts them into slices, alike on all ranks."""
        self.choice.agree(seats)
        self._state.learn(seats)
        self._dense = self._state.catalog
        self._cut(seats)

    def change(self, seats: Sequence[StageRank]) -> None:
        """Cuts units into as many slices as were chosen last, unless the copies that follow are of a window."""
        if not self._is_window and self.choice.change():
            self._cut(seats)

    def _cut(self, seats: Sequence[StageRank]) -> None:
        self._places, self.numbers = slice_places(seats, self.steps), []
        names = {weights_of(unit, step): unit for unit, n in self._places.items() for step in range(n)}
        own = self._state.own.by_name
        mine = self._state.name_weights({name: unit for name, unit in names.items() if unit in own})
        known = {unit.name: unit for unit in mine}
        sizes = {name: w for seat in seats for (name, _), w in zip(seat.units, seat.weights, strict=False)}
        weights = [
            known.get(name) or Unit(name, (TensorSpec("all", (sizes[unit],), torch.uint8),))
            for name, unit in names.items()  # in the same order on all ranks, as they plan alike
        ]
        self._all = UnitCatalog([*self._dense.units, *weights], self._dense.layout)
        self._state.catalog = self._all

    def arrange(self, planned: Sequence[Bundle]) -> list[Bundle]:
        """The bundles that take the place of those of whole versions."""
        if not self.are_used:
            return list(planned)
        found, self.numbers = sliced(planned, self._places, self.steps)
        return found

    def due(self, step: int) -> frozenset[int] | None:
        """Numbers of the bundles that are captured in a step of a window; None for all, where there are no windows."""
        if not self.are_used:
            return None
        return frozenset(bundle for bundle, number in enumerate(self.numbers) if number == step)

    def first_copies(self, version: int) -> list[tuple[int, frozenset[int] | None]]:
        """What is copied after a recovery to a version: versions of the units, and the bundles that have them.

        Of a dense state all units are copied as they are; of a window what was fetched of it.
        """
        if not self._is_window:
            return [(version, None)]
        return [(version + step, self.due(step)) for step in range(self.steps)]

    def protected(self) -> None:
        """The copies that a recovery makes are whole: from now on units are those that are trained."""
        self._state.window, self._is_window = {}, False

    # ---- the way back

    def look(self, group: Group, version: int) -> None:
        """Chooses the way back, alike on all ranks; collective.

        Args:
            group: all ranks.
            version: of this rank's state.
        """
        window, self._state.window, self._is_window = self._state.window, {}, False
        if not self.are_used:
            return
        steps = self._steps()
        self._kept = [
            SnapshotUnit(name, self._window_at + steps[name], digest(data.numpy()), data)
            for name, data in window.items()
            if name in steps
        ]
        trained = sorted((unit, version) for unit in self._state.held())
        copied = sorted({(each.unit, each.version) for each in (*self._store.stored(), *self._kept)})
        everyone = gather_json(group, [trained, copied])
        copies = {(unit, at) for _, found in everyone for unit, at in found}
        held = copies | {(unit, at) for found, _ in everyone for unit, at in found}
        dense, begun = newest_dense(held, self._dense.by_name.keys()), newest_window(copies, self._places)
        self._has_other_way = dense is not None and begun is not None
        self._go_to(is_window=begun is not None and (dense is None or begun > dense))

    def turn(self) -> bool:
        """Takes the other way back, as copies were damaged; False if there is none left. Alike on all ranks."""
        if not self._has_other_way:
            return False
        self._has_other_way = False
        self._go_to(is_window=not self._is_window)
        return True

    def _go_to(self, *, is_window: bool) -> None:
        self._is_window = is_window
        self._state.catalog = self._all if is_window else self._dense

    def _steps(self) -> dict[str, int]:
        """By name of what a window has, the step in which it is captured."""
        return {name: step for unit, place in self._places.items() for name, step in parts_of(unit, place)}

    def stored(self) -> Iterator[SnapshotUnit]:
        """Copies in this node's memory; on the way to a window with the version with which their window begins."""
        steps = self._steps()
        for each in (*self._store.stored(), *self._kept):
            step = steps.get(each.unit, 0) if self._is_window else 0
            if each.version >= step:
                yield replace(each, version=each.version - step) if step else each

    def needed(self, units: list[str]) -> list[str]:
        """What a rank fetches that is to hold units: on the way to a window all that this has of them."""
        if not self._is_window:
            return units
        return [name for unit in units for name, _ in parts_of(unit, self._places[unit])]

    def adopt(self, version: int, fetched: dict[str, Tensor]) -> None:
        """Takes over what was fetched, of the version that all ranks go back to."""
        dense_at = step_of(version) + self.steps - 1 if self._is_window else 0
        stays = self._localised.go_back(version, dense_at)
        self._coming, self._kept, self._state.catalog = {}, [], self._all
        self._state.is_of_version = not self._is_window
        if not self._is_window:
            self._state.write(fetched)
            return
        if not stays:
            self._begun, self._coming = step_of(version), dict(fetched)
            self._load(0)
        self._state.window, self._window_at = fetched, version

    def advance(self, step: int) -> None:
        """So many steps are taken: loads the next slice, where a window is replayed."""
        if self._coming:
            self._load(step - self._begun)

    def _load(self, number: int) -> None:
        """Loads a slice, and the weights of those to come; without any, the state is that of its version."""
        loaded = {}
        for unit in self._state.trained():
            place = self._places[unit]
            if place >= number:
                loaded[unit] = self._coming.pop(unit if place == number else weights_of(unit, number))
        self._state.write(loaded)
        self._state.is_of_version = not self._coming
