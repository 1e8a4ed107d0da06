"""Presets with their options: ways to protect the state of a job. `Session(preset=...)` takes one, or its name.

    evermoe.Session(model, optimizer, loader, preset="gemini")
    evermoe.Session(model, optimizer, loader, preset=evermoe.presets.Pec(experts_per_save=2))

Each preset has only the options that it reads.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeVar

from evermoe.options import Options, option
from evermoe.planning import presets as planned
from evermoe.planning.presets import PresetName

__all__ = ["Auto", "Baft", "Gemini", "Lazarus", "Moetion", "Pec", "PresetOptions"]

SnapshotMemory = Literal["host", "gpu", "auto"]
_Group = TypeVar("_Group", bound="PresetOptions")


@dataclass(frozen=True, kw_only=True)
class PresetOptions(Options):
    """Options of every preset."""

    name: ClassVar[PresetName]
    """Name of the preset."""

    snapshot_memory: SnapshotMemory = "host"
    """Memory for snapshots of state on a GPU. `host`: host memory; the optimizer's step waits for the copy. `gpu`: the
    GPU's own memory, as many bytes again; training continues while they are copied to the host. `auto`: the GPU's, if
    that leaves a sixteenth of its memory free, measured once a step has shown what training takes."""

    @property
    def choices(self) -> planned.Preset:
        """Planners that the preset uses."""
        return planned.PRESETS[self.name]

    def sent_after_backward(self) -> PresetOptions:
        """Return these options where gradients are final only after backward, so that none are sent during it."""
        return self

    def group(self, kind: type[_Group]) -> _Group:
        """Return these options as those of `kind`; the defaults of `kind` if the preset has none of these options."""
        return self if isinstance(self, kind) else kind()


@dataclass(frozen=True, kw_only=True)
class IdleWindows(PresetOptions):
    """Options of presets that send snapshots while the network is idle."""

    copy_buffer_bytes: int = option(4 << 20, shared=True, least=1)
    """Largest message of a snapshot, in bytes."""
    copy_buffers: int = option(2, shared=True, least=1, most=64)
    """Messages of a snapshot in flight at a time: Gemini's b sub-buffers. With 1 each waits for the end of the previous
    one."""
    window_share: float = option(0.9, shared=True, above=0, most=1)
    """Part of an idle window that copies may use: Gemini's γ."""
    profile_steps: int = option(20, shared=True, least=0)
    """Steps that are recorded to find the network's idle windows; the first of them is enough for a first plan. 0: no
    profile; snapshots travel whenever no collective runs."""
    profile_interval: int = option(1000, shared=True, least=1)
    """Steps between two profiles. Another one follows each change of the members."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.profile_interval < self.profile_steps + 2:
            raise ValueError(
                f"expected profile_interval >= profile_steps + 2 = {self.profile_steps + 2}, "
                f"got {self.profile_interval}"
            )


@dataclass(frozen=True, kw_only=True)
class ReplayedCopies(PresetOptions):
    """Options of presets whose replicas repeat the optimizer's steps from gradients."""

    replay_log_bytes: int = option(1 << 30, least=1)
    """Bytes of gradients that a member logs at most for the units whose steps it repeats."""
    gradient_bucket_bytes: int | None = option(None, shared=True, least=0)
    """Bytes of gradients at least that are sent to replicas in one message while backward computes others. 0: all are
    sent after backward. Default: 32 MiB where the model is on a GPU, else 0, as on a CPU this costs more than it
    hides."""
    replica_device: str = "cpu"
    """Device of the units whose steps this member repeats for others: `cpu`, or a GPU such as `cuda:1`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.replica_device):
            raise ValueError(f"expected replica_device to be cpu, cuda or cuda:N, got {self.replica_device!r}")

    def sent_after_backward(self) -> ReplayedCopies:
        """Return these options where gradients are final only after backward, so that none are sent during it."""
        return replace(self, gradient_bucket_bytes=0)


@dataclass(frozen=True, kw_only=True)
class LocalSnapshots(PresetOptions):
    """Options of presets that make snapshots in the memory of a unit's own node as often as a budget allows."""

    snapshot_interval: int | None = option(None, shared=True, least=1)
    """Steps between snapshots in the memory of a unit's own node, which outlive a crash of all processes. Default: the
    fewest steps whose snapshots stay within `copy_budget`; where the model is on the host, within a tenth of it."""
    copy_budget: float = option(0.01, shared=True, above=0, most=1)
    """Fraction of a step's time that copies may take beyond idle time."""


@dataclass(frozen=True, kw_only=True)
class Versions(PresetOptions):
    """Options of presets that send versions of the complete state to peers."""

    snapshot_interval: int | None = option(None, shared=True, least=1)
    """Steps between the versions that are sent, and over which each one is sent. Default: the fewest that idle windows
    have room for; if these have too little room, the number that loses the least time to delays and failures; 1 until
    windows are known."""


@dataclass(frozen=True, kw_only=True)
class Auto(LocalSnapshots, ReplayedCopies, IdleWindows):
    """Protect each unit in the cheapest way, by one cost model. No step is lost where windows and memory allow it."""

    name = "auto"


@dataclass(frozen=True, kw_only=True)
class Gemini(Versions, IdleWindows):
    """Copy everything to the host memory of a group of peers after each step, in idle network time (SOSP'23)."""

    name = "gemini"

    copy_pacing: Literal["windows", "blocking"] = option("windows", shared=True)
    """`windows`: snapshots travel while the network is idle. `blocking`: training waits for them after each update: the
    paper's baseline, to compare with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.copy_pacing == "blocking" and (self.snapshot_interval or 1) > 1:
            raise ValueError(
                "copy_pacing='blocking' waits for each version at once, so that it takes one step: expected "
                f"snapshot_interval=1 or None, got {self.snapshot_interval}; or use copy_pacing='windows'"
            )


@dataclass(frozen=True, kw_only=True)
class Baft(Versions, IdleWindows):
    """Copy complete units to the previous node, packed into idle time that both ends have."""

    name = "baft"


@dataclass(frozen=True, kw_only=True)
class Pec(PresetOptions):
    """Copy some experts of each layer to their own node's memory, and fewer to the checkpoint store.

    A part of the tokens is lost in a failure. `checkpoints` must name a store.
    """

    name = "pec"

    experts_per_snapshot: int | None = option(None, shared=True, least=1)
    """Experts of each layer in a snapshot in their own node's memory (default: half of them)."""
    experts_per_save: int | None = option(None, shared=True, least=1)
    """Experts of each layer that are saved to the checkpoint store at a time, at most `experts_per_snapshot` (default:
    a quarter of them)."""
    expert_selection: Literal["load-aware", "sequential"] = option("load-aware", shared=True)
    """Order in which experts are copied: those with the most tokens at risk first, or one after the other."""
    snapshot_interval: int = option(1, shared=True, least=1)
    """Steps between snapshots in the memory of an expert's own node."""
    save_interval: int = option(1, shared=True, least=1)
    """Steps between saves to the checkpoint store."""
    max_lost_token_fraction: float = option(1.0, shared=True, above=0, most=1)
    """Fraction of the tokens that the job may lose: once failures have taken more, more experts are saved at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.experts_per_save or 0) > (self.experts_per_snapshot or math.inf):
            raise ValueError(
                f"experts_per_save: expected at most experts_per_snapshot, {self.experts_per_snapshot}, got "
                f"{self.experts_per_save}: memory keeps at least the experts that are saved to the checkpoint store"
            )


@dataclass(frozen=True, kw_only=True)
class Moetion(LocalSnapshots, ReplayedCopies, IdleWindows):
    """Copy the experts with the most tokens at risk to peers, as many as a budget of bytes allows.

    Tokens of experts that were not copied are lost in a failure.
    """

    name = "moetion"

    remote_bytes_per_step: int | None = option(None, shared=True, least=0)
    """Bytes that all members together send to peers in a step. Default: bandwidth × time of a step, as measured; before
    the first profile an eighth of the experts' state."""
    local_bytes_per_step: int | None = option(None, shared=True, least=0)
    """Bytes that all members together copy to the experts' own nodes in a step. Default: as `remote_bytes_per_step`,
    with the bandwidth of memory."""


@dataclass(frozen=True, kw_only=True)
class Lazarus(LocalSnapshots):
    """Train each expert on several nodes, by load, placed so that most losses leave one. No other copies but snapshots.

    The snapshots are in the memory of an expert's own nodes.
    """

    name = "lazarus"


BY_NAME: dict[str, type[PresetOptions]] = {kind.name: kind for kind in (Auto, Gemini, Baft, Pec, Moetion, Lazarus)}
"""Options of each preset, by its name."""


def preset_options(preset: str | PresetOptions) -> PresetOptions:
    """Return the options of a preset that is given by its name or by them.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(preset, PresetOptions) and type(preset) in BY_NAME.values():
        return preset
    found = BY_NAME.get(preset) if isinstance(preset, str) else None
    if found is not None:
        return found()
    names = ", ".join(BY_NAME)
    raise ValueError(f"expected preset to be one of {names}, or an object of evermoe.presets, got {preset!r}")
