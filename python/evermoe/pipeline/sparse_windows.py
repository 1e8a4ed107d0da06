"""Sparse versions of a pipeline's stages: a slice of the state in each step, made dense by replay (MoEvement).

With sparse versions, a window of n steps takes the place of a version. From version v on, step i of it captures slice i
of each rank's units as of version v + i, and the weights of the following slices (`evermoe.copies.snapshot.slices`). So
no step captures all of the state. After a loss there are two ways back:

    dense     all units of one version are left: with peers of the lost ranks, or in the copies of the last recovery
    window    else from the newest complete window: the ranks of a lost stage load slice 0 and all other weights,
              compute step v from their neighbours' logs (`evermoe.pipeline.localised`), load slice 1 as of
              v + 1, ...

Each step of a replay updates all units. A unit without optimizer state gets wrong values by that, which its weights of
the next version overwrite before any rank computes with them: the update of an element depends only on its own state
and gradient. All weight gradients are computed, since the clipping factor and the vote need their norm. With the last
slice the state is dense again, with the bits of a run without a failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from evermoe._native import digest
from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.copies.snapshot.bundles import Bundle
from evermoe.copies.snapshot.slices import even_slices, newest_dense, newest_window, parts_of, weights_of
from evermoe.copies.snapshot.store import SnapshotStore, SnapshotUnit
from evermoe.pipeline.localised import LocalisedRecovery
from evermoe.pipeline.slice_choice import SliceChoice, units_to_slice
from evermoe.pipeline.stages import StageRank, StageState
from evermoe.state.catalog import UnitCatalog
from evermoe.state.unit import TensorSpec, Unit
from evermoe.state.version import step_of


def slice_places(layout: Sequence[StageRank], steps: int) -> dict[str, int]:
    """Number of the slice of each unit of all stages: each rank's share of its stage is divided evenly.

    The training loop's state is in the first slice: it follows by itself as steps are taken.

        >>> units = [(f"stage0.{name}", 12) for name in "abcd"]
        >>> slice_places([StageRank(0, 0, "", "", units, weights=[4] * 4)], 2)
        {'stage0.a': 0, 'stage0.b': 0, 'stage0.c': 1, 'stage0.d': 1}

    Args:
        layout: by rank; stage by stage.
        steps: of a window; 1 if versions are not sparse.
    """
    found: dict[str, int] = {}
    for rank in range(len(layout)):
        units = units_to_slice(layout, rank)
        found |= zip(units, even_slices([*units.values()], steps), strict=True)
    return found


def sliced(planned: Sequence[Bundle], places: Mapping[str, int], steps: int) -> tuple[list[Bundle], list[int]]:
    """The bundles of each step of a window in place of those of a version, and their steps. None is empty.

        >>> found, numbers = sliced([Bundle((0, 1), ("a", "b"))], {"a": 0, "b": 1}, 2)
        >>> [bundle.units for bundle in found], numbers
        ([('a', 'b@0'), ('b',)], [0, 1])

    Args:
        planned: bundles of complete versions.
        places: number of each unit's slice.
        steps: of a window.
    """
    found, numbers = [], []
    for bundle in planned:
        for step in range(steps):
            complete = [unit for unit in bundle.units if places[unit] == step]
            weights = [weights_of(unit, step) for unit in bundle.units if places[unit] > step]
            if complete or weights:
                found.append(Bundle(bundle.holders, (*complete, *weights)))
                numbers.append(step)
    return found, numbers


class SparseWindows:
    """Plans the captures of a rank's windows, the recovery from them, and the slices that a newcomer loads per step.

    With windows of one step, versions are not sparse, and all recoveries use complete versions.

    Args:
        state: of the stage.
        store: this node's arenas.
        localised: decides whether this rank keeps its state.
        choice: of the number of slices.
    """

    def __init__(
        self, state: StageState, store: SnapshotStore, localised: LocalisedRecovery, choice: SliceChoice
    ) -> None:
        self._state, self._store, self._localised, self.choice = state, store, localised, choice
        self._places: dict[str, int] = {}
        self._dense = self._all = state.catalog
        """Units without and with the weights that windows have of them."""
        self._is_window = False
        """Whether the recovery in progress goes back to a window."""
        self._window_at = 0
        """First version of the window that was fetched last."""
        self._begun = 0
        """Steps taken in the first version of the replayed window."""
        self._has_other_way = False
        """Whether there is another way back that was not tried yet."""
        self._kept: list[SnapshotUnit] = []
        """Units that an interrupted recovery had fetched of a window, whose copies may be incomplete."""
        self._coming: dict[str, Tensor] = {}
        """Units that later steps load, by name; empty if nothing is replayed."""
        self.numbers: list[int] = []
        """Step of a window in which each bundle is captured; empty if versions are not sparse."""

    @property
    def steps(self) -> int:
        """Steps of a window."""
        return self.choice.steps

    @property
    def are_used(self) -> bool:
        """Whether versions are sparse."""
        return self.steps > 1

    # ---- captures

    def weights(self) -> list[int]:
        """Report `StageRank.weights` of this rank."""
        units = self._state.own.units
        return [unit.nbytes - unit.state_nbytes for unit in units] if self.choice.may_be_sparse else []

    def learn(self, layout: Sequence[StageRank]) -> None:
        """Learn the units of all stages, and divide them into slices in the same way on all ranks."""
        self.choice.agree(layout)
        self._state.learn(layout)
        self._dense = self._state.catalog
        self._cut(layout)

    def apply_choice(self, layout: Sequence[StageRank]) -> None:
        """Apply the latest choice of the number of slices, unless the next copies are of a window."""
        if not self._is_window and self.choice.change():
            self._cut(layout)

    def _cut(self, layout: Sequence[StageRank]) -> None:
        self._places, self.numbers = slice_places(layout, self.steps), []
        names = {weights_of(unit, step): unit for unit, n in self._places.items() for step in range(n)}
        own = self._state.own.by_name
        mine = self._state.views.name_weights({name: unit for name, unit in names.items() if unit in own}, own)
        known = {unit.name: unit for unit in mine}
        sizes = {
            name: w for stage_rank in layout for (name, _), w in zip(stage_rank.units, stage_rank.weights, strict=False)
        }
        weights = [
            known.get(name) or Unit(name, (TensorSpec("all", (sizes[unit],), torch.uint8),))
            for name, unit in names.items()  # in the same order on all ranks, which make the same plan
        ]
        self._all = UnitCatalog([*self._dense.units, *weights], self._dense.layout)
        self._state.catalog = self._all

    def arrange(self, planned: Sequence[Bundle]) -> list[Bundle]:
        """The bundles that take the place of those of complete versions."""
        if not self.are_used:
            return list(planned)
        found, self.numbers = sliced(planned, self._places, self.steps)
        return found

    def due(self, step: int) -> frozenset[int] | None:
        """Numbers of the bundles that a step of a window captures; None for all, if versions are not sparse."""
        if not self.are_used:
            return None
        return frozenset(bundle for bundle, number in enumerate(self.numbers) if number == step)

    def first_copies(self, version: int) -> list[tuple[int, frozenset[int] | None]]:
        """The first copies after a recovery to a version: versions of the units, and the bundles that have them.

        All units of a dense state are copied as they are, and the fetched units of a window.
        """
        if not self._is_window:
            return [(version, None)]
        return [(version + step, self.due(step)) for step in range(self.steps)]

    def protected(self) -> None:
        """Return to the trained units, since the copies of the recovery are complete."""
        self._state.views.stand_ins, self._is_window = {}, False

    # ---- the way back

    def choose_way(self, group: Group, version: int) -> None:
        """Choose the way back, the same on all ranks; collective.

        Args:
            group: all ranks.
            version: of this rank's state.
        """
        views = self._state.views
        window, views.stand_ins, self._is_window = views.stand_ins, {}, False
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

    def turn_back(self) -> bool:
        """Take the other way back, since copies were damaged, on all ranks. Return False if there is none."""
        if not self._has_other_way:
            return False
        self._has_other_way = False
        self._go_to(is_window=not self._is_window)
        return True

    def _go_to(self, *, is_window: bool) -> None:
        self._is_window = is_window
        self._state.catalog = self._all if is_window else self._dense

    def _steps(self) -> dict[str, int]:
        """Step in which each part of a window is captured, by name."""
        return {name: step for unit, place in self._places.items() for name, step in parts_of(unit, place)}

    def stored(self) -> Iterator[SnapshotUnit]:
        """Copies in this node's memory; on the way to a window with the first version of their window."""
        steps = self._steps()
        for each in (*self._store.stored(), *self._kept):
            step = steps.get(each.unit, 0) if self._is_window else 0
            if each.version >= step:
                yield replace(each, version=each.version - step) if step else each

    def needed(self, units: list[str]) -> list[str]:
        """Units that a rank fetches so that it can hold these; on the way to a window all its parts of them."""
        if not self._is_window:
            return units
        return [name for unit in units for name, _ in parts_of(unit, self._places[unit])]

    def adopt(self, version: int, fetched: dict[str, Tensor]) -> None:
        """Take over the fetched units of the version that all ranks go back to."""
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
        self._state.views.stand_ins, self._window_at = fetched, version

    def advance(self, step: int) -> None:
        """Load the next slice after a step of a replayed window. `step`: steps taken."""
        if self._coming:
            self._load(step - self._begun)

    def _load(self, number: int) -> None:
        """Load a slice and the weights of the following ones. After the last one the state has its version."""
        loaded = {}
        for unit in self._state.trained():
            place = self._places[unit]
            if place >= number:
                loaded[unit] = self._coming.pop(unit if place == number else weights_of(unit, number))
        self._state.write(loaded)
        self._state.is_of_version = not self._coming
