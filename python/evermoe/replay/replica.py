"""Replicas: the state of units that another process trains, kept current by repeating its steps.

A replica gets a unit's full state once. Then a record of each step (its numbers and the gradient, in the fewest bytes
that give back its bits) is enough. It logs them within bounded memory and applies them in batches, beside the training:

    sender = evermoe.replay.GradientSender(optimizer, units)        # on the trainer
    replica = evermoe.replay.Replica(layouts)                       # anywhere else, with sender.layouts()

    loss.backward(); optimizer.step()
    for message in sender.messages(step):                           # over any transport
        received = replica.receive(message)
        if received.needs_full_state:
            sender.request_full_state(received.unit)                # comes with the next step

    state = replica.catch_up("layers.0.experts.3", step)            # bit for bit what the trainer had after the step

A bit that flips in the memory of a replica is found before it is used: what is logged and the state itself are compared
with digests of what came and what was written, and now and then the state with a digest of the trainer's
(`GradientSender.proofs`). The unit then waits for its full state, and `take_damages` says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evermoe._native import RECORD_HEADER_BYTES, ReplayLog, digest
from evermoe.errors import ReplicaBehind
from evermoe.native_calls import native_call
from evermoe.planning.protection import batch_steps
from evermoe.replay.part import Part, parts_of
from evermoe.replay.repeater import Damage, Repeater
from evermoe.state.unit import Unit, digests_of

ALIGNMENT = 8
"""Bytes to which the memory of a state is aligned, at least: those of the largest element."""
CATCH_UP_THREADS = 4
"""Threads that repeat steps while members are about to need the states, at most: training may have one processor."""
KEPT_STEPS = 1
"""Newest steps that wait: members that survive a failure may differ by one, and a step is not undone."""


_Accepted = tuple[str, int | None, str, int | None]
"""Fate of a record, by `ReplayLog`: code, unit, reason, digest of a full state."""


@dataclass(frozen=True)
class Received:
    """What became of a message.

    Attributes:
        unit: the unit's name; None where the message does not say, as it is damaged.
        code: "ok", or why not: "corrupt", "unknown_version", "wrong_unit", "wrong_size", "no_state", "gap",
            "reordered", "log_full" where held steps leave no room, or "failed" where the steps could not be applied.
        reason: the same in words; empty for "ok".
    """

    unit: str | None
    code: str
    reason: str

    @property
    def needs_full_state(self) -> bool:
        """Whether the unit (all units, where it is None) follows no more steps until its full state comes."""
        return self.code not in ("ok", "wrong_unit")


@dataclass(frozen=True)
class CaughtUp:
    """A unit's state after a step.

    Attributes:
        step: the trainer's step.
        state: uint8 `[nbytes]` on the CPU, the unit's tensors one after the other; a copy.
        digest: XXH3-64 of it, the same as the trainer's of these bytes.
    """

    step: int
    state: Tensor
    digest: int


class Replica(AbstractContextManager["Replica"]):
    """Keeps the state of units current from the messages of a `GradientSender`.

    Steps are applied by a thread of its own, some at a time; `receive` copies a message into the log and returns. Where
    the log is full, `receive` applies some steps first. `close` ends the thread; also use it as a context manager.

    Args:
        units: name and layout of each unit, as `GradientSender.layouts` or `TrainingState.units` list them.
        device: where the states are kept and steps are applied.
        log_bytes: bound of the log; at least one float32 gradient of the largest parameter.
        kept_steps: newest steps that are not applied until `catch_up` asks for them, so that it can also go to a step
            before; fewer where the log is full.

    Raises:
        ValueError: a name is there twice, or `log_bytes` is too small.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        *,
        device: torch.device | str = "cpu",
        log_bytes: int = 1 << 30,
        kept_steps: int = KEPT_STEPS,
    ) -> None:
        self._kept_steps, own = kept_steps, torch.device(device)
        if own.type == "cuda" and own.index is None:  # each thread has a GPU of its own that is the current one
            own = torch.device("cuda", torch.cuda.current_device())
        self._units: dict[str, list[int]] = {}
        self._parts: list[Part] = []
        for unit in units:
            if unit.name in self._units:
                raise ValueError(f"units: {unit.name!r} is there twice; names must be unique")
            first = len(self._parts)
            self._parts += [Part(unit, specs, own) for specs in parts_of(unit)]
            self._units[unit.name] = list(range(first, len(self._parts)))
        self._log = ReplayLog([(part.name, part.elements, part.layout.nbytes) for part in self._parts], log_bytes)
        self._repeater = Repeater(self._parts, self._log)
        self._batches = [batch_steps(part.elements) + kept_steps for part in self._parts]
        """Steps that are logged when a batch of them is applied."""
        self._waiting = threading.Condition()
        self._work: dict[int, None] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._apply_in_background, name="evermoe-replica", daemon=True)
        self._thread.start()

    def receive(
        self, message: bytes | bytearray | memoryview | NDArray[np.uint8], *, hold: bool = False, keep: bool = False
    ) -> Received:
        """Takes over one message; its memory is the caller's again afterwards. For one thread at a time.

        Args:
            message: one of `GradientSender.messages` or `next_step_messages`.
            hold: a step does not count before `release`, as the trainers have not agreed on it yet.
            keep: a full state stays in the message's memory, which is the replica's from now on; it is aligned to 8
                bytes.

        Returns:
            What became of it. A damaged, missing or reordered message is no exception: the unit keeps the state that it
            has, and follows no more steps until its full state comes.

        Raises:
            ValueError: the replica is closed, or the memory to keep is read-only.
        """
        if self._closed:
            raise ValueError("replica: it is closed")
        record = np.frombuffer(message, np.uint8)
        if keep and not record.flags.writeable:
            raise ValueError("replica: keep needs memory that may be written")
        return self._take(record, hold, self._log.accept(record, hold), keep=keep)

    def begin(self, unit: str, step: int, state: Tensor) -> None:
        """Takes over a unit's full state that is here already, and its memory.

        Args:
            unit: its name.
            step: of the trainer, after which it is.
            state: uint8 `[nbytes]` on the CPU, the unit's tensors one after the other.

        Raises:
            KeyError: there is no such unit.
        """
        sizes = [self._parts[index].layout.nbytes for index in self._units[unit]]
        for index, part in zip(self._units[unit], state.split(sizes), strict=True):
            self._log.begin(index, step)
            self._repeater.install(index, part if part.data_ptr() % ALIGNMENT == 0 else part.clone())

    def hold(self, messages: NDArray[np.uint8], sizes: list[int]) -> tuple[int, list[Received]]:
        """Takes over messages of one step, like `receive` with `hold`.

        Args:
            messages: uint8, one after the other.
            sizes: bytes of each.

        Returns:
            How many steps are held, and what became of all that was damaged, missing or reordered.

        Raises:
            ValueError: the replica is closed.
        """
        if self._closed:
            raise ValueError("replica: it is closed")
        held, others, number, start = 0, [], 0, 0
        while number < len(sizes):
            count, other = self._log.hold_all(messages[start:], sizes[number:])
            held, start, number = held + count, start + sum(sizes[number : number + count]), number + count
            if other is not None:  # a record that is more than logged
                end = start + sizes[number]
                received = self._take(messages[start:end], True, other)
                held += received.code == "ok"
                if received.code != "ok":
                    others.append(received)
                start, number = end, number + 1
        return held, others

    def release(self, *, clip: float | None = 1.0) -> None:
        """The held steps count from now on, with gradients multiplied by `clip` before the optimizer saw them.

        None: the optimizer left them out, so they count, and change nothing.
        """
        self._log.release(clip)
        waiting = enumerate(self._log.waiting())
        self._wake([index for index, steps in waiting if steps is not None and steps >= self._batches[index]])

    def discard(self) -> None:
        """The held steps will never be."""
        self._log.discard()

    def version(self, unit: str) -> int | None:
        """The newest step of the trainer that the unit can be brought to; None before its full state came."""
        newest = [self._log.newest(index) for index in self._units[unit]]
        return None if None in newest else min(step for step in newest if step is not None)

    def oldest(self, unit: str) -> int | None:
        """The oldest step that the unit can be brought to; None before its full state came."""
        applied = [self._log.version(index) for index in self._units[unit]]
        return None if None in applied else max(step for step in applied if step is not None)

    def needs_full_state(self) -> list[str]:
        """Units that follow no more steps until their full state comes."""
        return [name for name, parts in self._units.items() if any(self._log.needs_state(part) for part in parts)]

    def take_damages(self) -> list[Damage]:
        """What was found to be damaged since this was called last; each unit waits for its full state."""
        return self._repeater.take_damages()

    @property
    def log_nbytes(self) -> int:
        """Bytes of the log now."""
        return self._log.nbytes

    def catch_up(self, unit: str, step: int | None = None) -> CaughtUp:
        """Applies what is logged until a step, and returns the state.

        Args:
            unit: its name.
            step: a step of the trainer; None for the newest.

        Raises:
            KeyError: there is no such unit.
            ReplicaBehind: the step has not come, or steps after it were applied already.
        """
        if step is None:
            step = self.version(unit) or 0
        state = self.read(unit, step)
        return CaughtUp(step, state, digest(state.numpy()))

    def read(self, unit: str, step: int, out: Tensor | None = None, *, lends: bool = False) -> Tensor:
        """The state of `catch_up`, without its digest, in memory of its own or in `out`; the same errors.

        `lends`: it may be the replica's own memory, which the next step of the unit writes.
        """
        newest = self.version(unit)
        if newest is None:
            raise ReplicaBehind(f"{unit}: no full state came yet, or its steps could not be applied; send it again")
        if step > newest:
            raise ReplicaBehind(f"{unit}: step {step} has not come, the newest is {newest}; ask for its full state")
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
        """Brings units that have a state, None for all, to their newest step, some at a time, for `survey`.

        Yields of each parameter and unit. Whoever stops asking waits for those that are under way alone.
        """
        steps = {unit: self.version(unit) for unit in (self._units if units is None else units)}
        found = [(self._units[unit], step) for unit, step in steps.items() if step is not None]
        due = [(index, step) for indices, step in found for index in indices]
        on_host = [(each, step) for each, step in found if all(self._parts[i].device.type == "cpu" for i in each)]
        pool = ThreadPoolExecutor(CATCH_UP_THREADS, "evermoe-catch-up")
        try:
            yield from pool.map(lambda each: self._repeater.catch_up(*each), due)
            yield from pool.map(lambda each: self._repeater.find_digest(*each), on_host)
        finally:
            pool.shutdown(cancel_futures=True)

    def survey(self, units: Iterable[str] | None = None) -> list[tuple[str, int, int]]:
        """Unit, step and digest of units that have a state, each at its newest step; on the CPU without a copy.

        `units`: their names; None for all. Of those that `catch_up_all` has brought there, and that were not written
        since, the digest is the one that it has found.
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
        """Ends the thread after the batch that it is at; what is logged stays and `catch_up` works. Twice is fine."""
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
            before = self._log.nbytes  # the thread makes room, too
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
            self._repeater.install(index, torch.from_numpy(payload if keep else payload.copy()), digest)
        elif code == "ok" and index is not None and not hold:
            newest, version = self._log.newest(index), self._log.version(index)
            is_due = newest is not None and version is not None and newest - version >= self._batches[index]
            self._wake([index] if is_due else [])
        elif code == "proof" and index is not None and self._log.version(index) == self._log.newest(index):
            with self._parts[index].lock:
                self._repeater.prove_locked(index)
        return Received(name, "ok" if code in ("ok", "state", "duplicate", "proof") else code, reason)

    def _wake(self, due: Sequence[int]) -> None:
        """Has the thread apply a batch of each of these parts."""
        if due:
            with self._waiting:
                self._work |= dict.fromkeys(due)
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
