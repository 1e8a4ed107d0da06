"""The presets, as `src/protection/preset.rs` defines them: what a session does and what `evermoe plan` says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from evermoe import _native
from evermoe.planning.dispatch import SplitPolicy
from evermoe.planning.placement import PlacementPolicy
from evermoe.planning.recovery import Lagging
from evermoe.planning.schedule import ChunkPolicy

PresetName = Literal["gemini", "pec", "baft", "moetion", "lazarus", "auto"]
PRESET_NAMES: tuple[PresetName, ...] = get_args(PresetName)
Selection = Literal["all", "load-aware", "budget"]
"""Experts that are copied in a step: all, or those that a policy of `select_experts` selects."""
Copying = Literal["chosen", "everything", "to_previous", "uncovered", "nothing"]
"""Copies in addition to active holders: what `choose_copies` says; snapshots of all units to a group of peers or to the
previous node; replayed copies of what too few nodes train; none."""


class Preset(NamedTuple):
    """The planners that a preset uses, and what else differs between presets."""

    name: PresetName
    """Its name."""
    summary: str
    """Its description in one line."""
    copying: Copying
    """Copies that `plan_protection` arranges in addition to active holders."""
    selection: Selection
    """Experts that are copied in a step."""
    schedule: ChunkPolicy | None
    """Policy of `plan_chunks` by which windows are filled; None where nothing is copied in windows."""
    kinds: tuple[Literal["active", "replayed", "snapshot", "persisted"], ...]
    """Kinds of copies that protect a unit, in addition to the node that trains it."""
    placement: PlacementPolicy
    """Default policy for where experts train."""
    token_split: SplitPolicy
    """Default policy by which the replicas of an expert share its tokens."""
    lagging: Lagging
    """Whether a recovery may take experts at older versions than the rest; if needed: only with copies."""
    copies_late: bool
    """Whether the copies of a step are made during the next one: they are complete at its vote, not earlier."""
    per_expert_versions: bool
    """Whether the snapshots of each expert have versions of their own."""
    needs_checkpoint_dir: bool
    """Whether copies go to a store that all members share."""
    active_copies: bool
    """Whether `replication` counts the nodes that train each expert."""
    max_replication: int | None
    """Largest `replication` that the preset accepts; None for no limit."""
    protects_owners: bool
    """Whether a unit that one node alone trains survives its loss: in copies of every step, or in the store.

    From the store all members go back to the newest step of which all units other than experts are saved.
    """

    def replicas(self, replication: int, min_replicas: int | None) -> int:
        """Return the number of active replicas of each expert that a session wants.

        Args:
            replication: number of nodes that hold each unit.
            min_replicas: the number, where the session asks for one.
        """
        return _native.preset_replicas(self.name, replication, min_replicas)

    @property
    def chooses_copies(self) -> bool:
        """Whether `choose_copies` says how each unit is protected."""
        return self.copying == "chosen"

    @property
    def selects_by_budget(self) -> bool:
        """Whether replicas follow as many experts in a step as a budget of bytes allows."""
        return self.selection == "budget"

    @property
    def takes_turns(self) -> bool:
        """Whether a few experts at a time are copied, some into the memory of their own nodes, fewer to the store."""
        return self.selection == "load-aware"

    @property
    def copies_to_previous_node(self) -> bool:
        """Whether the previous node keeps each rank's copies, in a pipeline that of the previous stages."""
        return self.copying == "to_previous"

    @property
    def may_lose_tokens(self) -> bool:
        """Whether a recovery may lose tokens although enough nodes survive."""
        return self.lagging == "always"


PRESETS: Mapping[PresetName, Preset] = {row["name"]: Preset(**row) for row in _native.PRESETS}
"""The presets by name, as `--preset` selects them."""


class Levels(NamedTuple):
    """Experts of each layer that `pec` copies at a time to its two levels (K of snapshot-PEC and of persist-PEC)."""

    snapshot: int
    """Into the memory of their own nodes."""
    save: int
    """To the store that all members share; no more than `snapshot`."""


def levels(experts: int, per_snapshot: int | None = None, per_save: int | None = None) -> Levels:
    """Return the two levels of `pec` for a layer: by default half and a quarter of its experts.

        >>> levels(8), levels(8, per_save=6), levels(1)
        (Levels(snapshot=4, save=2), Levels(snapshot=6, save=6), Levels(snapshot=1, save=1))

    Args:
        experts: of the layer that has the most.
        per_snapshot: number for the snapshots; one larger than `experts` selects all.
        per_save: number for the store; one larger than `experts` selects all.
    """
    return Levels(*_native.levels(experts, per_snapshot, per_save))
