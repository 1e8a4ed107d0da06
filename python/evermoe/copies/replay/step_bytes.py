"""A step of a unit as bytes of a size that both ends know, and the step repeated from them.

Each parameter of the unit has a head of 64 bytes (whether it took the step, its count, the step's numbers), then its
gradient. Gradients of bfloat16 parameters are bfloat16, all others float32. Both are padded to multiples of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from evermoe.copies.replay.calibrate import ADAMW_NUMBERS, SGD_NUMBERS
from evermoe.copies.replay.part import parameters_of, part_name, parts_of, repeat_steps, tensor_of
from evermoe.copies.replay.step_notes import NotedStep
from evermoe.state.unit import TensorSpec, Unit

ALIGNMENT = 64
"""Bytes of a head; gradients are padded to a multiple of it."""
_HEAD = np.dtype([("t", "<i8"), ("length", "<i4"), ("numbers", "<f4", 12)], align=True)


def step_bytes(unit: Unit) -> int:
    """Return the bytes of a unit's step."""
    return sum(ALIGNMENT + _padded(gradient_bytes(each)) for each in parameters_of(unit))


def write_step(unit: Unit, steps: Sequence[NotedStep | None], out: Tensor) -> None:
    """Write a step of a unit to `out`, uint8 `[step_bytes(unit)]`; without `steps`, one that changes nothing."""
    kept = steps or [None] * len(parts_of(unit))
    for (_, _, head, gradient), step in zip(_parts(unit, out), kept, strict=True):
        record = np.zeros((), _HEAD)
        if step is None:
            gradient.zero_()
        else:
            record["t"], record["length"] = step.t, len(step.numbers)
            record["numbers"][: len(step.numbers)] = step.numbers
            gradient.copy_(tensor_of(step.gradient))
        head[: _HEAD.itemsize] = torch.from_numpy(record.reshape(1).view(np.uint8))


def repeat_step(unit: Unit, data: Tensor, state: Tensor) -> None:
    """Repeat a step of a unit in place.

    Args:
        unit: the unit, with its tensors.
        data: the step, as `write_step` has written it.
        state: the unit's state, uint8 `[nbytes]` on the CPU.

    Raises:
        ValueError: the bytes are not those of a step.
        RuntimeError: the step is of another kind of optimizer than the state.
    """
    for specs, start, head, gradient in _parts(unit, data):
        record = head[: _HEAD.itemsize].numpy().view(_HEAD)[0]
        length, layout = int(record["length"]), Unit(part_name(unit.name, specs[0].name), tuple(specs))
        if length and length not in (SGD_NUMBERS, ADAMW_NUMBERS):
            raise ValueError(f"{layout.name}: the step has {length} numbers, expected 9 (SGD) or 10 (AdamW)")
        if length:
            numbers = torch.from_numpy(record["numbers"][:length].copy())[None]
            repeat_steps(layout, state[start : start + layout.nbytes], numbers, [gradient], int(record["t"]))


def _parts(unit: Unit, data: Tensor) -> Iterator[tuple[list[TensorSpec], int, Tensor, Tensor]]:
    """Yield each parameter's tensors, their offset in the unit, and the parameter's head and gradient in a step."""
    at = start = 0
    for specs in parts_of(unit):
        first, nbytes = at + ALIGNMENT, gradient_bytes(specs[0])
        yield specs, start, data[at:first], data[first : first + nbytes].view(_gradient_type(specs[0]))
        at = first + _padded(nbytes)
        start += sum(spec.nbytes for spec in specs)


def _gradient_type(parameter: TensorSpec) -> torch.dtype:
    return torch.bfloat16 if parameter.dtype == torch.bfloat16 else torch.float32


def gradient_bytes(parameter: TensorSpec) -> int:
    """Return the bytes of a parameter's gradient as it is sent: bfloat16 for bfloat16 parameters, else float32."""
    return parameter.nbytes // parameter.dtype.itemsize * _gradient_type(parameter).itemsize


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
