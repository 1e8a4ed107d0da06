"""One parameter of a unit on its replica: its state, and a seal that reveals flipped bits."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evermoe._native import state_digest
from evermoe.copies.replay.calibrate import repeat_tensor_steps
from evermoe.errors import CorruptCopy
from evermoe.optim.masters import MASTER
from evermoe.state.unit import TensorSpec, Unit


class Part:
    """One parameter of a unit (or a row of one) with its optimizer state: the subject of one record.

    Every writer of the state seals it, and every reader checks the seal first: a bit that flips in between is detected.
    `lock` is held for all of that.
    """

    def __init__(self, unit: Unit, specs: Sequence[TensorSpec], device: torch.device) -> None:
        self.unit, self.device = unit, device
        self.layout = Unit(part_name(unit.name, specs[0].name), tuple(specs))
        self.elements = math.prod(specs[0].shape)
        self.lock = threading.Lock()
        self.state: Tensor | None = None
        """uint8 `[nbytes]` on the device."""
        self._seal: int | None = None
        self.writes = 0
        """Number of times that the state was written."""

    @property
    def name(self) -> str:
        """Names of the unit and the parameter."""
        return self.layout.name

    def install_state(self, state: Tensor, digest: int | None = None) -> None:
        """Take over a full state, uint8 `[nbytes]`; on the CPU its memory, too.

        Args:
            state: aligned for the layout's elements.
            digest: its `state_digest`, if known.
        """
        self.state = state.to(self.device)
        self.writes += 1
        self._finish()
        if digest is None or self.device.type != "cpu":
            self.seal_state()
        else:
            self._seal = digest

    def seal_state(self) -> None:
        """Declare the current bytes of the state to be right."""
        self._seal = self._sum()

    def check_seal(self) -> None:
        """Compare the state with its seal.

        Raises:
            CorruptCopy: a bit has flipped.
        """
        if self._seal != self._sum():
            raise CorruptCopy(f"{self.name}: the state differs from what was written; a bit has flipped in memory")

    def compare_digest(self, digest: int) -> None:
        """Compare the state with the trainer's `state_digest`.

        Raises:
            CorruptCopy: they differ.
        """
        if self.digest() != digest:
            raise CorruptCopy(
                f"{self.name}: the state differs from the trainer's; a step was not repeated exactly or a bit flipped"
            )

    def digest(self) -> int | None:
        """Return the `state_digest` of what was written; None without a state."""
        return self._seal if self.device.type == "cpu" else self._digest()

    def _digest(self) -> int | None:
        return None if self.state is None else state_digest([self.state.cpu().numpy()])

    def _sum(self) -> int | None:
        """Return the digest on a CPU; on a GPU the sum of words, which any flipped bit changes, to avoid a copy."""
        if self.state is None or self.device.type == "cpu":
            return self._digest()
        return sum_of_words(self.state)

    def _finish(self) -> None:
        """Wait for the GPU: the lock's next holder may be another thread, which uses another stream."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def apply_steps(self, numbers: NDArray[np.float32], gradients: list[Any], t: int | None) -> None:
        """Repeat steps in place.

        Raises:
            RuntimeError: the numbers are those of another kind of optimizer than the state's.
            CorruptCopy: the state differs from what was written.
        """
        if self.state is None or not gradients:
            return
        self.check_seal()
        steps = torch.from_numpy(numbers).view(len(gradients), -1)
        received = [None if gradient is None else tensor_of(gradient).to(self.device) for gradient in gradients]
        repeat_steps(self.layout, self.state, steps, received, t)
        self.writes += 1
        self._finish()
        self.seal_state()


def tensor_of(gradient: NDArray[Any]) -> Tensor:
    """Return a logged gradient as a tensor: float32, or bfloat16 of its bits."""
    if gradient.dtype == np.uint16:
        return torch.from_numpy(gradient.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(gradient)


def repeat_steps(layout: Unit, state: Tensor, steps: Tensor, gradients: Sequence[Tensor | None], t: int | None) -> None:
    """Repeat steps of one parameter in place.

    Args:
        layout: the parameter, then its optimizer state.
        state: its bytes, uint8 `[nbytes]`.
        steps: float32 `[len(gradients), 10 or 9]`, rows from `Arithmetic.numbers`.
        gradients: one for each step, on the state's device; None for zeros.
        t: steps that the parameter has taken then; None if unknown.

    Raises:
        RuntimeError: the numbers are those of another kind of optimizer than the state's.
    """
    views = {name.rpartition("/")[2]: view for name, view in layout.tensors(state).items()}
    p = views.pop(layout.specs[0].name.rpartition("/")[2]).view(-1)
    flat = {name: view.view(-1) for name, view in views.items()}
    rounded = None
    if MASTER in flat:
        p, rounded = flat[MASTER], p
    try:
        repeat_tensor_steps(p, flat, gradients, steps, rounded)
    except KeyError as error:
        raise RuntimeError(f"{layout.name}: a step of AdamW was received, but the state has no {error}") from None
    if "step" in flat and t is not None:
        flat["step"].fill_(t)


def part_name(unit: str, parameter: str) -> str:
    """Return the name of a unit's parameter in records."""
    return f"{unit}/{parameter}"


def parts_of(unit: Unit) -> list[list[TensorSpec]]:
    """Group a unit's tensors by parameter: `weight`, then those named `weight/…`.

    Example: weight, weight/exp_avg, bias: `[[weight, weight/exp_avg], [bias]]`.
    """
    parts: list[list[TensorSpec]] = []
    for spec in unit.specs:
        if parts and spec.name.startswith(parts[-1][0].name + "/"):
            parts[-1].append(spec)
        else:
            parts.append([spec])
    return parts


def parameters_of(unit: Unit) -> list[TensorSpec]:
    """Return a unit's parameters and buffers, without optimizer state."""
    return [specs[0] for specs in parts_of(unit)]


def sum_of_words(state: Tensor) -> int:
    """Return the sum of the words of a state, uint8 `[nbytes]`; a flipped bit changes it."""
    words = state.view(torch.int32) if len(state) % 4 == 0 else state
    return int(words.sum(dtype=torch.int64))
