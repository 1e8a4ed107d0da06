"""How a session runs: its options, their defaults, and the environment variables that stand in for some."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from evermoe import ops
from evermoe.planning import POLICIES, PRESET_NAMES, PRESETS, PlacementPolicy, PresetName

Role = Literal["train", "replica"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """How a session runs. Arguments win over `EVERMOE_*` variables, those over the defaults."""

    lighthouse: str | None = None
    """Address of the job's Lighthouse, `http://host:port` (EVERMOE_LIGHTHOUSE). None: a job of this process alone."""
    job: str | None = None
    """Name that the job's shared memory goes by (EVERMOE_JOB; default: one that nobody finds again)."""
    node: str | None = None
    """The machine whose memory dies as one (EVERMOE_NODE; default: the host's name)."""
    members: int | None = None
    """Members that a new job waits for (EVERMOE_MEMBERS; default 1). Later ones join at any time."""
    preset: PresetName = "auto"
    """How the state is kept safe: a name of `evermoe.planning.PRESETS`."""
    role: Role = "train"
    """`replica`: this process keeps copies for the others and does not train (EVERMOE_ROLE)."""
    copies: int = 2
    """Nodes that hold each unit's state after every step, those that train on it included; 0 for no copies."""
    copy_budget: float = 0.01
    """Share of a step that copies may take where they do not fit into idle time."""
    copy_buffer_bytes: int = 1 << 20
    """Bytes of a snapshot that travel at once, at most; two such messages are under way at a time."""
    profile_steps: int = 20
    """Steps that are recorded to find the network's idle windows, in which snapshots travel from then on; 0: none, they
    travel whenever no collective runs."""
    profile_every: int = 1000
    """Steps between two such profiles. Another one follows each change of the members."""
    local_every: int | None = None
    """Steps between snapshots in the memory of a unit's own node, which outlive a crash of all processes; None: as few
    as the budget allows. `gemini` and `baft` make them at every step."""
    replay_log_bytes: int = 1 << 30
    """Bound of the gradients that a member logs for the units that it keeps by repeating their steps."""
    replica_device: str = "cpu"
    """Where the units that a member keeps for others are, and repeat their steps: `cpu`, or a GPU such as `cuda:1`."""
    experts_per_copy: int | None = None
    """Experts of each layer that `pec` saves at a step (K); None: a quarter, or one."""
    plt_limit: float = 1.0
    """Portion of the tokens that the job may lose: `pec` saves more experts when failures have taken a larger part."""
    save_every: int = 1
    """Steps between the saves of `pec`."""
    remote_bytes_per_step: int | None = None
    """What `moetion` may send to peers in a step, all members together; None: an eighth of the experts' state."""
    local_bytes_per_step: int | None = None
    """What `moetion` may copy to the experts' own nodes in a step, likewise."""
    memory_dir: str | None = None
    """Where named shared memory lives (EVERMOE_MEMORY_DIR; default /dev/shm)."""
    slots: int | None = None
    """Expert replicas per rank and layer; more where the experts need it. Default: the fewest possible plus one."""
    min_replicas: int | None = None
    """Active replicas of each expert, where slots allow; None for 1, and for `copies` with `lazarus`."""
    placement: PlacementPolicy | None = None
    """Which rank holds which expert: a policy of `evermoe.planning.place`; None: the preset's. Ranks of one node fail
    together."""
    checkpoint_dir: str | Path | None = None
    """Folder for checkpoints on a file system that all members share; None for none."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 for none. With a checkpoint_dir one is also written at the end."""
    hang_limit: float = 30.0
    """Seconds that a collective waits for a silent peer. Longer than the longest difference between members' steps
    and than a checkpoint takes to write."""
    agree_limit: float = 300.0
    """Seconds that agreement on the members may take, the Lighthouse being away included."""
    rejoin_limit: float = 30.0
    """Seconds that missing units are waited for before they count as lost: their holders may be on their way back."""
    join_every: int = 5
    """Steps between looks for new members."""
    rebalance_every: int = 100
    """Steps between looks whether the load has shifted so far that experts should move; 0 for never."""
    max_grad_norm: float | None = None
    """Clips the gradient's global norm, over all ranks' experts; None for no clipping."""
    seed: int | None = 0
    """Seeds torch's generator from (seed, step, rank) at each step: a repeated step draws the same. None: not."""

    def __post_init__(self) -> None:
        for name, least in (
            ("copies", 0),
            ("checkpoint_every", 0),
            ("rebalance_every", 0),
            ("join_every", 1),
            ("min_replicas", 1),
            ("local_every", 1),
            ("replay_log_bytes", 1),
            ("experts_per_copy", 1),
            ("remote_bytes_per_step", 0),
            ("copy_buffer_bytes", 1),
            ("profile_steps", 0),
            ("profile_every", 1),
            ("local_bytes_per_step", 0),
            ("save_every", 1),
        ):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"Session: expected {name} >= {least}, got {getattr(self, name)}")
        self._check_keeping()
        self._check_replica_device()
        if self.lighthouse is not None and self.job is None and "EVERMOE_JOB" not in os.environ:
            raise ValueError("Session: lighthouse is set, so job must name the job, the same for all members")
        if self.rejoin_limit < 0:
            raise ValueError(f"Session: expected rejoin_limit >= 0 seconds, got {self.rejoin_limit}")
        for name in ("hang_limit", "agree_limit"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Session: expected {name} > 0 seconds, got {getattr(self, name)}")
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"Session: expected slots >= 1 or None, got {self.slots}")
        if self.placement is not None and self.placement not in POLICIES:
            raise ValueError(f"Session: expected placement to be one of {', '.join(POLICIES)}, got {self.placement!r}")
        if self.checkpoint_every and self.checkpoint_dir is None:
            raise ValueError("Session: checkpoint_every is set, so checkpoint_dir must say where to write")

    def _check_keeping(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"Session: expected role to be one of {', '.join(ROLES)}, got {self.role!r}")
        if self.preset not in PRESET_NAMES:
            raise ValueError(f"Session: expected preset to be one of {', '.join(PRESET_NAMES)}, got {self.preset!r}")
        if self.preset == "pec" and self.checkpoint_dir is None:
            raise ValueError("Session: the preset pec saves to checkpoint_dir, a folder that all members share")
        if self.profile_every < self.profile_steps + 2:
            raise ValueError(
                f"Session: expected profile_every >= profile_steps + 2 = {self.profile_steps + 2}, "
                f"got {self.profile_every}"
            )
        for name in ("copy_budget", "plt_limit"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"Session: expected 0 < {name} <= 1, got {getattr(self, name)}")

    def _check_replica_device(self) -> None:
        try:
            device = torch.device(self.replica_device)
        except RuntimeError:
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"Session: expected replica_device to be cpu, cuda or cuda:N, got {self.replica_device!r}")
        if device.type == "cuda" and not ((device.index or 0) < torch.cuda.device_count() and ops.has_cuda_kernels()):
            raise ValueError(
                f"Session: replica_device is {self.replica_device!r}, but this process has no such GPU, or this build "
                "no CUDA kernels; use cpu"
            )

    def shared(self) -> str:
        """The options that must be the same for all members, as text."""
        names = ("preset", "copies", "copy_budget", "local_every", "experts_per_copy", "plt_limit", "slots")
        more = (
            "remote_bytes_per_step",
            "local_bytes_per_step",
            "save_every",
            "min_replicas",
            "placement",
            "checkpoint_every",
            "join_every",
        )
        last = ("rebalance_every", "max_grad_norm", "copy_buffer_bytes", "profile_steps", "profile_every")
        return ", ".join(f"{name}={getattr(self, name)}" for name in (*names, *more, *last))

    @property
    def replicas(self) -> int:
        """Active replicas of each expert that are wanted."""
        if self.min_replicas is not None:
            return self.min_replicas
        return max(1, self.copies) if self.preset == "lazarus" else 1

    @property
    def placement_policy(self) -> PlacementPolicy:
        """Which rank holds which expert."""
        return self.placement or PRESETS[self.preset].placement or "balanced"

    def rebalances_at(self, step: int) -> bool:
        """Whether the load is looked at before this step."""
        return step > 0 and self.rebalance_every > 0 and step % self.rebalance_every == 0


def with_environment(config: SessionConfig) -> SessionConfig:
    """Fills what was not given from `EVERMOE_*` variables, where they are set."""
    found: dict[str, Any] = {}
    for name in ("lighthouse", "job", "node", "memory_dir"):
        if getattr(config, name) is None and os.environ.get(f"EVERMOE_{name.upper()}"):
            found[name] = os.environ[f"EVERMOE_{name.upper()}"]
    if os.environ.get("EVERMOE_ROLE"):
        if os.environ["EVERMOE_ROLE"] not in ROLES:
            raise ValueError(f"EVERMOE_ROLE: expected one of {', '.join(ROLES)}, got {os.environ['EVERMOE_ROLE']!r}")
        found["role"] = os.environ["EVERMOE_ROLE"]
    if config.members is None and os.environ.get("EVERMOE_MEMBERS"):
        try:
            found["members"] = int(os.environ["EVERMOE_MEMBERS"])
        except ValueError:
            raise ValueError(f"EVERMOE_MEMBERS: expected a number, got {os.environ['EVERMOE_MEMBERS']!r}") from None
    return replace(config, **found)
