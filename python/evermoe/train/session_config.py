"""All options of a session, and the environment variables that stand in for some."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from evermoe import environment
from evermoe.comm.membership_options import MembershipOptions, Role
from evermoe.events import MemberLost
from evermoe.options import checked, option
from evermoe.placement import PlacementOptions
from evermoe.planning import PRESETS, PlacementPolicy
from evermoe.protection import ProtectionOptions
from evermoe.state.loop_state import LoopOptions


@dataclass(frozen=True, kw_only=True)
class SessionConfig(MembershipOptions, ProtectionOptions, PlacementOptions, LoopOptions):
    """Options of a session. Arguments override `EVERMOE_*` variables, those a launcher's, those the defaults."""

    memory_dir: str | None = None
    """Folder of named shared memory (EVERMOE_MEMORY_DIR; default /dev/shm)."""
    max_grad_norm: float | None = option(None, shared=True, above=0)
    """Clips the gradient's global norm, over all ranks' experts; None for no clipping."""
    on_gradients: Callable[[Any], object] | None = None
    """Called in each step on each member that trains, with the reduced gradients as an `evermoe.StepGradients`, before
    they go to replicas: its changes in place are part of the step. It must change them the same way on all
    members, and is called again when a failure has interrupted the step. `max_grad_norm` clips afterwards. It costs a
    small all-reduce in each step, and no gradient is sent while backward computes others: `gradient_bucket_bytes` is 0.
    """
    on_nonfinite: Literal["error", "skip"] = option("error", shared=True)
    """Reaction to a loss or a gradient of infinity or NaN on any member: `error` ends the job with `NonFiniteLoss` on
    all, the state unchanged; `skip` leaves out that step's update on all."""
    seed: int | None = option(0, shared=True)
    """Seeds the global generators of torch, NumPy and `random` from (seed, step, rank) for the block of each step: a
    repeated step draws the same numbers. Afterwards they have the script's state again. None: they are not changed."""

    overlap_param_gather: bool = option(False, shared=True)
    """With `dense="sharded"` on CPUs: owners send updated weights while the next step's forward computes, and a module
    waits for its own parameters before its forward or `state_dict`. Between an update and the next backward, weights
    must not be read in another way. False: training waits for the weights after each update."""

    on_lost: str | Callable[[MemberLost], object] | None = None
    """Called once for each loss of a member in the job, to ask for another machine: a shell command
    (EVERMOE_ON_LOST), or a function of the event `MemberLost`, in a thread of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_gradients is not None:
            object.__setattr__(self, "gradient_bucket_bytes", 0)
        if self.overlap_param_gather and self.dense != "sharded":
            raise ValueError(
                "overlap_param_gather concerns the weights that owners send, and there are no owners with "
                f"dense={self.dense!r}: use dense='sharded', or leave the option out"
            )
        if self.choices.copies_late and self.copy_pacing == "blocking" and (self.snapshot_interval or 1) > 1:
            raise ValueError(
                "copy_pacing='blocking' waits for each version at once, so that it takes one step: expected "
                f"snapshot_interval=1 or None, got {self.snapshot_interval}; or use copy_pacing='windows'"
            )
        if self.dense == "sharded" and not self.choices.protects_owners:
            fitting = " or ".join(name for name, preset in PRESETS.items() if preset.protects_owners)
            raise ValueError(
                f"dense='sharded' leaves the optimizer's state of a module to one worker, and the preset {self.preset} "
                f"makes no copies of it: use preset {fitting}, or dense='replicated'"
            )

    def shared(self) -> dict[str, str]:
        """Return the options that must be the same for all members, and the name of `on_gradients`."""
        function = self.on_gradients
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return super().shared() | {"on_gradients": "None" if function is None else name}

    @property
    def sends_gradients(self) -> bool:
        """Whether this member sends the gradients of its steps to replicas on other members."""
        is_followed = bool(self.copies) and "replayed" in self.choices.kinds
        return is_followed and self.role == "train" and self.lighthouse is not None

    @property
    def replicas(self) -> int:
        """Wanted number of active replicas of each expert."""
        return self.choices.replicas(self.copies, self.min_replicas)

    @property
    def placement_policy(self) -> PlacementPolicy:
        """Policy that places experts on ranks."""
        return self.placement or self.choices.placement


def with_environment(config: SessionConfig) -> SessionConfig:
    """Fill missing options from `EVERMOE_*` variables, then from the variables of a launcher.

    Raises:
        ValueError: a variable is wrong, the job has no name, or a launcher has started several processes without a
            Lighthouse, which would not find each other.
    """
    found: dict[str, Any] = {}
    for name in ("lighthouse", "job", "node", "domain", "address", "memory_dir", "on_lost"):
        if getattr(config, name) is None and os.environ.get(f"EVERMOE_{name.upper()}"):
            found[name] = os.environ[f"EVERMOE_{name.upper()}"]
    if os.environ.get("EVERMOE_ALLOW_SOLO_RESUME"):
        found["allow_solo_resume"] = (
            checked("EVERMOE_ALLOW_SOLO_RESUME", os.environ["EVERMOE_ALLOW_SOLO_RESUME"], Literal["0", "1"]) == "1"
        )
    if os.environ.get("EVERMOE_SPARE"):
        found["spare"] = checked("EVERMOE_SPARE", os.environ["EVERMOE_SPARE"], Literal["0", "1"]) == "1"
    if os.environ.get("EVERMOE_ROLE"):
        found["role"] = checked("EVERMOE_ROLE", os.environ["EVERMOE_ROLE"], Role)
    if config.members is None and os.environ.get("EVERMOE_MEMBERS"):
        text = os.environ["EVERMOE_MEMBERS"]
        found["members"] = checked("EVERMOE_MEMBERS", int(text) if text.isdecimal() else text, int, least=1)
    return _with_launcher(replace(config, **found))


def _with_launcher(config: SessionConfig) -> SessionConfig:
    """Fill missing options from the variables of torchrun, srun or torchft."""
    lighthouse = config.lighthouse or environment.lighthouse()
    if lighthouse is None:
        others = environment.others()
        if others and config.members != 1:
            raise ValueError(
                f"{others}, but no Lighthouse is named: each process would train a job of its own. Start the workers "
                "with `evermoe run`; or start a Lighthouse that outlives them, `torchft_lighthouse --bind "
                "0.0.0.0:29510 --min_replicas 1`, and set TORCHFT_LIGHTHOUSE=http://HOST:29510 for all of them; or, "
                "for jobs of one process each, set EVERMOE_MEMBERS=1"
            )
        return config
    job = config.job or environment.job()
    if job is None:
        raise ValueError(
            "lighthouse (EVERMOE_LIGHTHOUSE) is set, so job (EVERMOE_JOB) must name the job, the same on all workers; "
            f"{', '.join(environment.JOBS)} do not (torchrun: --rdzv-id)"
        )
    domain, members = config.domain or environment.domain(), config.members or environment.processes()
    return replace(config, lighthouse=lighthouse, job=job, domain=domain, members=members)
