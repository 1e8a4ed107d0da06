"""Schedules of the learning rate: their states as JSON, their constants, and where they are after a number of steps."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from evermoe.data.plain_state import from_json, to_json
from evermoe.errors import UnsupportedState

Scheduler = torch.optim.lr_scheduler.LRScheduler
Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau

FUNCTIONS_OF = "functions of "
"""Before the names of attributes that have functions, which are always the script's."""
CLASS, FUNCTIONS, INNER = "class", "functions", "_schedulers"
"""Keys of a state besides the scheduler's own: its class, its functions, and the states of schedulers inside it."""
_RATES = frozenset(("_last_lr", "last_epoch", "_step_count"))
_PLATEAU = frozenset(("best", "num_bad_epochs", "cooldown_counter")) | _RATES
_PROGRESS = frozenset(("T_cur", "T_i", "verbose", "_get_lr_called_within_step", "_is_initial")) | _PLATEAU
"""Attributes of torch's schedulers that change as they step; all others are constants."""


class CombinedSchedule(torch.optim.lr_scheduler.LRScheduler):
    """Schedules of several optimizers as one."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._schedulers = list(schedulers)  # without the base class's constructor, which would take a first step

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all."""
        return {INNER: [each.state_dict() for each in self._schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore all."""
        for each, state in zip(self._schedulers, state_dict[INNER], strict=True):
            each.load_state_dict(state)


def as_one_schedule(given: Any) -> Any:
    """Return one schedule for one or a sequence of them, and None for an empty one; anything else as it is."""
    if isinstance(given, Sequence) and all(isinstance(each, Scheduler) for each in given):
        return CombinedSchedule(given) if len(given) > 1 else next(iter(given), None)
    return given


def schedules_of(scheduler: Scheduler | None) -> list[Scheduler]:
    """Return the schedules of a combined one; any other alone; none for None."""
    if isinstance(scheduler, CombinedSchedule):
        return scheduler._schedulers
    return [] if scheduler is None else [scheduler]


def is_of(scheduler: Scheduler | None, group: dict[str, Any], *kinds: type[Scheduler]) -> bool:
    """Whether a schedule of these kinds, of any kind without, sets the learning rate of an optimizer's group."""
    return any(
        each is group
        for schedule in schedules_of(scheduler)
        if not kinds or isinstance(schedule, kinds)
        for each in schedule.optimizer.param_groups
    )


def state_of(scheduler: Scheduler) -> dict[str, Any]:
    """Return a scheduler's state as JSON carries it, with its class, its functions' names, and inner schedulers."""
    state = {key: value for key, value in scheduler.state_dict().items() if key != INNER and is_plain(value)}
    found = {key: to_json(value) for key, value in state.items()}
    functions = {key: text for key, value in vars(scheduler).items() if (text := _functions(value))}
    found |= {CLASS: class_name(scheduler)} | ({FUNCTIONS: functions} if functions else {})
    inner = getattr(scheduler, INNER, None)
    return found | ({INNER: [state_of(each) for each in inner]} if inner else {})


def load(scheduler: Scheduler, state: dict[str, Any]) -> None:
    """The inverse of `state_of`. Functions are the script's: JSON does not carry them.

    Raises:
        UnsupportedState: the state is that of another class, or of another number of schedulers.
    """
    theirs, own = state.get(CLASS), class_name(scheduler)
    if isinstance(scheduler, CombinedSchedule):
        theirs, own = _number(theirs, state), _number(own, {INNER: scheduler._schedulers})
    if theirs not in (None, own):
        raise UnsupportedState(
            f"the job was trained with the scheduler {theirs}, and this script has {own}, which cannot continue from "
            "its state: give the session the same scheduler, or Session(resume_settings='script') to take the script's"
        )
    if isinstance(scheduler, CombinedSchedule):
        for each, own_state in zip(scheduler._schedulers, state[INNER], strict=True):
            load(each, own_state)
    else:
        scheduler.load_state_dict(_own_part(scheduler, state))


def _number(name: str | None, state: dict[str, Any]) -> str:
    return f"{name} of {len(state.get(INNER, ()))} schedulers"


def _own_part(scheduler: Scheduler, state: dict[str, Any]) -> dict[str, Any]:
    """The part of a state that the scheduler's class knows; tables are of the class that they have in the script."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key == INNER:
            found[key] = [_own_part(*each) for each in zip(scheduler._schedulers, value, strict=True)]  # type: ignore[attr-defined]
        elif key not in (CLASS, FUNCTIONS):
            mine, theirs = getattr(scheduler, key, None), from_json(value)
            found[key] = type(mine)(theirs) if isinstance(mine, dict) and isinstance(theirs, dict) else theirs
    return found


def is_plain(value: object) -> bool:
    """Whether JSON carries a value, tables with whole numbers as keys included."""
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def class_name(value: object) -> str:
    """A value's class and module; None for None."""
    return "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}"


# ---- what differs


def constants(state: dict[str, Any], where: str = "") -> dict[str, Any]:
    """The constants in a state of `state_of`, by name; those of inner schedulers after their number, as `[1].T_max`.

    Of a class that is not torch's, what has the name of one of its constructor's arguments.
    """
    known, functions = _arguments(state.get(CLASS, "")), state.get(FUNCTIONS, {})
    found = {f"{where}{FUNCTIONS_OF}{name}": ", ".join(texts) for name, texts in functions.items()}
    for key, value in state.items():
        if key == INNER:
            for number, inner in enumerate(value):
                found |= constants(inner, f"{where}[{number}].")
        elif key not in {FUNCTIONS, *functions, *_PROGRESS} and (known is None or key in known or key == CLASS):
            found[where + key] = from_json(value)
    return found


def _arguments(name: str) -> frozenset[str] | None:
    """Attributes of a class that are constants, by their names; None for one of torch's, whose progress is known."""
    module, _, _ = name.rpartition(".")
    if module.startswith("torch.optim") or not module:
        return None
    kinds = [each for each in _subclasses(Scheduler) if f"{each.__module__}.{each.__qualname__}" == name]
    return frozenset(("base_lrs", *(each for kind in kinds for each in inspect.signature(kind).parameters)))


def _subclasses(kind: type) -> list[type]:
    found: list[type] = kind.__subclasses__()
    return found + [each for inner in found for each in _subclasses(inner)]


def differences(scheduler: dict[str, Any], job: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Constants that differ between the states of the script's scheduler and the job's, by name."""
    mine, theirs = constants(scheduler), constants(job)
    if CLASS not in job:  # of a checkpoint that names neither the class nor the functions
        mine = {name: value for name, value in mine.items() if name in theirs}
    missing = "missing"
    names = mine.keys() | theirs.keys()
    both = {name: (mine.get(name, missing), theirs.get(name, missing)) for name in names}
    if mine.get(CLASS) != theirs.get(CLASS, mine.get(CLASS)):
        return {CLASS: both[CLASS]}
    return {name: (own, other) for name, (own, other) in both.items() if own != other}


def _functions(value: Any) -> list[str]:
    """Functions in an attribute of a scheduler, described as far as they can be compared."""
    values = value if isinstance(value, list) else [value]
    found = [_described(each) for each in values if callable(each) and not isinstance(each, weakref.ref | type)]
    return found if len(found) == len(values) else []


def _described(function: Any) -> str:
    if isinstance(function, functools.partial):
        given = [*map(repr, function.args), *(f"{key}={value!r}" for key, value in function.keywords.items())]
        return f"{_described(function.func)}({', '.join(given)})"
    if hasattr(function, "__qualname__"):
        return f"{function.__module__}.{function.__qualname__}"
    return class_name(function)


# ---- as if it had been stepped


def snapshot(scheduler: Scheduler) -> dict[str, Any]:
    """All of a scheduler's state, for `replay`."""
    return copy.deepcopy(scheduler.state_dict())


def replay(scheduler: Scheduler, start: dict[str, Any], steps: int, job: dict[str, Any]) -> None:
    """Brings a scheduler where that many steps bring it, with its optimizer's groups as they were at the start.

    It is stepped that often, about 6 s for a million steps: most schedules have no other form with the same rounding.
    `ReduceLROnPlateau`, which depends on the losses, takes over its progress from the job's state.

    Args:
        scheduler: of the script.
        start: its state before its first step, of `snapshot`.
        steps: to take.
        job: state of the job's scheduler; empty if it has none.
    """
    if isinstance(scheduler, CombinedSchedule):
        number = len(scheduler._schedulers)
        is_same = job.get(CLASS) == class_name(scheduler) and len(job[INNER]) == number
        states = job[INNER] if is_same else [{}] * number
        for each, own, state in zip(scheduler._schedulers, start[INNER], states, strict=True):
            replay(each, own, steps, state)
        return
    scheduler.load_state_dict(copy.deepcopy(start))
    if isinstance(scheduler, Plateau):
        if job.get(CLASS) in (None, class_name(scheduler)):
            vars(scheduler).update({key: from_json(value) for key, value in job.items() if key in _PLATEAU})
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is stepped without its optimizer, or past its end
        for _ in range(steps):
            scheduler.step()
