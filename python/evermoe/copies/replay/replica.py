"""Replicas: the state of units that another process trains, kept current by repeating its steps.

A replica receives a unit's full state once. Then a record of each step (its numbers, and the gradient in the fewest
bytes that restore its bits) is enough. It logs records within bounded memory and applies them in batches, in the
background:

    sender = evermoe.copies.replay.GradientSender(optimizer, units)        # on the trainer
    replica = evermoe.copies.replay.Replica(layouts)                       # anywhere else, with sender.layouts()

    loss.backward(); optimizer.step()
    for message in sender.messages(step):                           # over any transport
        received = replica.receive(message)
        if received.needs_full_state:
            sender.request_full_state(received.unit)                # comes with the next step

    state = replica.catch_up("layers.0.experts.3", step)            # bit for bit the trainer's state after the step

A bit that flips in the memory of a replica is detected before it is used. Logged steps and the state are compared with
digests of what arrived and what was written, and now and then the state with a digest of the trainer's
(`GradientSender.proofs`). The unit then waits for its full state, and `take_damages` reports it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evermoe._native import RECORD_HEADER_BYTES, ReplayLog, digest
from evermoe.copies.replay.dispute import Dispute
from evermoe.copies.replay.part import Part, parts_of
from evermoe.copies.replay.repeater import Damage, Repeater
from evermoe.errors import ReplicaBehind
from evermoe.planning.protection import LOGGED_STEPS, batch_steps
from evermoe.process.native_calls import native_call
from evermoe.state.unit import Unit, digests_of

ALIGNMENT = 8
"""Bytes to which the memory of a state is aligned, at least: those of the largest element."""
CATCH_UP_THREADS = 4
"""Maximum number of threads that repeat steps just before members need the states: training may have one core."""
KEPT_STEPS = LOGGED_STEPS - 1
"""Newest steps that wait: members that survive a failure may differ by one, and a step cannot be undone."""


_Accepted = tuple[str, int | None, str, int | None]
"""Outcome of a record in `ReplayLog`: code, unit, reason, digest of a full state."""


@dataclass(frozen=True)
class Received:
    """Outcome of a message.

    Attributes:
        unit: the unit's name; None if the message is damaged and does not say.
        code: "ok", or the kind of failure: "corrupt", "unknown_version", "wrong_unit", "wrong_size", "no_state", "gap",
            "reordered", "log_full" if held steps leave no room, or "failed" if the steps could not be applied.
        reason: the same in words; empty for "ok".
    """

    unit: str | None
    code: str
    reason: str

    @property
    def needs_full_state(self) -> bool:
        """Whether the unit (all units, if it is None) follows no more steps until its full state arrives."""
        return self.code not in ("ok", "wrong_unit")


@dataclass(frozen=True)
class CaughtUp:
    """A unit's state after a step.

    Attributes:
        step: the trainer's step.
        state: uint8 `[nbytes]` on the CPU, the unit's tensors one after the other; a copy.
        digest: XXH3-64 of it, equal to the trainer's of these bytes.
    """

    step: int
    state: Tensor
    digest: int


class Replica(AbstractContextManager["Replica"]):
    """State of units that the messages of a `GradientSender` keep current.

    A background thread applies steps in batches; `receive` copies a message into the log and returns. If the log is
    full, `receive` applies some steps first. `close` ends the thread; a replica is also a context manager.

    Args:
        units: name and layout of each unit, from `GradientSender.layouts` or `TrainingState.units`.
        device: device on which states are kept and steps are applied.
        log_bytes: bound of the log; at least one float32 gradient of the largest parameter.
        kept_steps: newest steps that are not applied until `catch_up` asks for them, so that it can also return an
            earlier step; fewer if the log is full.
        keeps_disputes: a state that differs from the trainer's digest, and not from what the replica has written, stays
            here until `end_disputes`, as another member may find that the trainer's is wrong, or until it is read.

    Raises:
        ValueError: a name is used twice, or `log_bytes` is too small.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        *,
        device: torch.device | str = "cpu",
        log_bytes: int = 1 << 30,
        kept_steps: int = KEPT_STEPS,
        keeps_disputes: bool = False,
    ) -> None:
        self._kept_steps, own = kept_steps, torch.device(device)
        if own.type == "cuda" and own.index is None:  # each thread has its own current GPU
            own = torch.device("cuda", torch.cuda.current_device())
        self._units: dict[str, list[int]] = {}
        self._parts: list[Part] = []
        for unit in units:
            if unit.name in self._units:
                raise ValueError(f"units: {unit.name!r} is used twice; names must be unique")
            first = len(self._parts)
            self._parts += [Part(unit, specs, own) for specs in parts_of(unit)]
            self._units[unit.name] = list(range(first, len(self._parts)))
        self._log = ReplayLog([(part.name, part.elements, part.layout.nbytes) for part in self._parts], log_bytes)
        self._repeater = Repeater(self._parts, self._log, keeps_disputes=keeps_disputes)
        self._batches = [batch_steps(part.elements) + kept_steps for part in self._parts]
        """Number of logged steps at which a batch of them is applied."""
        self._waiting = threading.Condition()
        self._work: dict[int, None] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._apply_in_background, name="evermoe-replica", daemon=True)
        self._thread.start()

    def receive(
        self, message: bytes | bytearray | memoryview | NDArray[np.uint8], *, hold: bool = False, keep: bool = False
    ) -> Received:
        """Take over one message; its memory is the caller's again afterwards. Call it from one thread at a time.

        Args:
            message: one of `GradientSender.messages` or `next_step_messages`.
            hold: a step does not count before `release_held`, since the trainers have not agreed on it yet.
            keep: a full state stays in the message's memory, which belongs to the replica from then on and must be
                aligned to 8 bytes.

        Returns:
            The outcome. A damaged, missing or reordered message raises no exception: the unit keeps its state, and
            follows no more steps until its full state arrives.

        Raises:
            ValueError: the replica is closed, or the memory to keep is read-only.
        """
        if self._closed:
            raise ValueError("Replica.receive: the replica is closed")
        record = np.frombuffer(message, np.uint8)
        if keep and not record.flags.writeable:
            raise ValueError("Replica.receive: keep=True needs writable memory, got a read-only message")
        return self._take(record, hold, self._log.accept(record, hold), keep=keep)

    def begin_with(self, unit: str, step: int, state: Tensor) -> None:
        """Take over a unit's full state that is already on this host, and its memory.

        Args:
            unit: its name.
            step: number of the trainer's steps before the state.
            state: uint8 `[nbytes]` on the CPU, the unit's tensors one after the other.

        Raises:
            KeyError: there is no such unit.
        """
        sizes = [self._parts[index].layout.nbytes for index in self._units[unit]]
        for index, part in zip(self._units[unit], state.split(sizes), strict=True):
            self._log.begin(index, step)
            self._repeater.install_state(index, part if part.data_ptr() % ALIGNMENT == 0 else part.clone())

    def hold_all(self, messages: NDArray[np.uint8], sizes: list[int]) -> tuple[int, list[Received]]:
        """Take over messages of one step, like `receive` with `hold`.

        Args:
            messages: uint8, one after the other.
            sizes: bytes of each.

        Returns:
            The number of steps held, and the outcomes of all messages that were damaged, missing or reordered.

        Raises:
            ValueError: the replica is closed.
        """
        if self._closed:
            raise ValueError("Replica.hold_all: the replica is closed")
        held, others, number, start = 0, [], 0, 0
        while number < len(sizes):
            count, other = self._log.hold_all(messages[start:], sizes[number:])
            held, start, number = held + count, start + sum(sizes[number : number + count]), number + count
            if other is not None:  # a record that the log alone cannot take
                end = start + sizes[number]
                received = self._take(messages[start:end], True, other)
                held += received.code == "ok"
                if received.code != "ok":
                    others.append(received)
                start, number = end, number + 1
        return held, others

    def release_held(self, *, clip: float | None = 1.0) -> None:
        """Count the held steps from now on, with gradients multiplied by `clip` before the optimizer saw them.

        None: the optimizer skipped them, so they count and change nothing.
        """
        self._log.release(clip)
        waiting = enumerate(self._log.waiting())
        self._wake([index for index, steps in waiting if steps is not None and steps >= self._batches[index]])

    def version(self, unit: str) -> int | None:
        """Return the newest step of the trainer that the unit can be brought to; None before its full state arrived."""
        newest = [self._log.newest(index) for index in self._units[unit]]
        return None if None in newest else min(step for step in newest if step is not None)

    def oldest(self, unit: str) -> int | None:
        """Return the oldest step that the unit can be brought to; None before its full state arrived."""
        applied = [self._log.version(index) for index in self._units[unit]]
        return None if None in applied else max(step for step in applied if step is not None)

    def needs_full_state(self) -> list[str]:
        """Return the units that follow no more steps until their full state arrives."""
        return [name for name, parts in self._units.items() if any(self._log.needs_state(part) for part in parts)]

    def take_damages(self) -> list[Damage]:
        """Return the damage that was found since the previous call; each unit waits for its full state."""
        return self._repeater.take_damages()

    @property
    def dispute(self) -> Dispute | None:
        """The first state that differs from the trainer's, if there is one."""
        return next(iter([*self._repeater.disputes.values()]), None)

    def end_disputes(self, trusted: Collection[str] = ()) -> None:
        """Take the trainer's word: each unit in dispute waits for its full state.

        `trusted`: units whose trainer was found to be wrong. Their states stay, and its digests do not count any more.
        """
        self._repeater.end_disputes({index for unit in trusted for index in self._units[unit]})

    @property
    def log_nbytes(self) -> int:
        """Current bytes of the log."""
        return self._log.nbytes

    def catch_up(self, unit: str, step: int | None = None) -> CaughtUp:
        """Apply the logged steps up to a step, and return the state.

        Args:
            unit: its name.
            step: a step of the trainer; None for the newest.

        Raises:
            KeyError: there is no such unit.
            ReplicaBehind: the step has not arrived, or later steps were already applied.
        """
        if step is None:
            step = self.version(unit) or 0
        state = self.read(unit, step)
        return CaughtUp(step, state, digest(state.numpy()))

    def read(self, unit: str, step: int, out: Tensor | None = None, *, lends: bool = False) -> Tensor:
        """Return the state of `catch_up`, without its digest, in new memory or in `out`; raise the same errors.

        With `lends`, it may be the replica's own memory, which the next step of the unit writes.
        """
        newest = self.version(unit)
        if newest is None:
            raise ReplicaBehind(f"{unit}: no full state has arrived, or its steps could not be applied; send it again")
        if step > newest:
            raise ReplicaBehind(f"{unit}: step {step} has not arrived, the newest is {newest}; request its full state")
        indices = self._units[unit]
        if lends and len(indices) == 1 and self._parts[indices[0]].device.type == "cpu":
            with self._parts[indices[0]].lock:
                return self._repeater.state_locked(indices[0], step)
        sizes = [self._parts[index].layout.nbytes for index in indices]
        state = torch.empty(sum(sizes), dtype=torch.uint8) if out is None else out[: sum(sizes)]
        for index, part in zip(indices, state.split(sizes), strict=True):
            with self._parts[index].lock:
                part.copy_(self._repeater.state_locked(index, step))
        return state

    def catch_up_all(self, units: Iterable[str] | None = None) -> Iterator[None]:
        """Bring units that have a state (None: all) to their newest step, some at a time, for `survey`.

        Yields after each parameter and unit. A caller that stops early waits only for those in progress.
        """
        steps = {unit: self.version(unit) for unit in (self._units if units is None else units)}
        found = [(self._units[unit], step) for unit, step in steps.items() if step is not None]
        to_apply = [(index, step) for indices, step in found for index in indices]
        on_host = [(each, step) for each, step in found if all(self._parts[i].device.type == "cpu" for i in each)]
        pool = ThreadPoolExecutor(CATCH_UP_THREADS, "evermoe-catch-up")
        try:
            yield from pool.map(lambda each: self._repeater.catch_up(*each), to_apply)
            yield from pool.map(lambda each: self._repeater.find_digest(*each), on_host)
        finally:
            pool.shutdown(cancel_futures=True)

    def survey(self, units: Iterable[str] | None = None) -> list[tuple[str, int, int]]:
        """Return unit, step and digest of units that have a state, each at its newest step; on the CPU without a copy.

        `units`: their names; None for all. The digest is the one that `catch_up_all` computed, if the unit was not
        written since.
        """
        known: list[tuple[str, int, int]] = []
        found: list[tuple[str, int]] = []
        states: list[list[Tensor]] = []
        with ExitStack() as locks:
            for unit in self._units if units is None else units:
                step, indices = self.version(unit), self._units[unit]
                if step is None:
                    continue
                for index in indices:
                    locks.enter_context(self._parts[index].lock)
                value = self._repeater.digest_locked(indices, step)
                if value is not None:
                    known.append((unit, step, value))
                    continue
                try:
                    states.append([self._repeater.state_locked(index, step) for index in indices])
                except ReplicaBehind:
                    continue
                found.append((unit, step))
            return known + [(*each, value) for each, value in zip(found, digests_of(states), strict=True)]

    def close(self) -> None:
        """End the thread after its current batch. The log stays, and `catch_up` still works. May be called twice."""
        with self._waiting:
            self._closed = True
            self._waiting.notify_all()
        self._thread.join()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- applying steps

    def _take(self, record: NDArray[np.uint8], hold: bool, accepted: _Accepted, *, keep: bool = False) -> Received:
        code, index, reason, digest = accepted
        while code == "apply_now":
            before = self._log.nbytes  # the background thread makes room, too
            code, index, reason, digest = self._log.accept(record, hold)
            if code != "apply_now":
                break
            self._repeater.make_room(self._log.fullest(), before, self._kept_steps)
            if hold and self._log.nbytes >= before:
                code, reason = "log_full", f"held steps leave no room for {record.nbytes} more bytes: raise log_bytes"
        name = None if index is None else self._parts[index].unit.name
        if index is not None and index in self._repeater.failures and code != "state":
            return Received(name, "failed", self._repeater.failures[index])
        if code == "state" and index is not None:
            payload = record[RECORD_HEADER_BYTES:]
            self._repeater.install_state(index, torch.from_numpy(payload if keep else payload.copy()), digest)
        elif code == "ok" and index is not None and not hold:
            newest, version = self._log.newest(index), self._log.version(index)
            has_batch = newest is not None and version is not None and newest - version >= self._batches[index]
            self._wake([index] if has_batch else [])
        elif code == "proof" and index is not None and self._log.version(index) == self._log.newest(index):
            with self._parts[index].lock:
                self._repeater.compare_locked(index)
        return Received(name, "ok" if code in ("ok", "state", "duplicate", "proof") else code, reason)

    def _wake(self, indices: Sequence[int]) -> None:
        """Make the thread apply a batch of each of these parts."""
        if indices:
            with self._waiting:
                self._work |= dict.fromkeys(indices)
                self._waiting.notify_all()

    def _apply_in_background(self) -> None:
        while True:
            with self._waiting:
                self._waiting.wait_for(lambda: self._work or self._closed)
                if self._closed:
                    return
                index = next(iter(self._work))
                del self._work[index]
            newest = self._log.newest(index)
            if newest is not None:
                with native_call(), self._parts[index].lock:
                    self._repeater.apply_locked(index, newest - self._kept_steps)
