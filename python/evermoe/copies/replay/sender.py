"""The trainer's side of replicas: the messages that describe each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from evermoe.copies.replay.calibrate import Arithmetics, calibrate
from evermoe.copies.replay.digest_turns import DigestTurns
from evermoe.copies.replay.source import (
    Bytes,
    GradientRecord,
    Record,
    Row,
    Rule,
    Source,
    StepNumbers,
    rules_of,
    wait_for_gradients,
)
from evermoe.copies.replay.step_counts import StepCounts
from evermoe.errors import NotReplayable
from evermoe.optim.masters import HALF, takes_factor
from evermoe.process.warn import warn
from evermoe.state.still import is_still
from evermoe.state.unit import Unit

__all__ = ["FUSED_ROW", "GradientSender", "Row"]

FUSED_ROW = 8
"""Torch's fused optimizers on CPUs step the last `numel % 8` elements of a parameter with other code."""


class GradientSender:
    """Encoder of the messages that keep a `Replica` at the trainer's state: the full state once, then records of steps.

    Its hooks on `optimizer.step` encode the gradients right before the step, as the optimizer sees them, no matter what
    reduced or clipped them. After the step, `messages` returns what to send. A state that anything but a step has
    changed (detected by the tensors' version counters) is sent in full. So is the state after each step if a pre-hook
    was registered later than the sender's.

    If the optimizer's arithmetic cannot be repeated (`evermoe.copies.replay.calibrate`), the sender warns once
    and sends the state in full after each step. It does the same for changed parameters that are neither float32 nor
    have float32 masters, that have masters and an odd number of elements, or that are not in the optimizer.

    Args:
        optimizer: the optimizer, with all its parameters.
        units: the parameters of each unit by name, complete or as a `Row`.
        arithmetics: from `evermoe.copies.replay.calibrate`, by optimizer; None to calibrate now.
        is_hooked: False if the caller makes the messages before each step with `next_step_messages`, and reports the
            step with `on_step`. The sender then does not calibrate, and only sends full states of a unit with a
            parameter that has no arithmetic.

    Raises:
        ValueError: a name is used twice, or the index of a row is out of range.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Mapping[str, Mapping[str, Tensor | Row]],
        *,
        arithmetics: Arithmetics | None = None,
        is_hooked: bool = True,
    ) -> None:
        self._optimizer = optimizer
        found = self._calibrate() if arithmetics is None and is_hooked else arithmetics or {}
        self._counts = counts = StepCounts(optimizer)
        self._units = {
            unit: [Source(unit, name, of, counts) for name, of in named.items()] for unit, named in units.items()
        }
        self._sources = [source for sources in self._units.values() for source in sources]
        names = {source.record_name for source in self._sources}
        if len(names) < len(self._sources):
            raise ValueError("units: two parameters have the same unit and name joined by '/'; rename one")
        self._stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        """Ids of the parameters that an optimizer has."""
        rules = rules_of(optimizer, found)
        for sources in self._units.values():
            of_unit = [_rule(source, rules.get(id(source.parameter))) for source in sources]
            # Messages before a step have gradients or states from before it: a unit with both would be at two steps.
            is_usable = is_hooked or None not in of_unit
            for source, rule in zip(sources, of_unit, strict=True):
                source.rule = rule if is_usable else None
        self._numbers = StepNumbers(optimizer)
        self._last_step: int | None = None
        self._num_steps = 0
        self._was_skipped = False
        self.turns = DigestTurns(self._sources, optimizer)
        """Choose what replicas compare next."""
        before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        self._hooks = [before(self._before_step), after(self._after_step)] if is_hooked else []

    def layouts(self) -> list[Unit]:
        """Return name and byte layout of each unit, for `Replica`; after the first step if states are sent in full.

        Raises:
            UnsupportedState: the optimizer keeps state that is neither a tensor of the parameter's shape nor a scalar.
        """
        return [
            Unit(unit, tuple(spec for source in sources for spec in source.specs(self._optimizer)))
            for unit, sources in self._units.items()
        ]

    def request_full_state(self, unit: str | None = None) -> None:
        """Send the full state of a unit (None: of all) with the next messages.

        Raises:
            KeyError: there is no such unit.
        """
        for source in self._sources if unit is None else self._units[unit]:
            source.sent = None

    def messages(self, step: int) -> list[Bytes]:
        """Return the messages that describe a step, after `optimizer.step()` or where it was skipped.

        Args:
            step: number of the step, the previous one's plus 1; after a jump all units are sent in full.

        Returns:
            One message for each parameter, uint8. The next `optimizer.step()` reuses the memory.

        Raises:
            UnsupportedState: as of `layouts`.
            ValueError: the step is below 0.
        """
        if step < 0:
            raise ValueError(f"step: expected 0 or more, got {step}")
        self._counts.forget_counts()
        if (self._last_step is not None and step != self._last_step + 1) or self._num_steps > 1:
            self.request_full_state()
        self._last_step = step
        was_skipped = self._was_skipped or self._num_steps == 0
        made = [source.step_message(self._optimizer, step, was_skipped) for source in self._sources]
        self._num_steps, self._was_skipped = 0, False
        return made

    def next_step_messages(self, step: int, units: Iterable[str] | None = None) -> Iterator[tuple[str, Bytes]]:
        """Yield the messages of the next step for `Replica.receive(hold=True)`, with the current gradients.

        The gradients may still be clipped before the optimizer sees them: `Replica.release_held` takes the factor. A
        unit that replicas cannot follow is preceded by its full state from before the step. A unit whose digest was
        taken since then is preceded by a proof.

        Args:
            step: number of the next step.
            units: names of the units; None for all.

        Yields:
            Unit and message, uint8.

        Raises:
            KeyError: there is no such unit.
            UnsupportedState: as of `layouts`.
        """
        self.reread()
        for unit in self._units if units is None else units:
            for record in self.next_step_records(step, unit):
                if isinstance(record, GradientRecord):
                    wait_for_gradients({source.parameter.device for source in self._units[unit]})
                    yield unit, record.encoded()
                else:
                    yield unit, record

    def reread(self) -> None:
        """Read the optimizer and its state again in the next `next_step_records`."""
        self._counts.forget_counts()
        self._numbers.forget_numbers()

    def reread_numbers(self) -> bool:
        """Read the optimizer again; return whether it still has the numbers in the records since then."""
        self._counts.forget_counts()
        return self._numbers.reread()

    def next_step_records(
        self, step: int, unit: str, gradients: Mapping[int, Tensor | None] = MappingProxyType({})
    ) -> Iterator[Record]:
        """Yield the records of `next_step_messages` for one unit: the caller encodes the gradients, after `reread`.

        Gradients from a GPU are complete after `wait_for_gradients`. If records of a step are made again, the last ones
        count.

        `gradients`: by the parameter's id, gradients that replace the current ones.
        """
        is_frozen = all(self._takes_no_step(source) for source in self._units[unit])
        for source in self._units[unit]:
            gradient = gradients.get(id(source.parameter), source.parameter.grad)
            source.pending = None
            if source.sent is None or source.sent != source.stamp():
                yield source.full_state(self._optimizer, step - 1)
            elif (proof := source.proof(step - 1)) is not None:
                yield proof
            if id(source.parameter) not in self._stepped:
                gradient = None  # a parameter that no optimizer has may have one
            if source.rule is None and not (is_frozen and gradient is None):
                continue
            record: Record | None = None
            if gradient is None:
                record = source.step_record(step, None, source.steps_taken())
            elif (values := source.gradient(gradient)) is not None:
                t = source.next_step(self._optimizer)
                record = GradientRecord(source.record_name, step, t, self._numbers.numbers_of(t, source), values)
                source.pending = t
            elif source.was_sent:  # in place of the record that the replica holds
                record = source.full_state(self._optimizer, step - 1)
            if record is not None:
                source.was_sent = isinstance(record, GradientRecord) or gradient is None
                yield record

    def _takes_no_step(self, source: Source) -> bool:
        is_missing = isinstance(source.parameter, nn.Parameter) and id(source.parameter) not in self._stepped
        return is_missing or is_still(source.parameter, self._optimizer)

    def lacking(self, unit: str) -> list[Source]:
        """Return the sources of a unit that replicas cannot follow without a full state; call `reread` first."""
        return [source for source in self._units[unit] if source.sent is None or source.sent != source.stamp()]

    def proofs(self, step: int) -> list[Bytes]:
        """Return messages with digests of all parameters' state as it is now, after the step of the latest `messages`.

        A replica that has another state requests the full one. Each message has 104 bytes. Reads the complete state.
        """
        self._counts.forget_counts()
        followed = [source for source in self._sources if source.sent and source.sent == source.stamp()]
        for source in followed:
            source.take_digest(self._optimizer)
        return [proof for proof in (source.proof(step) for source in followed) if proof is not None]

    def full_state_messages(
        self, step: int, units: Iterable[str] | None = None, memory: Callable[[int], Bytes] | None = None
    ) -> Iterator[tuple[str, Bytes]]:
        """Yield units and messages with their full state as it is now, after a step.

        Args:
            step: the trainer's step.
            units: their names; None for all.
            memory: returns uint8 memory of this number of bytes for a message; None for new memory.

        Raises:
            KeyError, UnsupportedState: as of `next_step_messages`.
        """
        self._counts.forget_counts()
        for unit in self._units if units is None else units:
            for source in self._units[unit]:
                yield unit, source.full_state(self._optimizer, step, memory)

    def follow_unit(self, unit: str) -> None:
        """Record that replicas have received a unit's current state from elsewhere.

        Raises:
            KeyError: there is no such unit.
        """
        self._counts.forget_counts()
        for source in self._units[unit]:
            source.sent = source.stamp()

    def on_step(self, *, was_skipped: bool = False) -> None:
        """Record that the optimizer took, or all members skipped, the step of the last `next_step_messages`.

        Parameters that those messages left out are sent in full next: torch's fused SGD does not count the versions of
        what it writes.
        """
        self._counts.forget_counts()
        for source in self._sources:
            source.digest = None
            if not source.was_sent:
                source.sent = None
            elif source.pending is not None:
                if not was_skipped:
                    source.check_step(source.pending)
                source.sent = source.sent and source.stamp()
            source.was_sent, source.pending = False, None

    def close(self) -> None:
        """Remove the hooks from the optimizer. Calling it again has no effect."""
        for hook in self._hooks:
            hook.remove()

    # ---- hooks

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], options: dict[str, Any]) -> None:
        self._counts.forget_counts()
        clip, others = _factor(optimizer, options)
        has_others = any(value is not None for value in (*args[1:], *others.values()))  # a closure
        has_others |= next(reversed(optimizer._optimizer_step_pre_hooks)) != self._hooks[0].id
        loss_scale = 1.0 if (scale := getattr(optimizer, "grad_scale", None)) is None else float(scale)
        self._numbers.forget_numbers()
        for source in self._sources:
            source.draft = None
            if source.rule is None:
                continue
            if has_others or source.sent != source.stamp():  # other code computes other gradients than these
                source.sent = None
            elif source.parameter.grad is not None:
                t = source.next_step(optimizer)
                source.draft_record(t, self._numbers.numbers_of(t, source, loss_scale, clip))

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._counts.forget_counts()
        self._num_steps += 1
        found = getattr(optimizer, "found_inf", None)
        self._was_skipped = found is not None and bool(found)
        for source in self._sources:
            if source.rule is None and source.parameter.grad is not None:
                source.sent = None
            elif source.rule is not None and source.sent is not None:
                if source.draft is not None and not self._was_skipped:
                    source.check_step(source.draft.t)
                source.sent = source.sent and source.stamp()

    # ---- what can be repeated

    def _calibrate(self) -> Arithmetics:
        try:
            return {self._optimizer: calibrate(self._optimizer)}
        except NotReplayable as error:
            warn(f"replicas get the full state after each step, not gradients: {error}")
            return {}


def _rule(source: Source, rule: Rule | None) -> Rule | None:
    """Return the rule of a source's parameter if the steps of the source itself can be repeated by it."""
    if rule is None or source.parameter.dtype not in (torch.float32, *HALF):
        return None
    if source.has_master and source.elements % 2:  # what follows it in a replica's memory would not be aligned
        return None
    if source.row is not None and rule.arithmetic.variant == "torch_cpu_fused" and source.elements % FUSED_ROW:
        warn(
            f"replicas get the full state of {source.record_name} after each step, not gradients: a row has "
            f"{source.elements} elements, and torch's fused optimizer steps all rows the same way only if their "
            f"size is a multiple of {FUSED_ROW}; use evermoe.optim"
        )
        return None
    return rule


def _factor(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the factor of the gradients among the arguments of `step`, and the other arguments."""
    if not takes_factor(optimizer):
        return 1.0, options
    others = {name: value for name, value in options.items() if name != "factor"}
    return options.get("factor", 1.0), others
