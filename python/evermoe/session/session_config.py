"""Arguments of a session, checked together: combinations of groups that do not work are refused here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch.distributed.device_mesh import DeviceMesh

from evermoe.checkpoint.checkpoint_store import is_read_only
from evermoe.checkpoint.checkpointer import find_location
from evermoe.config.checkpoints import Checkpoints
from evermoe.config.copies import CopyConfig
from evermoe.config.membership import Membership
from evermoe.config.placement import Placement
from evermoe.events.base_event import Listener
from evermoe.options import Options, checked, option
from evermoe.planning.presets import PRESETS, PresetName
from evermoe.presets import PresetOptions, preset_options
from evermoe.session.step_gradients import StepGradients
from evermoe.state.deferred import Initializer, WeightSource
from evermoe.state.loop_state import Stateful, check_stateful


@dataclass(frozen=True, kw_only=True)
class SessionConfig(Options):
    """Arguments of a session, with the choices of its preset. `Session` documents them."""

    copies: CopyConfig
    membership: Membership
    placement: Placement
    checkpoints: Checkpoints
    shard_optimizer: bool | Literal["overlap"] = option(False, shared=True)
    max_grad_norm: float | None = option(None, shared=True, above=0)
    on_nonfinite: Literal["error", "skip"] = option("error", shared=True)
    seed: int | None = option(0, shared=True)
    mesh: DeviceMesh | None = option(None, shared=True)
    on_gradients: Callable[[Any], object] | None = None
    stateful: Mapping[str, Stateful] | None = option(None, shared=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stateful(self.stateful or {})
        name, choices = self.copies.name, self.copies.choices
        if choices.needs_checkpoint_dir and self.checkpoints.url is None:
            raise ValueError(
                f"the preset {name} saves to a checkpoint store: expected checkpoints to be a folder that all members "
                "share, s3://, gs:// or az://, got none"
            )
        if self.shard_optimizer and not choices.protects_owners:
            fitting = " or ".join(name for name, preset in PRESETS.items() if preset.protects_owners)
            raise ValueError(
                f"shard_optimizer={self.shard_optimizer} leaves the optimizer's state of a module to one worker, and "
                f"the preset {name} makes no copies of it: use preset {fitting}, or shard_optimizer=False"
            )

        if self.mesh is not None and choices.needs_checkpoint_dir:
            raise ValueError(
                f"preset {name} and mesh: its saves have parts of units, and shards of islands are saved complete; use "
                "another preset, with checkpoints"
            )
        if self.mesh is not None:
            for argument in ("shard_optimizer", "on_gradients"):
                if getattr(self, argument):
                    raise ValueError(
                        f"{argument} and mesh: an island's processes divide parameters and their gradients "
                        f"themselves; leave {argument} out"
                    )

    def shared(self) -> dict[str, str]:
        """Return the options that must be the same for all members, and the name of the function for gradients."""
        function = self.on_gradients
        name = getattr(function, "__qualname__", type(function).__qualname__)
        groups = {"membership": self.membership, "placement": self.placement, "checkpoints": self.checkpoints}
        by_group = {f"{group}.{key}": value for group, some in groups.items() for key, value in some.shared().items()}
        mesh = "None" if self.mesh is None else f"{self.mesh.mesh_dim_names} {tuple(self.mesh.shape)}"
        own = super().shared() | {"mesh": mesh} | {"on_gradients": "None" if function is None else name}
        return self.copies.shared() | by_group | own

    @property
    def sends_gradients(self) -> bool:
        """Whether this member sends the gradients of its steps to replicas on other members."""
        is_followed = bool(self.copies.replication) and "replayed" in self.copies.choices.kinds
        return is_followed and self.membership.trains and self.membership.lighthouse is not None


class SessionArguments(TypedDict, total=False):
    """Keyword arguments of `evermoe.Session`, for code that passes them on; `Session` documents them."""

    preset: PresetName | PresetOptions
    replication: int
    membership: Membership | None
    placement: Placement | None
    checkpoints: Checkpoints | str | Path | None
    shard_optimizer: bool | Literal["overlap"]
    max_grad_norm: float | None
    on_nonfinite: Literal["error", "skip"]
    seed: int | None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    scaler: torch.amp.GradScaler | None
    weights: WeightSource | Initializer | None
    mesh: DeviceMesh | None
    on_gradients: Callable[[StepGradients], object] | None
    stateful: Mapping[str, Stateful] | None
    on_event: Listener | Sequence[Listener]


def session_config(
    *,
    preset: str | PresetOptions = "auto",
    replication: int = 2,
    membership: Membership | None = None,
    placement: Placement | None = None,
    checkpoints: Checkpoints | str | Path | None = None,
    shard_optimizer: bool | Literal["overlap"] = False,
    max_grad_norm: float | None = None,
    on_nonfinite: Literal["error", "skip"] = "error",
    seed: int | None = 0,
    mesh: DeviceMesh | None = None,
    on_gradients: Callable[[Any], object] | None = None,
    stateful: Mapping[str, Stateful] | None = None,
) -> SessionConfig:
    """Return the checked arguments of a session, with the choices of its preset; see `Session`.

    Raises:
        ValueError: an option is wrong, or a combination of them.
    """
    chosen = preset_options(preset)
    if on_gradients is not None:
        chosen = chosen.sent_after_backward()
    copies = CopyConfig(preset=chosen, replication=replication)
    placing = checked("placement", placement, Placement | None) or Placement()
    where = checked("checkpoints", checkpoints, Checkpoints | str | Path | None)
    return SessionConfig(
        copies=copies,
        membership=checked("membership", membership, Membership | None) or Membership(),
        placement=placing.resolved(copies.choices, copies.replication),
        checkpoints=where if isinstance(where, Checkpoints) else Checkpoints(where),
        shard_optimizer=shard_optimizer,
        max_grad_norm=max_grad_norm,
        on_nonfinite=on_nonfinite,
        seed=seed,
        mesh=checked("mesh", mesh, DeviceMesh | None),
        on_gradients=on_gradients,
        stateful=stateful,
    )


def check_store(config: SessionConfig) -> None:
    """Check the location of the checkpoints.

    Raises:
        ValueError: the URL is of no known kind, has credentials, or can only be read and the preset writes to it.
        OSError: there are no credentials for it.
    """
    location = find_location(config.checkpoints)
    if config.copies.choices.needs_checkpoint_dir and location is not None and is_read_only(location):
        raise ValueError(
            f"the preset {config.copies.name} saves to a checkpoint store: expected checkpoints to be a folder that "
            f"all members share, s3://, gs:// or az://, got {config.checkpoints.url}"
        )
