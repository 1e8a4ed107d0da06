"""One parameter of a unit on its trainer: the gradients, or full states, that replicas receive of it."""

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
from evermoe.copies.replay.calibrate import Arithmetic, Arithmetics
from evermoe.copies.replay.step_counts import Stamp, StepCounts
from evermoe.errors import UnsupportedState
from evermoe.optim.combined import each_of
from evermoe.optim.masters import HALF, MASTER
from evermoe.profile.memory import in_huge_pages
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
    """Arithmetic and group with which the steps of a parameter are repeated."""

    arithmetic: Arithmetic
    group: int
    """Index of the group: `load_state_dict` replaces the groups themselves."""

    def state_names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the names of the parameter's optimizer state."""
        if self.arithmetic.rule == "adamw":
            return ["exp_avg", "exp_avg_sq", "step"]
        return ["momentum_buffer"] if optimizer.param_groups[self.group]["momentum"] else []


def rules_of(optimizer: torch.optim.Optimizer, arithmetics: Arithmetics) -> dict[int, Rule]:
    """Return the rule of each parameter whose steps can be repeated, by its id."""
    arithmetic = [arithmetics.get(each) for each in each_of(optimizer) for _ in each.param_groups]
    return {
        id(parameter): Rule(found, number)
        for number, (group, found) in enumerate(zip(optimizer.param_groups, arithmetic, strict=True))
        if found is not None
        for parameter in group["params"]
    }


class GradientRecord(NamedTuple):
    """The record of a step whose gradient is encoded directly into the message: see `fill_frame`."""

    name: str
    step: int
    t: int
    """Steps that the parameter has taken by then."""
    numbers: list[float]
    gradient: NDArray[np.float32] | NDArray[np.uint16]
    """float32, or the bits of bfloat16; from a GPU it is complete after `wait_for_gradients`."""

    def encoded(self) -> Bytes:
        """Return the record, uint8, in new memory."""
        elements = len(self.gradient)
        record = np.empty(RECORD_HEADER_BYTES + 4 * elements, np.uint8)
        payload = encode_gradient(self.gradient, self.numbers, record)
        about: dict[str, Any] = {"name": self.name, "step": self.step, "elements": elements}
        return record[: seal_record(record, kind="step", t=self.t, numbers=self.numbers, payload=payload, **about)]


Record = Bytes | GradientRecord


def max_bytes(record: Record) -> int:
    """Return the maximum bytes of a record."""
    if isinstance(record, GradientRecord):
        return RECORD_HEADER_BYTES + record.gradient.nbytes
    return len(record)


def wait_for_gradients(devices: Iterable[torch.device]) -> None:
    """Wait until the gradients that this thread has begun to copy from devices are complete."""
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
        """Its step count after the next step, if replicas were sent its gradient and the step is not taken yet."""
        self.was_sent = False
        """Whether replicas were sent a record of the next step."""
        self.sent: Stamp | None = None
        """Stamp of the state that replicas can follow; None: the full state comes next."""
        self.digest: int | None = None
        """Digest of the state after the newest step, if replicas are to compare theirs with it."""
        self._num_steps = 0
        self._record = np.empty(0, np.uint8)

    @property
    def has_master(self) -> bool:
        """Whether its steps are those of a float32 master, which the parameter rounds."""
        return self.parameter.dtype in HALF

    def _own(self, tensor: Tensor) -> Tensor:
        """Return the row of a tensor that has the parameter's shape."""
        is_stack = self.row is not None and tensor.shape == self.parameter.shape
        return tensor.detach()[self.row] if is_stack else tensor.detach()

    def _kept(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer.state.get(self.parameter, {})

    def stamp(self) -> Stamp:
        """Return a stamp that changes when the parameter or its state is written or replaced."""
        return self._counts.stamp_of(self.parameter)

    def steps_taken(self) -> int:
        """Return the number of steps that the parameter has taken."""
        counted = self._counts.steps_of(self.parameter)
        return self._num_steps if counted is None else counted

    def next_step(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of its next step, from 1, as far as the step's numbers depend on it."""
        if self.rule is not None and self.rule.arithmetic.rule == "sgd":
            return 1 if self._kept(optimizer).get("momentum_buffer") is None else 2
        return self.steps_taken() + 1

    def gradient(self, of: Tensor | None = None) -> NDArray[np.float32] | NDArray[np.uint16] | None:
        """Return the gradient for a record; None if full states are sent. `wait_for_gradients` completes its copy.

        `of`: the parameter's gradient; None for the current one.
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

    def draft_record(self, t: int, numbers: list[float]) -> None:
        """Write the gradient into the record's memory; if that is not possible, the full state is sent."""
        gradient = self.gradient()
        if gradient is None:
            return
        if not len(self._record):
            self._record = np.empty(RECORD_HEADER_BYTES + 4 * self.elements, np.uint8)
        wait_for_gradients([self.parameter.device])
        self.draft = Draft(t, numbers, encode_gradient(gradient, numbers, self._record))

    def check_step(self, t: int) -> None:
        """Count a step after the optimizer's. If its own count is not `t` then, the full state is sent next."""
        self._num_steps += 1
        counted = self._counts.steps_of(self.parameter)
        if counted is not None and counted != t:
            self.sent = None

    def step_message(self, optimizer: torch.optim.Optimizer, step: int, was_skipped: bool) -> Bytes:
        """Return the record of a step, or the full state."""
        draft, self.draft = self.draft, None
        if self.sent != self.stamp():
            self.sent = None
        if self.sent is None:
            return self.full_state(optimizer, step)
        if was_skipped or self.rule is None:
            draft = None
        return self.step_record(step, draft, self.steps_taken(), "skip_all" if was_skipped else "no_step")

    def step_record(self, step: int, draft: Draft | None, count: int, otherwise: str = "no_step") -> Bytes:
        """Return the record of a step; without a draft, a record of the other kind after `count` steps."""
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
        """Return name, shape and dtype of the parameter and its optimizer state."""
        return [
            TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors(optimizer).items()
        ]

    def _tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        own = self._own(self.parameter)
        kept = self._kept(optimizer)
        if self.rule is not None:
            # State that the optimizer has not created yet starts from zeros, a master from its parameter.
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
        """Read the current state, and remember its digest."""
        tensors = self._tensors(optimizer).values()
        self.digest = state_digest([tensor.reshape(-1).view(torch.uint8).cpu().numpy() for tensor in tensors])

    def proof(self, step: int) -> Bytes | None:
        """Return the record with the digest that was taken after a step; only once."""
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
        """Return the record of the complete state after a step.

        Args:
            optimizer: its state is included.
            step: the trainer's step.
            memory: returns uint8 memory of this number of bytes for the record; None for new memory.
        """
        self.sent = self.stamp()
        tensors = list(self._tensors(optimizer).values())
        sizes = [tensor.nbytes for tensor in tensors]
        nbytes = RECORD_HEADER_BYTES + sum(sizes)
        record = np.empty(nbytes, np.uint8) if memory is None else memory(nbytes)
        for part, tensor in zip(torch.from_numpy(record[RECORD_HEADER_BYTES:]).split(sizes), tensors, strict=True):
            part.copy_(tensor.reshape(-1).view(torch.uint8))
        about: dict[str, Any] = {"name": self.record_name, "step": step, "elements": tensors[0].numel()}
        seal_record(record, kind="full_state", t=self.steps_taken(), numbers=[], payload=None, **about)
        return record


def take_digests(sources: Iterable[Source], optimizer: torch.optim.Optimizer) -> None:
    """Read the state of parameters, and remember the digests. Nothing may write it meanwhile."""
    for source in sources:
        source.take_digest(optimizer)


class StepNumbers:
    """Numbers of steps, which the arithmetic needs next to gradients; computed once for parameters that share them.

    Args:
        optimizer: that takes the steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[tuple[int, int], tuple[list[float], Source]] = {}
        """By the optimizer's group and the number of the step; with a parameter that has these numbers."""

    def forget_numbers(self) -> None:
        """Read all numbers again when they are needed next."""
        self._known = {}

    def reread(self) -> bool:
        """Read all numbers again; return whether they are unchanged."""
        known, self._known = self._known, {}
        return all(self.numbers_of(t, source) == numbers for (_, t), (numbers, source) in known.items())

    def numbers_of(self, t: int, source: Source, loss_scale: float = 1.0, clip: float = 1.0) -> list[float]:
        """Return the numbers of a parameter's step: see `Arithmetic.numbers`. The last two are the same for all.

        Raises:
            ValueError: the arithmetic does not support the optimizer's settings, such as a negative learning rate.
        """
        assert source.rule is not None
        rule = source.rule
        if (rule.group, t) not in self._known:
            group, device = self._optimizer.param_groups[rule.group], source.parameter.device
            row = rule.arithmetic.numbers(group, t, device=device, loss_scale=loss_scale, clip=clip)
            self._known[rule.group, t] = row.tolist(), source
        return self._known[rule.group, t][0]


class RecordMemory:
    """Memory for records that are made one after the other. Each buffer is reused in turn.

    Args:
        records: number of buffers.
    """

    def __init__(self, records: int) -> None:
        self._slots: deque[Bytes] = deque([np.empty(0, np.uint8)] * records)

    def take_buffer(self, nbytes: int) -> Bytes:
        """Return memory for the next record, uint8 `[nbytes]`."""
        slot = self._slots.popleft()
        if len(slot) < nbytes:
            slot = in_huge_pages(torch.empty(nbytes, dtype=torch.uint8)).numpy()
        self._slots.append(slot)
        return slot[:nbytes]
