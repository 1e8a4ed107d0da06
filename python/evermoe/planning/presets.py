"""Five papers and ours, as choices of one engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from evermoe.planning.copies import CopyPolicy
from evermoe.planning.placement import PlacementPolicy
from evermoe.planning.schedule import ChunkPolicy
from evermoe.planning.selection import Policy

PresetName = Literal["gemini", "pec", "baft", "moetion", "lazarus", "auto"]
PRESET_NAMES: tuple[PresetName, ...] = get_args(PresetName)
Selection = Policy | Literal["all", "none", "choose_copies"]
"""A policy of `select_experts`; everything; nothing; or what `choose_copies` says."""
CopyPlacement = CopyPolicy | Literal["training", "previous_stage", "unit", "none"]
"""A policy of `copy_holders`; `training_copy_holders`; the previous pipeline stage; `unit_copy_holders`; none."""


class Preset(NamedTuple):
    """Which planners a preset uses."""

    selection: Selection
    """What is copied."""
    schedule: ChunkPolicy | None
    """When: a policy of `plan_chunks`; None where nothing is copied in windows."""
    kinds: tuple[Literal["active", "replayed", "snapshot", "persisted"], ...]
    """What keeps a unit safe, beside the one node that trains on it."""
    copy_placement: CopyPlacement
    """Where copies are kept."""
    placement: PlacementPolicy | None
    """Where experts train; None for one replica each."""
    explanation: str
    """One line."""


PRESETS: Mapping[PresetName, Preset] = {
    "gemini": Preset(
        "all", "gemini", ("snapshot", "persisted"), "mixed", None,
        "everything to host memory of a group of peers after each step, in chunks in idle network time (SOSP'23)",
    ),
    "pec": Preset(
        "load-aware", None, ("snapshot", "persisted"), "none", None,
        "some experts of each layer to local memory and on to the store, the rest sharded; a bounded portion is lost",
    ),
    "baft": Preset(
        "all", "baft", ("snapshot",), "previous_stage", None,
        "whole units to the previous pipeline stage, packed into bubbles that both ends have",
    ),
    "moetion": Preset(
        "budget", "moetion", ("replayed", "snapshot"), "training", None,
        "the experts with the most tokens at risk, their optimizer replayed from gradients; split by bubbles",
    ),
    "lazarus": Preset(
        "none", None, ("active", "persisted"), "none", "mro",
        "experts train on several nodes by load, placed so that most losses leave one; no other copies but the store",
    ),
    "auto": Preset(
        "choose_copies", "auto", ("active", "replayed", "snapshot", "persisted"), "unit", "balanced",
        "one cost model picks the cheapest way for each unit; no step is lost where windows and memory allow",
    ),
}  # fmt: skip
"""By name, what `--preset` selects."""
