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

__all__ = [
    "Auto",
    "Baft",
    "Gemini",
    "Lazarus",
    "Moetion",
    "Pec",
    "PipelineBaft",
    "PipelineMoetion",
]

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

    copy_buffer_bytes: int | None = option(None, shared=True, least=1)
    """Largest message of a snapshot, in bytes. Default: 4 MiB; once a faster link is measured, the power of two that it
    sends in 1 to 2 ms, up to 64 MiB: 16 MiB at 10 GB/s."""
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
    """Bytes that all members together send to peers in a step. Default: bandwidth × time of a step, as measured; until
    a link is measured an eighth of the experts' state."""
    local_bytes_per_step: int | None = option(None, shared=True, least=0)
    """Bytes that all members together copy to the experts' own nodes in a step. Default: as `remote_bytes_per_step`,
    with the bandwidth of memory."""


@dataclass(frozen=True, kw_only=True)
class Lazarus(LocalSnapshots):
    """Train each expert on several nodes, by load, placed so that most losses leave one. No other copies but snapshots.

    The snapshots are in the memory of an expert's own nodes.
    """

    name = "lazarus"


@dataclass(frozen=True, kw_only=True)
class PipelineVersions(Versions, IdleWindows):
    """Options of presets of a `PipelineSession`, which sends versions of its stages in the bubbles of the schedule."""

    sparse: bool = option(False, shared=True)
    """Whether a version has `snapshot_interval` slices, of which each step captures one, with the weights of those that
    follow, so that no step captures all of the state. A lost stage computes the steps since again, slice by slice.
    Without `snapshot_interval`: as many slices, up to 8, as fit into the bubbles; all ranks meet once when the number
    changes. Needs `localised`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparse and self.snapshot_interval == 1:
            raise ValueError(
                "sparse=True: expected snapshot_interval of 2 or more, the slices of a version, or None for as many as "
                "the bubbles need, got 1"
            )

    @property
    def slices(self) -> int | None:
        """Slices of a version: 1 unless versions are sparse; None for as many as the bubbles need."""
        return self.snapshot_interval if self.sparse else 1

    @property
    def steps_per_version(self) -> int | None:
        """Steps over which each version is sent; None for as few as the bubbles need."""
        return self.snapshot_interval


@dataclass(frozen=True, kw_only=True)
class PipelineBaft(PipelineVersions):
    """Copy all units of a stage to the previous nodes of its pipeline; the first node's go to the last one."""

    name = "baft"


@dataclass(frozen=True, kw_only=True)
class PipelineMoetion(PipelineVersions):
    """Copy only the units that fewer than `replication` nodes hold anyway, and with `expert_parallel` some experts."""

    name = "moetion"

    expert_selection: Literal["budget", "all"] | None = option(None, shared=True)
    """Experts that a version sends if the ranks of a stage divide them (`expert_parallel`). `budget`: those with the
    most tokens since their last copy, as many as `remote_bytes_per_step` allows; if their node is lost, the others
    lose what they have learned since. `all`: all experts, so that nothing is lost. Default: `budget`, or `all` with
    `sparse`."""
    remote_bytes_per_step: int | None = option(None, shared=True, least=0)
    """Bytes of experts that all ranks together send in a step with `budget`. Default: bandwidth × time of a step, as
    measured, less the bytes of other units; until a link is measured an eighth of the experts' state."""
    replay: bool = option(False, shared=True)
    """Whether a version is sent as the optimizer's step that leads to it, if the holder has the previous version: the
    gradients with which the holder repeats the step (Algorithm 3). Steps that cannot be repeated to the bit are sent
    as state, and a warning says so. Each step is a version."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replay and self.sparse:
            raise ValueError("replay=True sends complete versions: expected sparse=False, got sparse=True")
        if self.replay and self.snapshot_interval not in (None, 1):
            raise ValueError(
                "replay=True: a step leads from a version to the next: expected snapshot_interval of 1 or None, "
                f"got {self.snapshot_interval}"
            )
        if self.expert_selection == "budget" and self.sparse:
            raise ValueError(
                'expert_selection="budget" chooses among the experts of complete versions: expected sparse=False, got '
                "sparse=True"
            )

    @property
    def steps_per_version(self) -> int | None:
        """Steps over which each version is sent; None for as few as the bubbles need."""
        return 1 if self.replay else self.snapshot_interval


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


PIPELINE_BY_NAME: dict[str, type[PipelineVersions]] = {kind.name: kind for kind in (PipelineBaft, PipelineMoetion)}
"""Options of each preset of a pipeline, by its name."""


def pipeline_preset_options(preset: str | PresetOptions) -> PipelineVersions:
    """Return the options of a pipeline's preset that is given by its name or by them.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(preset, PipelineVersions):
        return preset
    found = PIPELINE_BY_NAME.get(preset) if isinstance(preset, str) else None
    if found is not None:
        return found()
    names = ", ".join(PIPELINE_BY_NAME)
    raise ValueError(
        f"expected preset of a pipeline to be one of {names}, or an evermoe.presets.PipelineBaft or PipelineMoetion, "
        f"got {preset!r}"
    )
