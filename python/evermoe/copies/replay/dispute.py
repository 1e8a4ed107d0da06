"""States of a replica that differ from the trainer's: what a third member needs to say which of them is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evermoe._native import state_digest
from evermoe.copies.replay.part import part_name, parts_of, repeat_steps, tensor_of
from evermoe.state.unit import Unit


@dataclass(frozen=True)
class LoggedBatch:
    """Consecutive steps of a parameter, and the state before them.

    Attributes:
        state: uint8 `[nbytes]`.
        numbers: float32, those of all steps.
        gradients: of each step, float32 or the bits of bfloat16; None for zeros.
        t: number of the steps that the parameter has taken after them; None if unknown.
    """

    state: Tensor
    numbers: NDArray[np.float32]
    gradients: list[Any]
    t: int | None

    def record(self) -> dict[str, Any]:
        """Return what `repeat_batch` needs, its tensors under `tensors`."""
        given = {str(place): tensor_of(each) for place, each in enumerate(self.gradients) if each is not None}
        tensors = {"state": self.state, "numbers": torch.from_numpy(self.numbers), **given}
        return {"tensors": tensors, "steps": len(self.gradients), "t": self.t}


@dataclass(frozen=True)
class Dispute:
    """A state that differs from what its trainer says.

    Attributes:
        unit, part: names of the unit and the parameter.
        step: the trainer's step after which the states differ.
        of_trainer, own: `state_digest` of both.
        batch: the steps that the replica has repeated since the trainer had the same state; None if it no longer has
            that state.
    """

    unit: str
    part: str
    step: int
    of_trainer: int
    own: int | None
    batch: LoggedBatch | None


def repeat_batch(unit: Unit, part: str, record: Mapping[str, Any]) -> int:
    """Return the `state_digest` after a batch of steps, from `LoggedBatch.record`.

    Raises:
        KeyError: the unit has no such parameter.
        RuntimeError: the steps are of another kind of optimizer than the state's.
    """
    specs = {part_name(unit.name, each[0].name): each for each in parts_of(unit)}[part]
    tensors, state = record["tensors"], record["tensors"]["state"].clone()
    if record["steps"]:
        numbers = tensors["numbers"].view(record["steps"], -1)
        gradients = [tensors.get(str(place)) for place in range(record["steps"])]
        repeat_steps(Unit(part, tuple(specs)), state, numbers, gradients, record["t"])
    return state_digest([state.numpy()])
