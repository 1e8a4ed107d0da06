"""Chooses the bundles of a version that are sent as the step that leads to it, not as state (MoEtion's Algorithm 3).

    holders have version v − 1     they get the gradients of step v − 1, and repeat the optimizer's step
    they do not                    they get the state of version v

Holders have a version if they got it; all ranks know this, since all know the bundles that each version sends. A bundle
has either only units whose steps can be repeated, or none: the state of the training loop, token counts, modules with
buffers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch

from evermoe.copies.replay.exchange import rows_of
from evermoe.copies.replay.replayable import find_arithmetics, is_repeatable
from evermoe.copies.replay.source import rules_of
from evermoe.copies.replay.step_bytes import step_bytes
from evermoe.copies.replay.step_code import foreign_code, refuse_foreign_code
from evermoe.copies.replay.step_notes import StepNotes
from evermoe.copies.snapshot.bundles import Bundle
from evermoe.pipeline.localised import LocalisedRecovery
from evermoe.pipeline.pipeline_config import PipelineConfig
from evermoe.pipeline.stages import StageRank, StageState
from evermoe.pipeline.step_contents import Repeated, StepContents
from evermoe.state.unit import TensorSpec, Unit
from evermoe.state.version import step_of

logger = logging.getLogger(__name__)


class StageReplay:
    """The choice of each version, the same on all ranks, and the notes of this rank's steps.

    Args:
        options: of the pipeline.
        state: of the stage.
        localised: knows steps that are only sent again.
    """

    def __init__(self, options: PipelineConfig, state: StageState, localised: LocalisedRecovery) -> None:
        self._state, self._localised = state, localised
        self._arithmetics = find_arithmetics(state.optimizer) if options.replay else {}
        self._units: dict[str, Unit] = {}
        """Units of all stages whose steps can be repeated."""
        self._bundles: dict[int, list[Unit]] = {}
        """By number, those of these units that others keep."""
        self._bases: dict[int, int] = {}
        """By number of these, the newest version that was sent of them."""
        self._notes: StepNotes | None = None
        self._has_warned = False
        self._hook = state.optimizer.register_step_pre_hook(self._note) if options.replay else None

    def _note(self, optimizer: torch.optim.Optimizer, _: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._notes is not None:
            refuse_foreign_code(foreign_code(optimizer))
            self._notes.note_step(options.get("factor", 1.0))

    def report(self) -> list[Any]:
        """Report repeatable units of the stage: lists of tensors, each with the names of the units that have them."""
        if not self._arithmetics:
            return []
        rules = rules_of(self._state.optimizer, self._arithmetics)
        kinds: dict[tuple[TensorSpec, ...], list[str]] = {}
        for unit in self._state.own.units:
            if is_repeatable(self._state, unit, rules):
                kinds.setdefault(unit.specs, []).append(unit.name)
            elif unit.layer is not None and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s and other units are copied as state, since their steps cannot be repeated", unit.name
                )
        return [
            [[(spec.name, spec.shape, str(spec.dtype).rpartition(".")[2]) for spec in specs], names]
            for specs, names in kinds.items()
        ]

    def arrange(self, planned: Sequence[Bundle], layout: Sequence[StageRank]) -> list[Bundle]:
        """Divide the bundles of a plan, since all units of a bundle are sent the same way.

        Args:
            planned: all bundles.
            layout: by rank.
        """
        reports = [each for stage_rank in layout for each in stage_rank.repeated]
        by_ranks = Counter(name for _, names in reports for name in names)
        width = sum(stage_rank.stage == 0 for stage_rank in layout)
        self._units = {
            name: Unit(name, tuple(_spec(*each) for each in specs))
            for specs, names in reports
            for name in names
            if by_ranks[name] == width  # else some rank of its stage cannot repeat it
        }
        found = []
        for bundle in planned:
            repeated = [unit for unit in bundle.units if unit in self._units and len(bundle.holders) > 1]
            found += bundle.divided([unit for unit in bundle.units if unit not in repeated], repeated)
        return found

    def keep(self, kept: Sequence[Bundle], rank: int, version: int) -> None:
        """Choose among these bundles from now on. Their holders have a version before the next one begins.

        Args:
            kept: as `SnapshotStore.replace_arenas` returns them.
            rank: of this member.
            version: of the copies that all holders have or get.
        """
        repeated = {
            number: [self._units[unit] for unit in bundle.units]
            for number, bundle in enumerate(kept)
            if len(bundle.holders) > 1 and bundle.units[0] in self._units
        }
        self._bundles = {
            number: units
            for number, units in repeated.items()
            if sum(map(step_bytes, units)) < sum(unit.nbytes for unit in units)
        }
        self._bases = dict.fromkeys(self._bundles, version)
        mine = [unit.name for n, units in self._bundles.items() if kept[n].holders[0] == rank for unit in units]
        self._notes = None
        if mine:
            rows = {unit: rows_of(self._state, unit) for unit in mine}
            self._notes = StepNotes(self._state.optimizer, self._arithmetics, rows)

    def begin(self, version: int, stays: Collection[int]) -> StepContents:
        """Choose the bundles of a version, which begins now, that are sent as a step.

        Args:
            version: of the state.
            stays: numbers of the bundles that are not sent.
        """
        steps = {} if self._notes is None else self._notes.take_steps()
        travels = [number for number in self._bundles if number not in stays]
        before = step_of(version) - 1
        found = {
            number: Repeated(self._bases[number], self._bundles[number])
            for number in travels
            if step_of(self._bases[number]) == before and not self._localised.was_retaken(version)
        }
        self._bases |= dict.fromkeys(travels, version)
        return StepContents(found, steps)

    def end(self) -> None:
        """Leave the optimizer to the script."""
        if self._hook is not None:
            self._hook.remove()


def _spec(name: str, shape: Sequence[int], dtype: str) -> TensorSpec:
    return TensorSpec(name, tuple(shape), getattr(torch, dtype))
