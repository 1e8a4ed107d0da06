"""Keepers: each keeps copies of some units, in its own way, and all are driven alike.

    replan ─ protect_all ─ wait ─ release ─ restart ─ [ before_vote ─ VOTE ─ before_update ─ update ─ after_update ]

Where training does not wait for the copies, `wait` is in the step that follows, and `release` after its vote. `settle`
may come at any time.

`Protection` drives them, on all members in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from evermoe import ops
from evermoe.options import Options, option
from evermoe.planning.presets import PRESETS, Preset, PresetName
from evermoe.planning.protection import ProtectionPlan
from evermoe.state.stored import NO_COPIES, KeptCopies, StoredUnit

SnapshotMemory = Literal["host", "gpu", "auto"]


@dataclass(frozen=True, kw_only=True)
class CopyOptions(Options):
    """What is copied, how often, and what that may cost."""

    preset: PresetName = option("auto", shared=True)
    """How the state is protected: a name of `evermoe.planning.PRESETS`."""
    copies: int = option(2, shared=True, least=0)
    """Nodes that hold each unit's state after every step, those that train on it included; 0 for no copies."""
    copy_budget: float = option(0.01, shared=True, above=0, most=1)
    """Share of a step that copies may take where they do not fit into idle time."""
    local_snapshot_interval: int | None = option(None, shared=True, least=1)
    """Steps between snapshots in the memory of a unit's own node, which outlive a crash of all processes; None: so many
    that they take no more than the budget, of which they get a tenth where the model is on the host. `gemini` and
    `baft` make them at every step."""
    replay_log_bytes: int = option(1 << 30, least=1)
    """Bound of the gradients that a member logs for the units that it keeps by repeating their steps."""
    gradient_bucket_bytes: int | None = option(None, shared=True, least=0)
    """Bytes of a member's gradients that are sent to replicas together, at least, while backward computes others. 0:
    all are sent once backward is over. None: 32 MiB where the model is on a GPU, else 0: on a CPU it costs more than it
    hides."""
    snapshot_memory: SnapshotMemory = "host"
    """Where a snapshot of state on a GPU is made. `host`: in host memory, and the optimizer's step waits until it is
    there. `gpu`: in as many bytes of the GPU's own memory, from where it goes to the host while training goes on.
    `auto`: on the GPU if that leaves a sixteenth of its memory free, once a step has shown what training takes."""
    replica_device: str = "cpu"
    """Device of the units that a member keeps for others by repeating their steps: `cpu`, or a GPU such as `cuda:1`."""
    experts_per_snapshot: int | None = option(None, shared=True, least=1)
    """Experts of each layer of which `pec` makes a snapshot at a time, in their own node's memory; None: half."""
    experts_per_save: int | None = option(None, shared=True, least=1)
    """Experts of each layer that `pec` saves to checkpoint_dir at a time, no more than those; None: a quarter."""
    expert_selection: Literal["load-aware", "sequential"] = option("load-aware", shared=True)
    """Order in which `pec` copies experts: those with the most tokens at risk, or each in its turn."""
    snapshot_interval: int | None = option(None, shared=True, least=1)
    """Steps between the versions that `gemini` and `baft` copy, each over so many steps, and between the snapshots of
    `pec`. None: as few as the idle windows need for a version, or where these have too little room, as many as lose the
    least time to delays and failures; 1 until windows are known. `pec`: 1."""
    max_lost_token_fraction: float = option(1.0, shared=True, above=0, most=1)
    """Portion of the tokens that the job may lose: `pec` saves more experts when failures have taken a larger part."""
    save_interval: int = option(1, shared=True, least=1)
    """Steps between the saves of `pec`."""
    remote_bytes_per_step: int | None = option(None, shared=True, least=0)
    """What `moetion` may send to peers in a step, all members together; None: bandwidth × time of a step, as they were
    measured, and until then an eighth of the experts' state."""
    local_bytes_per_step: int | None = option(None, shared=True, least=0)
    """What `moetion` may copy to the experts' own nodes in a step, likewise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_replica_device()
        most = self.choices.most_copies
        if most is not None and self.copies > most:
            others = ", ".join(name for name, preset in PRESETS.items() if preset.most_copies is None)
            raise ValueError(
                f"expected copies to be at most {most} with the preset {self.preset}, got {self.copies}: it copies an "
                f"expert to its own node's memory and to checkpoint_dir, not to other nodes; use one of {others}"
            )
        if (self.experts_per_save or 0) > (self.experts_per_snapshot or math.inf):
            raise ValueError(
                f"experts_per_save: expected at most experts_per_snapshot, {self.experts_per_snapshot}, got "
                f"{self.experts_per_save}: memory keeps as many experts as are saved to checkpoint_dir, or more"
            )

    def _check_replica_device(self) -> None:
        try:
            device = torch.device(self.replica_device)
        except RuntimeError:
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"expected replica_device to be cpu, cuda or cuda:N, got {self.replica_device!r}")
        if device.type == "cuda" and not ((device.index or 0) < torch.cuda.device_count() and ops.has_cuda_kernels()):
            raise ValueError(
                f"replica_device is {self.replica_device!r}, but this process has no such GPU, or this build no CUDA "
                "kernels; use cpu"
            )

    @property
    def steps_per_version(self) -> int | None:
        """Steps over which each version of the snapshots of all state is copied; None for as few as windows need."""
        return self.snapshot_interval if self.choices.copies_late else 1

    @property
    def choices(self) -> Preset:
        """What the preset stands for."""
        return PRESETS[self.preset]


@dataclass(frozen=True)
class Assignment:
    """The latest plan, and the members that it is for."""

    plan: ProtectionPlan
    active: Mapping[str, tuple[int, ...]]
    """Ranks that train each unit."""
    generation: int
    """Generation of the members."""
    member: str
    """Name of this one."""
    copies_late: bool
    """Whether the copies of a step are made during the next one: they are complete at its vote, not before."""
    copies: KeptCopies = NO_COPIES
    """Copies that members have already of the state that is protected."""
    gradient_bucket_bytes: int = 0
    """As the option of that name says, for what the job trains on."""
    is_beside: bool = False
    """Whether the copies that are missing are made beside training; nobody waits for memory to be reserved, either."""


class Keeper(Protocol):
    """Keeps copies of some units. One that has nothing to do at some point inherits the method that does nothing."""

    problem: str = ""
    """Why what was waited for is not whole, though no member is gone: this host has too little memory."""

    def replan(self, assignment: Assignment) -> None:
        """Follows a new plan from now on; `protect_all`, `release` and `restart` must follow."""

    def protect_all(self, version: int) -> Collection[str]:
        """Begins to copy all it keeps, as of `version`, to where no copy is yet; `wait` says if all came. Collective.

        Returns:
            The units of which there are new copies at once.
        """

    def wait(self) -> bool:
        """Waits until what was begun is over here; whether it is whole. False if a member was `lost`."""

    @property
    def lost(self) -> str | None:
        """Why what was begun will not be whole: a member is gone."""

    def release(self, step: int) -> None:
        """All copies of the latest plan are complete on all members, after so many steps: earlier ones are dropped."""
        return

    def restart(self, step: int) -> None:
        """Training goes on with the latest plan, after so many steps; its first copies may still be on their way."""
        return

    def before_vote(self, step: int) -> bool:
        """Waits for what must be safe before the vote that makes `step` the number of steps taken; whether it is."""
        return True

    def before_update(self) -> None:
        """The optimizer wants to write the state: waits until it may."""
        return

    def after_update(self, version: int, clip: float | None) -> None:
        """The agreed step was taken, with gradients multiplied by `clip`: the state is that of `version` now.

        None: its update was left out, so that `version` has the bytes of the version before.
        """
        return

    def lag(self, step: int) -> dict[str, int]:
        """By kind, steps by which this member's copies are behind training, of which so many steps are taken."""
        return {}

    def settle(self) -> bool:
        """Waits until nothing is under way, and begins nothing more; whether all that was is whole."""

    def stored(self) -> Iterator[tuple[StoredUnit, str]]:
        """Every whole version of every unit that it has here, and the kind of the copy."""

    def close(self) -> None:
        """Ends all threads. Nothing may be under way."""


class Due(NamedTuple):
    """What a keeper should copy after a step."""

    bundles: frozenset[int] | None = frozenset()
    """Numbers of the bundles of which snapshots are due; None for all."""
    remote: Collection[str] | None = None
    """Units that get copies on other nodes or in the folder; None: the ledger is told nothing."""
    local: Collection[str] | None = None
    """Units that get copies on their own nodes, likewise."""


class StateKeeper(Keeper, Protocol):
    """Copies states as they are, beside training, one version at a time: what is due is told to the ledger."""

    @property
    def capture_seconds(self) -> float:
        """Seconds that the latest capture took."""

    def take_skipped(self) -> list[tuple[str, int]]:
        """Units of which a copy was told to the ledger and never came to be, and its version; each once."""
        return []

    def make_room(self, step: int) -> None:
        """Waits for the version that is under way, if another one is due after so many steps."""

    def due(self, step: int, choose: Callable[[], Collection[str]] | None) -> Due:
        """What is due after so many steps; changes nothing.

        Args:
            step: steps taken.
            choose: gives the experts whose turn it is; None where the preset does not choose among them.
        """

    def start(self, version: int, due: Due) -> None:
        """Begins to copy what is due of the state, which is that of `version`."""
