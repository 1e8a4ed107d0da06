"""The trainer's side of replicas: what happened in a step, as messages."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evermoe._native import RECORD_HEADER_BYTES, encode_gradient, seal_record
from evermoe.errors import NotReplayable, UnsupportedState
from evermoe.replay.calibrate import Arithmetic, calibrate
from evermoe.state.unit import TensorSpec, Unit

Bytes = NDArray[np.uint8]
FUSED_ROW = 8
"""Torch's fused optimizers on CPUs step the last `numel % 8` elements of a parameter in another way."""


@dataclass(frozen=True)
class Row:
    """One row of a parameter: one expert of a stack of them."""

    parameter: Tensor
    index: int


class GradientSender:
    """Makes the messages that keep a `Replica` at the state of the trainer: the full state once, then records of steps.

    Its hooks on `optimizer.step` encode the gradients right before the step, as the optimizer sees them, whatever
    reduced or clipped them. After the step, `messages` returns what to send. A state that was changed by anything but a
    step (seen by the tensors' version counters) is sent in full.

    An optimizer whose arithmetic cannot be repeated (`evermoe.replay.calibrate`) is warned of once; its state is sent
    in full after each step. So are parameters that are not float32, or not in the optimizer, where they have changed.

    Args:
        optimizer: after it got its parameters.
        units: for each unit its parameters by name, whole or as a `Row`.
        arithmetic: from `evermoe.replay.calibrate`; None to calibrate now.
        is_hooked: False for one whose caller makes the messages before each step with `next_step_messages`, and
            reports the step with `on_step`. It does not calibrate: without an arithmetic it sends full states alone.

    Raises:
        ValueError: a name is used twice, or a row is not one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Mapping[str, Mapping[str, Tensor | Row]],
        *,
        arithmetic: Arithmetic | None = None,
        is_hooked: bool = True,
    ) -> None:
        self._optimizer = optimizer
        self._arithmetic = self._calibrate() if arithmetic is None and is_hooked else arithmetic
        self._units = {unit: [_Source(unit, name, of) for name, of in named.items()] for unit, named in units.items()}
        self._sources = [source for sources in self._units.values() for source in sources]
        names = {source.record_name for source in self._sources}
        if len(names) < len(self._sources):
            raise ValueError("units: two parameters have the same unit and name joined by '/'; rename one")
        groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        for source in self._sources:
            self._set_rule(source, groups.get(id(source.parameter)))
        self._last_step: int | None = None
        self._num_steps = 0
        self._was_skipped = False
        before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        self._hooks = [before(self._before_step), after(self._after_step)] if is_hooked else []

    def layouts(self) -> list[Unit]:
        """Name and byte layout of each unit, for `Replica`; of an optimizer that is sent in full, after its first step.

        Raises:
            UnsupportedState: the optimizer keeps state that is neither a tensor of the parameter's shape nor a scalar.
        """
        return [
            Unit(unit, tuple(spec for source in sources for spec in source.specs(self._optimizer)))
            for unit, sources in self._units.items()
        ]

    def request_full_state(self, unit: str | None = None) -> None:
        """Sends the full state of a unit (None: of all) with the next messages.

        Raises:
            KeyError: there is no such unit.
        """
        for source in self._sources if unit is None else self._units[unit]:
            source.sent = None

    def messages(self, step: int) -> list[Bytes]:
        """What a replica needs to know about a step of the trainer, after `optimizer.step()` or where that was skipped.

        Args:
            step: number of the step, the last one's plus 1; after a jump all units are sent in full.

        Returns:
            One message for each parameter, uint8. The memory is used again by the next `optimizer.step()`.

        Raises:
            UnsupportedState: as of `layouts`.
            ValueError: the step is below 0.
        """
        if step < 0:
            raise ValueError(f"step: expected 0 or more, got {step}")
        if (self._last_step is not None and step != self._last_step + 1) or self._num_steps > 1:
            self.request_full_state()
        self._last_step = step
        was_skipped = self._was_skipped or self._num_steps == 0
        made = [source.message(self._optimizer, step, was_skipped) for source in self._sources]
        self._num_steps, self._was_skipped = 0, False
        return made

    def next_step_messages(self, step: int, units: Iterable[str] | None = None) -> Iterator[tuple[str, Bytes]]:
        """Messages for `Replica.receive(hold=True)` of the next step, with the current gradients.

        The gradients may still be clipped before the optimizer sees them: `Replica.release` takes the factor. A unit
        that replicas cannot follow is preceded by its full state, which is that of the step before.

        Args:
            step: number of the next step.
            units: which; None for all.

        Returns:
            Unit and message, uint8. The memory of a message is used again by the next step's.

        Raises:
            KeyError: there is no such unit.
            UnsupportedState: as of `layouts`.
        """
        numbers: dict[tuple[int, int], list[float]] = {}
        for unit in self._units if units is None else units:
            for source in self._units[unit]:
                source.draft = None
                if source.sent is None or source.sent != source.stamp(self._optimizer):
                    yield unit, source.full_state(self._optimizer, step - 1)
                if source.rule is not None:
                    self._draft(source, numbers, 1.0)
                    if source.sent is not None:
                        source.is_told = True
                        source.pending, source.draft = source.draft, None
                        yield unit, source.record(step, source.pending, source.count(self._optimizer))

    def full_state_messages(self, step: int, units: Iterable[str] | None = None) -> Iterator[tuple[str, Bytes]]:
        """Units and messages with their full state as it is now, after a step.

        Raises:
            KeyError, UnsupportedState: as of `next_step_messages`.
        """
        for unit in self._units if units is None else units:
            for source in self._units[unit]:
                yield unit, source.full_state(self._optimizer, step)

    def on_step(self, *, was_skipped: bool = False) -> None:
        """The optimizer has taken, or all have skipped, the step of the last `next_step_messages`.

        What those left out is sent in full next: torch's fused SGD does not count up the versions of what it writes.
        """
        for source in self._sources:
            if not source.is_told:
                source.sent = None
            elif source.pending is not None:
                source.draft, source.pending = source.pending, None
                source.check_step(self._optimizer, was_skipped)
                source.draft = None
                source.sent = source.sent and source.stamp(self._optimizer)
            source.is_told = False

    def close(self) -> None:
        """Takes its hooks off the optimizer. Twice is fine."""
        for hook in self._hooks:
            hook.remove()

    # ---- hooks

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], options: dict[str, Any]) -> None:
        has_closure = any(value is not None for value in (*args[1:], *options.values()))
        scale = getattr(optimizer, "grad_scale", None)
        loss_scale = 1.0 if scale is None else float(scale)
        numbers: dict[tuple[int, int], list[float]] = {}
        for source in self._sources:
            source.draft = None
            if source.rule is None:
                continue
            if has_closure or source.sent != source.stamp(optimizer):  # it computes other gradients than those here
                source.sent = None
            else:
                self._draft(source, numbers, loss_scale)

    def _draft(self, source: _Source, numbers: dict[tuple[int, int], list[float]], loss_scale: float) -> None:
        if source.rule is None or source.parameter.grad is None:
            return
        t = source.next_step(self._optimizer)
        key = source.rule.group, t
        if key not in numbers:
            group, device = self._optimizer.param_groups[source.rule.group], source.parameter.device
            row = source.rule.arithmetic.numbers(group, t, device=device, loss_scale=loss_scale)
            numbers[key] = row.tolist()
        source.encode(t, numbers[key])

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._num_steps += 1
        found = getattr(optimizer, "found_inf", None)
        self._was_skipped = found is not None and bool(found)
        for source in self._sources:
            if source.rule is None and source.parameter.grad is not None:
                source.sent = None
            elif source.rule is not None and source.sent is not None:
                source.check_step(optimizer, self._was_skipped)
                source.sent = source.sent and source.stamp(optimizer)

    # ---- what can be repeated

    def _calibrate(self) -> Arithmetic | None:
        try:
            return calibrate(self._optimizer)
        except NotReplayable as error:
            warnings.warn(f"replicas get the full state after each step, not gradients: {error}", stacklevel=3)
            return None

    def _set_rule(self, source: _Source, group: int | None) -> None:
        if self._arithmetic is None or group is None or source.parameter.dtype != torch.float32:
            return
        if source.row is not None and self._arithmetic.variant == "torch_cpu_fused" and source.elements % FUSED_ROW:
            warnings.warn(
                f"replicas get the full state of {source.record_name} after each step, not gradients: a row has "
                f"{source.elements} elements, and torch's fused optimizer only steps rows alike whose size is a "
                f"multiple of {FUSED_ROW}; use evermoe.optim",
                stacklevel=3,
            )
            return
        source.rule = _Rule(self._arithmetic, group)


@dataclass(frozen=True)
class _Rule:
    """How to repeat the steps of a parameter."""

    arithmetic: Arithmetic
    group: int
    """Its place: `load_state_dict` replaces the groups themselves."""

    def state_names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """What the optimizer keeps of the parameter."""
        if self.arithmetic.rule == "adamw":
            return ["exp_avg", "exp_avg_sq", "step"]
        return ["momentum_buffer"] if optimizer.param_groups[self.group]["momentum"] else []


@dataclass
class _Draft:
    """The encoded gradient of a step that the optimizer is about to take."""

    t: int
    numbers: list[float]
    payload: tuple[int, int, int]


class _Source:
    """One parameter of a unit, or a row of one, on the trainer."""

    def __init__(self, unit: str, name: str, of: Tensor | Row) -> None:
        self.name = name
        self.record_name = f"{unit}/{name}"
        self.parameter = of.parameter if isinstance(of, Row) else of
        self.row = of.index if isinstance(of, Row) else None
        if self.row is not None and not (self.parameter.dim() > 0 and 0 <= self.row < len(self.parameter)):
            raise ValueError(
                f"units: {self.record_name} is row {self.row} of a tensor of shape {tuple(self.parameter.shape)}"
            )
        self.elements = self._own(self.parameter).numel()
        self.rule: _Rule | None = None
        self.draft: _Draft | None = None
        self.pending: _Draft | None = None
        """Draft of the next step, sent by `GradientSender.next_step_messages` but not taken yet."""
        self.is_told = False
        """Whether replicas were sent a record of the next step."""
        self.sent: tuple[Any, ...] | None = None
        """Stamp of the state that replicas can follow; None: the full state comes next."""
        self._num_steps = 0
        self._record = np.empty(0, np.uint8)

    def _own(self, tensor: Tensor) -> Tensor:
        """The row of a tensor that has the parameter's shape."""
        is_stack = self.row is not None and tensor.shape == self.parameter.shape
        return tensor.detach()[self.row] if is_stack else tensor.detach()

    def _kept(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer.state.get(self.parameter, {})

    def stamp(self, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
        """Changes when the parameter or its state is written or replaced."""
        tensors = [self.parameter, *(v for v in self._kept(optimizer).values() if isinstance(v, Tensor))]
        return tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)

    def count(self, optimizer: torch.optim.Optimizer) -> int:
        """Steps that the parameter has taken."""
        step = self._kept(optimizer).get("step")
        return self._num_steps if step is None else int(step)

    def next_step(self, optimizer: torch.optim.Optimizer) -> int:
        """The step that it takes next, from 1, as far as its numbers depend on it."""
        if self.rule is not None and self.rule.arithmetic.rule == "sgd":
            return 1 if self._kept(optimizer).get("momentum_buffer") is None else 2
        return self.count(optimizer) + 1

    def encode(self, t: int, numbers: list[float]) -> None:
        """Writes the gradient into the record's memory; what cannot be written is sent as full state."""
        gradient = self.parameter.grad
        if gradient is None or gradient.is_sparse or gradient.dtype not in (torch.float32, torch.bfloat16):
            self.sent = None
            return
        if not len(self._record):
            self._record = np.empty(RECORD_HEADER_BYTES + 4 * self.elements, np.uint8)
        values = self._own(gradient).reshape(-1).to("cpu", non_blocking=True)  # to page-locked memory
        if gradient.is_cuda:
            torch.cuda.current_stream(gradient.device).synchronize()
        bits = values.view(torch.int16).numpy().view(np.uint16) if values.dtype == torch.bfloat16 else values.numpy()
        self.draft = _Draft(t, numbers, encode_gradient(bits, numbers, self._record))

    def check_step(self, optimizer: torch.optim.Optimizer, was_skipped: bool) -> None:
        """After the optimizer's step: counts it; where the optimizer's count is another one, the full state is next."""
        took = self.draft is not None and not was_skipped
        if took:
            self._num_steps += 1
        step = self._kept(optimizer).get("step")
        if took and self.draft is not None and step is not None and int(step) != self.draft.t:
            self.sent = None

    def message(self, optimizer: torch.optim.Optimizer, step: int, was_skipped: bool) -> Bytes:
        """The record of a step, or the full state."""
        draft, self.draft = self.draft, None
        if self.rule is None and self.sent != self.stamp(optimizer):
            self.sent = None
        if self.sent is None:
            return self.full_state(optimizer, step)
        if was_skipped or self.rule is None:
            draft = None
        return self.record(step, draft, self.count(optimizer), "skip_all" if was_skipped else "no_step")

    def record(self, step: int, draft: _Draft | None, count: int, otherwise: str = "no_step") -> Bytes:
        """The record of a step; where nothing was drafted, of this other kind, after `count` steps."""
        about: dict[str, Any] = {"name": self.record_name, "step": step, "elements": self.elements}
        if draft is None:
            record = np.empty(RECORD_HEADER_BYTES, np.uint8)
            seal_record(record, kind=otherwise, t=count, numbers=[], payload=None, **about)
            return record
        payload = draft.payload
        size = seal_record(self._record, kind="step", t=draft.t, numbers=draft.numbers, payload=payload, **about)
        return self._record[:size]

    # ---- the full state

    def specs(self, optimizer: torch.optim.Optimizer) -> list[TensorSpec]:
        """Name, shape and dtype of the parameter and its optimizer state."""
        return [
            TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors(optimizer).items()
        ]

    def _tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        own = self._own(self.parameter)
        kept = self._kept(optimizer)
        if self.rule is not None:
            # What the optimizer has not made yet starts from zeros.
            empty = {
                name: torch.zeros(()) if name == "step" else torch.zeros_like(own)
                for name in self.rule.state_names(optimizer)
            }
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

    def full_state(self, optimizer: torch.optim.Optimizer, step: int) -> Bytes:
        """Everything, as of after a step."""
        self.sent = self.stamp(optimizer)
        tensors = list(self._tensors(optimizer).values())
        sizes = [tensor.nbytes for tensor in tensors]
        record = np.empty(RECORD_HEADER_BYTES + sum(sizes), np.uint8)
        parts = torch.from_numpy(record[RECORD_HEADER_BYTES:]).split(sizes)
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor.reshape(-1).view(torch.uint8))
        about: dict[str, Any] = {"name": self.record_name, "step": step, "elements": self.elements}
        seal_record(record, kind="full_state", t=self.count(optimizer), numbers=[], payload=None, **about)
        return record
