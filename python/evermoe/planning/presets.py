"""Five papers and ours, as choices of one engine: what a session does and what `evermoe plan` says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from evermoe.planning.dispatch import SplitPolicy
from evermoe.planning.holders import CopyPolicy
from evermoe.planning.placement import PlacementPolicy
from evermoe.planning.recovery import Lagging
from evermoe.planning.schedule import ChunkPolicy
from evermoe.planning.selection import Policy

PresetName = Literal["gemini", "pec", "baft", "moetion", "lazarus", "auto"]
PRESET_NAMES: tuple[PresetName, ...] = get_args(PresetName)
Selection = Policy | Literal["all", "none", "choose_copies"]
"""A policy of `select_experts`; everything; nothing; or what `choose_copies` says."""
Copying = Literal["chosen", "everything", "to_previous", "uncovered", "nothing"]
"""Copies in addition to active holders: `src/protection/session_plan.rs`."""
CopyPlacement = CopyPolicy | Literal["training", "unit", "none"]
"""A policy of `copy_holders`; `training_copy_holders`; `unit_copy_holders`; none."""


class Preset(NamedTuple):
    """The planners that a preset uses, and what differs between presets beside. Nothing else asks for their names."""

    selection: Selection
    """What is copied."""
    schedule: ChunkPolicy | None
    """When: a policy of `plan_chunks`; None where nothing is copied in windows."""
    kinds: tuple[Literal["active", "replayed", "snapshot", "persisted"], ...]
    """Kinds of copies that protect a unit, in addition to the node that trains on it."""
    copy_placement: CopyPlacement
    """Place of the copies."""
    placement: PlacementPolicy
    """Policy for where experts train, unless another one is asked for; on as many nodes as slots allow."""
    summary: str
    """One line."""
    lagging: Lagging = "never"
    """Whether a recovery may take experts at older versions than the rest; if needed: only with copies."""
    copies_late: bool = False
    """Whether the copies of a step are made during the next one: they are complete at its vote, not before."""
    per_expert_versions: bool = False
    """Whether each expert's snapshots have versions of their own."""
    needs_checkpoint_dir: bool = False
    """Whether copies go to a place that all members share."""
    active_copies: bool = False
    """Whether `replication` counts the ranks that train each expert."""
    token_split: SplitPolicy = "balanced"
    """How replicas of an expert share its tokens, unless a layer says it."""

    def replicas(self, replication: int, min_replicas: int | None) -> int:
        """Active replicas of each expert that are wanted; `min_replicas`: as asked for, if so."""
        if min_replicas is not None:
            return min_replicas
        return max(1, replication) if self.active_copies else 1

    @property
    def chooses_copies(self) -> bool:
        """Whether `choose_copies` says how each unit is protected."""
        return self.selection == "choose_copies"

    @property
    def copying(self) -> Copying:
        """Which copies `plan_protection` arranges beside active holders."""
        if self.chooses_copies:
            return "chosen"
        if self.copies_to_previous_node:
            return "to_previous"
        by_placement: dict[str, Copying] = {"none": "nothing", "training": "uncovered"}
        return by_placement.get(self.copy_placement, "everything")

    @property
    def most_copies(self) -> int | None:
        """The most that `replication` may be: what a preset keeps on one node alone is on no more, whatever it says."""
        return 2 if self.copying == "nothing" and not self.active_copies else None

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
        """Whether each rank's copies are kept by the node before its own, in a pipeline that of the stages before."""
        return self.copy_placement == "previous"

    @property
    def protects_owners(self) -> bool:
        """Whether what a single rank trains survives its node: in copies of all its steps, or in the store.

        From the store all members go back to the newest step of which all that is no expert is saved.
        """
        return self.needs_checkpoint_dir or self.copy_placement != "none"

    @property
    def may_lose_tokens(self) -> bool:
        """Whether a recovery may lose tokens although enough nodes survive."""
        return self.lagging == "always"


PRESETS: Mapping[PresetName, Preset] = {
    "gemini": Preset(
        "all", "gemini", ("snapshot", "persisted"), "mixed", "balanced",
        "everything to host memory of a group of peers after each step, in chunks in idle network time (SOSP'23)",
        copies_late=True,
    ),
    "pec": Preset(
        "load-aware", None, ("snapshot", "persisted"), "none", "balanced",
        "some experts of each layer, and all else, to own memory, fewer to the store; a portion of the tokens is lost",
        lagging="always", per_expert_versions=True, needs_checkpoint_dir=True,
    ),
    "baft": Preset(
        "all", "baft", ("snapshot",), "previous", "balanced",
        "whole units to the node before in the pipeline, packed into bubbles that both ends have",
        copies_late=True,
    ),
    "moetion": Preset(
        "budget", "moetion", ("replayed", "snapshot"), "training", "balanced",
        "the experts with the most tokens at risk, their optimizer replayed from gradients; split by bubbles",
        lagging="always", per_expert_versions=True,
    ),
    "lazarus": Preset(
        "none", None, ("active", "persisted"), "none", "safest",
        "experts train on several nodes by load, placed so that most losses leave one; no other copies but the store",
        active_copies=True, token_split="even",
    ),
    "auto": Preset(
        "choose_copies", "auto", ("active", "replayed", "snapshot", "persisted"), "unit", "balanced",
        "one cost model picks the cheapest way for each unit; no step is lost where windows and memory allow",
        lagging="if needed",
    ),
}  # fmt: skip
"""The presets by name, as `--preset` selects them."""


class Levels(NamedTuple):
    """Experts of each layer that `pec` copies at a time to its two levels (K of snapshot-PEC and of persist-PEC)."""

    snapshot: int
    """Into the memory of their own nodes."""
    save: int
    """To the place that all members share; no more than `snapshot`."""


def levels(experts: int, per_snapshot: int | None = None, per_save: int | None = None) -> Levels:
    """The two levels of `pec` for a layer of so many experts: a half and a quarter, if nothing else is asked for.

        >>> levels(8), levels(8, per_save=6), levels(1)
        (Levels(snapshot=4, save=2), Levels(snapshot=6, save=6), Levels(snapshot=1, save=1))

    Args:
        experts: of the layer that has the most.
        per_snapshot: as asked for; more than there are is all.
        per_save: likewise.
    """
    save = min(experts, max(1, experts // 4) if per_save is None else per_save)
    if per_snapshot is None:
        return Levels(max(save, experts // 2), save)
    snapshot = min(experts, per_snapshot)
    return Levels(snapshot, min(save, snapshot) if per_save is None else save)
