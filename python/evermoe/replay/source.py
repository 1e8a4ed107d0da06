"""One parameter of a unit on its trainer, as its replicas are told of it: its gradients, or its full state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evermoe._native import RECORD_HEADER_BYTES, encode_gradient, seal_record, state_digest
from evermoe.errors import UnsupportedState
from evermoe.optim import HALF, MASTER
from evermoe.profile.memory import in_huge_pages
from evermoe.replay.calibrate import Arithmetic
from evermoe.replay.step_counts import Stamp, StepCounts
from evermoe.state.unit import TensorSpec

Bytes = NDArray[np.uint8]
PROOF_BYTES = 8
"""Bytes of a proof after its header."""


@dataclass(frozen=True)
class Row:
    """One row of a parameter: one expert of a stack of them."""

    parameter: Tensor
    index: int


@dataclass(frozen=True)
class Rule:
    """How to repeat the steps of a parameter."""

    arithmetic: Arithmetic
    group: int
    """Its place: `load_state_dict` replaces the groups themselves."""

    def state_names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """What the optimizer keeps of the parameter."""
        if self.arithmetic.rule == "adamw":
            return ["exp_avg", "exp_avg_sq", "step"]
        return ["momentum_buffer"] if optimizer.param_groups[self.group]["momentum"] else []


class GradientRecord(NamedTuple):
    """The record of a step whose gradient is encoded where it is sent from: see `fill_frame`."""

    name: str
    step: int
    t: int
    """Steps that the parameter has taken by then."""
    numbers: list[float]
    gradient: NDArray[np.float32] | NDArray[np.uint16]
    """float32, or the bits of bfloat16; from a GPU it is whole after `wait_for_gradients`."""

    def encoded(self) -> Bytes:
        """The record, uint8, in memory of its own."""
        elements = len(self.gradient)
        record = np.empty(RECORD_HEADER_BYTES + 4 * elements, np.uint8)
        payload = encode_gradient(self.gradient, self.numbers, record)
        about: dict[str, Any] = {"name": self.name, "step": self.step, "elements": elements}
        return record[: seal_record(record, kind="step", t=self.t, numbers=self.numbers, payload=payload, **about)]


Record = Bytes | GradientRecord


def most_bytes(record: Record) -> int:
    """Bytes of a record at most."""
    if isinstance(record, GradientRecord):
        return RECORD_HEADER_BYTES + record.gradient.nbytes
    return len(record)


def wait_for_gradients(devices: Iterable[torch.device]) -> None:
    """Waits until the gradients that this thread has begun to copy from devices are whole."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


@dataclass
class Draft:
    """The encoded gradient of a step that the optimizer is about to take."""

    t: int
    numbers: list[float]
    payload: tuple[int, int, int]


class Source:
    """One parameter of a unit, or a row of one, on the trainer."""

    def __init__(self, unit: str, name: str, of: Tensor | Row, counts: StepCounts) -> None:
        self.name, self._counts = name, counts
        self.record_name = f"{unit}/{name}"
        self.parameter = of.parameter if isinstance(of, Row) else of
        self.row = of.index if isinstance(of, Row) else None
        if self.row is not None and not (self.parameter.dim() > 0 and 0 <= self.row < len(self.parameter)):
            raise ValueError(
                f"units: {self.record_name} is row {self.row} of a tensor of shape {tuple(self.parameter.shape)}"
            )
        self.elements = self._own(self.parameter).numel()
        self.rule: Rule | None = None
        self.draft: Draft | None = None
        self.pending: int | None = None
        """Its own count of steps after the next one, if replicas were sent its gradient and it is not taken yet."""
        self.is_told = False
        """Whether replicas were sent a record of the next step."""
        self.sent: Stamp | None = None
        """Stamp of the state that replicas can follow; None: the full state comes next."""
        self.digest: int | None = None
        """That of the state after the newest step, if replicas are to compare theirs with it."""
        self._num_steps = 0
        self._record = np.empty(0, np.uint8)

    @property
    def has_master(self) -> bool:
        """Whether its steps are those of a float32 master, of which it is the rounding."""
        return self.parameter.dtype in HALF

    def _own(self, tensor: Tensor) -> Tensor:
        """The row of a tensor that has the parameter's shape."""
        is_stack = self.row is not None and tensor.shape == self.parameter.shape
        return tensor.detach()[self.row] if is_stack else tensor.detach()

    def _kept(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer.state.get(self.parameter, {})

    def stamp(self) -> Stamp:
        """Changes when the parameter or its state is written or replaced."""
        return self._counts.stamp(self.parameter)

    def count(self) -> int:
        """Steps that the parameter has taken."""
        counted = self._counts.of(self.parameter)
        return self._num_steps if counted is None else counted

    def next_step(self, optimizer: torch.optim.Optimizer) -> int:
        """The step that it takes next, from 1, as far as its numbers depend on it."""
        if self.rule is not None and self.rule.arithmetic.rule == "sgd":
            return 1 if self._kept(optimizer).get("momentum_buffer") is None else 2
        return self.count() + 1

    def gradient(self, of: Tensor | None = None) -> NDArray[np.float32] | NDArray[np.uint16] | None:
        """The gradient for a record, on its way from a GPU until `wait_for_gradients`; None: full states are sent.

        `of`: the parameter's; None for the one that it has now.
        """
        gradient = self.parameter.grad if of is None else of
        known = (self.parameter.dtype,) if self.has_master else (torch.float32, *HALF)
        if gradient is None or gradient.is_sparse or gradient.dtype not in known:
            self.sent = None
            return None
        if gradient.dtype == torch.float16:
            gradient = gradient.float()
        values = self._own(gradient).reshape(-1).to("cpu", non_blocking=True)  # to page-locked memory
        return values.view(torch.int16).numpy().view(np.uint16) if values.dtype == torch.bfloat16 else values.numpy()

    def encode(self, t: int, numbers: list[float]) -> None:
        """Writes the gradient into the record's memory; what cannot be written is sent as full state."""
        gradient = self.gradient()
        if gradient is None:
            return
        if not len(self._record):
            self._record = np.empty(RECORD_HEADER_BYTES + 4 * self.elements, np.uint8)
        wait_for_gradients([self.parameter.device])
        self.draft = Draft(t, numbers, encode_gradient(gradient, numbers, self._record))

    def check_step(self, t: int) -> None:
        """Counts a step after the optimizer's; where its own count is not `t` then, the full state is next."""
        self._num_steps += 1
        counted = self._counts.of(self.parameter)
        if counted is not None and counted != t:
            self.sent = None

    def message(self, optimizer: torch.optim.Optimizer, step: int, was_skipped: bool) -> Bytes:
        """The record of a step, or the full state."""
        draft, self.draft = self.draft, None
        if self.sent != self.stamp():
            self.sent = None
        if self.sent is None:
            return self.full_state(optimizer, step)
        if was_skipped or self.rule is None:
            draft = None
        return self.record(step, draft, self.count(), "skip_all" if was_skipped else "no_step")

    def record(self, step: int, draft: Draft | None, count: int, otherwise: str = "no_step") -> Bytes:
        """The record of a step; where nothing was drafted, of this other kind, after `count` steps."""
        about: dict[str, Any] = {"name": self.record_name, "step": step, "elements": self.elements}
        if draft is None:
            record = np.empty(RECORD_HEADER_BYTES, np.uint8)
            seal_record(record, kind=otherwise, t=count, numbers=[], payload=None, **about)
            return record
        payload = draft.payload
        size = seal_record(self._record, kind="step", t=draft.t, numbers=draft.numbers, payload=payload, **about)
        return self._record[:size]

    # ---- the state

    def specs(self, optimizer: torch.optim.Optimizer) -> list[TensorSpec]:
        """Name, shape and dtype of the parameter and its optimizer state."""
        return [
            TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors(optimizer).items()
        ]

    def _tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        own = self._own(self.parameter)
        kept = self._kept(optimizer)
        if self.rule is not None:
            # What the optimizer has not made yet starts from zeros, a master from its parameter.
            empty = {
                name: torch.zeros(()) if name == "step" else torch.zeros_like(own, dtype=torch.float32)
                for name in self.rule.state_names(optimizer)
            }
            if self.has_master:
                empty[MASTER] = own.float()
            kept = {name: zeros if kept.get(name) is None else kept[name] for name, zeros in empty.items()}
        kept = {name: value for name, value in kept.items() if value is not None}
        for name, value in kept.items():
            if not isinstance(value, Tensor) or (
                value.dim() > 0 and value.shape not in (own.shape, self.parameter.shape)
            ):
                raise UnsupportedState(
                    f"the optimizer keeps {name!r} of {self.record_name} as {type(value).__name__}; replicas hold "
                    "tensors of the parameter's shape and scalar tensors. Use evermoe.optim.AdamW, for example."
                )
        return {self.name: own} | {f"{self.name}/{key}": self._own(value) for key, value in sorted(kept.items())}

    def take_digest(self, optimizer: torch.optim.Optimizer) -> None:
        """Reads the state as it is now, and remembers its digest."""
        tensors = self._tensors(optimizer).values()
        self.digest = state_digest([tensor.reshape(-1).view(torch.uint8).cpu().numpy() for tensor in tensors])

    def proof(self, step: int) -> Bytes | None:
        """The record with the digest that was taken after a step; once."""
        digest, self.digest = self.digest, None
        if digest is None:
            return None
        record = np.empty(RECORD_HEADER_BYTES + PROOF_BYTES, np.uint8)
        record[RECORD_HEADER_BYTES:] = np.array([digest], "<u8").view(np.uint8)
        about: dict[str, Any] = {"name": self.record_name, "step": step, "elements": self.elements}
        seal_record(record, kind="proof", t=0, numbers=[], payload=None, **about)
        return record

    def full_state(
        self, optimizer: torch.optim.Optimizer, step: int, memory: Callable[[int], Bytes] | None = None
    ) -> Bytes:
        """Everything, as of after a step.

        Args:
            optimizer: whose state it has, too.
            step: the trainer's.
            memory: uint8 of so many bytes, for the record; None for new memory.
        """
        self.sent = self.stamp()
        tensors = list(self._tensors(optimizer).values())
        sizes = [tensor.nbytes for tensor in tensors]
        nbytes = RECORD_HEADER_BYTES + sum(sizes)
        record = np.empty(nbytes, np.uint8) if memory is None else memory(nbytes)
        for part, tensor in zip(torch.from_numpy(record[RECORD_HEADER_BYTES:]).split(sizes), tensors, strict=True):
            part.copy_(tensor.reshape(-1).view(torch.uint8))
        about: dict[str, Any] = {"name": self.record_name, "step": step, "elements": tensors[0].numel()}
        seal_record(record, kind="full_state", t=self.count(), numbers=[], payload=None, **about)
        return record


class StepNumbers:
    """What the arithmetic of steps needs beside gradients, once for all parameters that it is the same for.

    Args:
        optimizer: that takes the steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[tuple[int, int], tuple[list[float], Source]] = {}
        """By the optimizer's group and the number of the step; with a parameter of these."""

    def forget(self) -> None:
        """All is read anew."""
        self._known = {}

    def look_again(self) -> bool:
        """Reads all anew; whether it is as it was."""
        known, self._known = self._known, {}
        return all(self.of(t, source) == numbers for (_, t), (numbers, source) in known.items())

    def of(self, t: int, source: Source, loss_scale: float = 1.0) -> list[float]:
        """Those of a parameter's step: see `Arithmetic.numbers`.

        Raises:
            ValueError: the arithmetic cannot be repeated with the optimizer's settings, a rate below 0, say.
        """
        assert source.rule is not None
        rule = source.rule
        if (rule.group, t) not in self._known:
            group, device = self._optimizer.param_groups[rule.group], source.parameter.device
            row = rule.arithmetic.numbers(group, t, device=device, loss_scale=loss_scale)
            self._known[rule.group, t] = row.tolist(), source
        return self._known[rule.group, t][0]


class RecordMemory:
    """Memory of records that are made one after the other: each has it until so many others were made.

    Args:
        records: that have memory of their own at a time.
    """

    def __init__(self, records: int) -> None:
        self._slots: deque[Bytes] = deque([np.empty(0, np.uint8)] * records)

    def take(self, nbytes: int) -> Bytes:
        """Memory for the next record, uint8 `[nbytes]`."""
        slot = self._slots.popleft()
        if len(slot) < nbytes:
            slot = in_huge_pages(torch.empty(nbytes, dtype=torch.uint8)).numpy()
        self._slots.append(slot)
        return slot[:nbytes]
