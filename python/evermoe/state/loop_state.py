"""The training loop's own small state, kept as JSON in the unit `session`.

It has the optimizer's settings, and the states of the sampler, the scheduler, the loss scale and the script's objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from evermoe.data.sampler import Sampler
from evermoe.errors import UnsupportedState
from evermoe.state import lr_schedule
from evermoe.state.lr_schedule import Scheduler


@runtime_checkable
class Stateful(Protocol):
    """Something with state."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""


PROGRESS_BYTES = 16384
"""Bytes that the training loop's own state may take as JSON in the unit `session`."""

SCHEDULED = ("lr", "betas", "momentum", "max_momentum", "base_momentum", "initial_lr")
"""Settings of an optimizer's groups that torch's schedulers change, or keep as `base_lrs`."""


def check_stateful(stateful: Mapping[str, Stateful]) -> None:
    """Check the script's own objects with state.

    Raises:
        ValueError: a name is no text, or an object has no state that can be loaded.
    """
    for name, value in stateful.items():
        if not isinstance(name, str) or not isinstance(value, Stateful):
            raise ValueError(
                "expected stateful to have names and objects with state_dict() and load_state_dict(state), got "
                f"{name!r}: {value!r}"
            )


class LoopParts(NamedTuple):
    """Parts of a training loop that have state, besides the model and the optimizer's tensors."""

    sampler: Sampler | None
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler | None
    loss_scale: Stateful | None = None
    stateful: Mapping[str, Stateful] = MappingProxyType({})
    """The script's own objects by name."""


class LoopState:
    """The loop's state as JSON, in a tensor of fixed size."""

    def __init__(self) -> None:
        self.progress = torch.zeros(PROGRESS_BYTES, dtype=torch.uint8)

    def store(self, progress: dict[str, object]) -> None:
        """Replaces the stored state.

        Raises:
            UnsupportedState: it is not JSON, or too large.
        """
        text = encoded(progress)
        if len(text) > PROGRESS_BYTES:
            raise UnsupportedState(
                f"the states of the sampler, the scheduler and the objects in stateful take {len(text)} bytes as JSON; "
                f"at most {PROGRESS_BYTES} fit"
            )
        self.progress.zero_()
        self.progress[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def load(self) -> dict[str, object]:
        """The state stored last; empty when none was."""
        text = self.progress.numpy().tobytes().rstrip(b"\0")
        return json.loads(text) if text else {}


def encoded(progress: dict[str, object]) -> bytes:
    """The state as JSON.

    Raises:
        UnsupportedState: it is not JSON.
    """
    try:
        return json.dumps(progress, sort_keys=True).encode()
    except TypeError as error:
        raise UnsupportedState(
            f"the states of the sampler, the scheduler and the objects in stateful must be JSON: {error}"
        ) from None


def collect(parts: LoopParts) -> dict[str, object]:
    """Return the state that a member needs to resume like its peers; numbers, strings, lists and dicts."""
    sampler, optimizer, scheduler, loss_scale, stateful = parts
    found: dict[str, object] = {"optimizer": [group_options(group) for group in optimizer.param_groups]}
    if sampler is not None:
        found["sampler"] = sampler.state_dict()
    if scheduler is not None:
        found["scheduler"] = lr_schedule.state_of(scheduler)
    if loss_scale is not None and loss_scale.state_dict():
        found["loss_scale"] = loss_scale.state_dict()
    if stateful:
        found["stateful"] = {name: each.state_dict() for name, each in stateful.items()}
    return found


def restore(progress: dict[str, Any], parts: LoopParts) -> None:
    """The inverse of `collect`. What only the state or only the loop has is left as it is.

    Raises:
        UnsupportedState: the state has a scheduler of another class.
    """
    sampler, optimizer, scheduler, loss_scale, stateful = parts
    if sampler is not None:
        sampler.load_state_dict(progress["sampler"])
    if scheduler is not None and "scheduler" in progress:
        lr_schedule.load(scheduler, progress["scheduler"])
    if loss_scale is not None:
        loss_scale.load_state_dict(progress.get("loss_scale", {}))
    for name, state in progress.get("stateful", {}).items():
        if name in stateful:
            stateful[name].load_state_dict(state)
    _set_groups(optimizer, progress["optimizer"])


def _set_groups(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, options, strict=True):
        _set_options(group, values)


def _set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in ((key, value) for key, value in options.items() if key in group):
        if isinstance(group[key], Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(group[key], tuple) else value


class Settings(NamedTuple):
    """The settings of a script before the first step: those of the optimizer's groups, and its schedule."""

    groups: list[dict[str, Any]]
    are_scheduled: list[bool]
    """Whether a schedule changes each group."""
    scheduler: dict[str, Any]
    """Its state as `collect` has it; empty without one."""
    start: dict[str, Any]
    """All of its state, to continue stepping it; empty where only the job's is used."""


def settings_of(parts: LoopParts, *, is_used: bool) -> Settings:
    """The settings of a script that has not trained yet; `is_used`: whether they may be used in place of the job's."""
    groups = [group_options(group) for group in parts.optimizer.param_groups]
    are_scheduled = [lr_schedule.is_of(parts.scheduler, group) for group in parts.optimizer.param_groups]
    if parts.scheduler is None:
        return Settings(groups, are_scheduled, {}, {})
    start = lr_schedule.snapshot(parts.scheduler) if is_used else {}
    return Settings(groups, are_scheduled, lr_schedule.state_of(parts.scheduler), start)


def restore_with(settings: Settings, progress: dict[str, Any], parts: LoopParts, steps: int) -> None:
    """Restores the loop with the script's optimizer settings, and its schedule after a number of steps.

    `ReduceLROnPlateau` keeps the learning rates and the progress that it has in the job.
    """
    others = {key: value for key, value in progress.items() if key != "scheduler"}
    restore(others | {"optimizer": settings.groups}, parts)
    if parts.scheduler is not None:
        lr_schedule.replay(parts.scheduler, settings.start, steps, progress.get("scheduler", {}))
    for group, job in zip(parts.optimizer.param_groups, progress["optimizer"], strict=True):
        if lr_schedule.is_of(parts.scheduler, group, lr_schedule.Plateau):
            _set_options(group, {"lr": job["lr"]})


def advance(scheduler: Scheduler | None, loss: float) -> None:
    """A step was taken.

    Args:
        scheduler: of the learning rate, if there is one.
        loss: of that step, which `ReduceLROnPlateau` looks at.
    """
    for each in lr_schedule.schedules_of(scheduler):
        if isinstance(each, lr_schedule.Plateau):
            each.step(loss)
        else:
            each.step()


def differences(progress: dict[str, Any], settings: Settings) -> dict[str, tuple[Any, Any]]:
    """Settings that differ between the script and the job: by name, the script's and the job's.

    Without those of an optimizer's groups that its schedule changes.
    """
    found = {}
    groups = zip(settings.groups, progress["optimizer"], settings.are_scheduled, strict=True)
    for group, values, is_scheduled in groups:
        for name in group.keys() & values.keys():
            theirs = tuple(values[name]) if isinstance(group[name], tuple) else values[name]
            if group[name] != theirs and not (is_scheduled and name in SCHEDULED):
                found[f"optimizer's {name}"] = group[name], theirs
    job = progress.get("scheduler", {})
    if not (settings.scheduler or job):
        return found
    if not (settings.scheduler and job):
        return found | {"scheduler": tuple(each.get(lr_schedule.CLASS, "None") for each in (settings.scheduler, job))}
    schedules = lr_schedule.differences(settings.scheduler, job)
    return found | {f"scheduler's {name}": both for name, both in schedules.items()}


def group_options(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's own settings, which schedulers change: learning rate, betas, momentum…"""
    options = {key: value for key, value in group.items() if key != "params"}
    scalars = {key: value.item() for key, value in options.items() if isinstance(value, Tensor) and value.numel() == 1}
    return {key: value for key, value in (options | scalars).items() if lr_schedule.is_plain(value)}
