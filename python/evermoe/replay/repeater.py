"""Repeats logged steps on the states of a replica, and finds the states that are not the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from torch import Tensor

from evermoe._native import ReplayLog
from evermoe.errors import CorruptCopy, ReplicaBehind
from evermoe.planning.protection import batch_steps
from evermoe.replay.part import Part
from evermoe.state.unit import digests_of


class Damage(NamedTuple):
    """A unit whose state here was found not to be the trainer's, and is not used any more."""

    unit: str
    step: int
    """The trainer's step that its state should have been of."""
    reason: str


class Repeater:
    """The states of a replica, which logged steps lead on. What is called `locked` needs the part's lock.

    Before a state or a logged step is used, it is compared with what was written. Where the trainer has sent its digest
    of a state, that is compared, too. A part that differs has no state any more until its full state comes.

    Args:
        parts: by their places in the log.
        log: of their steps.
    """

    def __init__(self, parts: Sequence[Part], log: ReplayLog) -> None:
        self._parts, self._log = parts, log
        self.failures: dict[int, str] = {}
        """Why parts have no state, by place."""
        self._damages: list[Damage] = []
        self._digests: dict[tuple[int, ...], tuple[int, int, int]] = {}
        """By the parts of a unit how often they were written, the step that they are at, and the digest of them all."""

    def install(self, index: int, state: Tensor, digest: int | None = None) -> None:
        """A part gets a full state that the log knows of: see `Part.install`. Takes the part's lock."""
        with self._parts[index].lock:
            self._parts[index].install(state, digest)
            self._log.installed(index)
            self.failures.pop(index, None)

    def apply_locked(self, index: int, until: int) -> bool:
        """Applies one batch up to a step; whether there was one."""
        part = self._parts[index]
        taken = self._log.take(index, batch_steps(part.elements), max(until, 0))
        if taken is None:
            return False
        epoch, version, t, numbers, gradients, nbytes, is_intact = taken
        try:
            if not is_intact:
                raise CorruptCopy(f"{part.name}: a logged step is not what came; a bit has flipped in memory")
            part.apply(numbers, gradients, t)
        except CorruptCopy as error:
            self._refuse(index, version, error)
        except RuntimeError as error:
            self.failures[index] = f"{part.name}: {error}"
            self._log.forget(index)
        self._log.applied(index, epoch, version, nbytes)
        self.prove_locked(index)
        return True

    def make_room(self, index: int | None, before: int, kept_steps: int) -> None:
        """Applies a batch of the part that takes most of the log, or of another that has older steps. Takes the locks.

        Args:
            index: of that part; None where all of the log is being applied by a thread, which holds one of the locks.
            before: bytes of the log that were too many.
            kept_steps: newest steps that wait if they can.
        """
        if index is None:
            for part in self._parts:
                with part.lock:
                    pass
            return
        for each in (index, *range(len(self._parts))):
            with self._parts[each].lock:
                newest = self._log.newest(each)
                if newest is not None and self.apply_locked(each, newest - kept_steps):
                    return
        with self._parts[index].lock:  # nothing but steps that should wait
            newest = self._log.newest(index)
            if newest is not None and self._log.nbytes >= before:
                self.apply_locked(index, newest)

    def prove_locked(self, index: int) -> None:
        """Compares the state with the trainer's digest, if there is one of its version."""
        expected, version = self._log.proof(index), self._log.version(index)
        if expected is not None and version is not None:
            try:
                self._parts[index].prove(expected)
            except CorruptCopy as error:
                self._refuse(index, version, error)

    def state_locked(self, index: int, step: int) -> Tensor:
        """A part's state after a step.

        Raises:
            ReplicaBehind: the step has not come, or steps after it were applied already, or the state is damaged.
        """
        part, is_fresh = self._parts[index], False
        while self.apply_locked(index, step):
            is_fresh = True
        version = self._log.version(index)
        if version is not None and not is_fresh:
            try:
                part.check()
            except CorruptCopy as error:
                self._refuse(index, version, error)
                version = None
        if version != step or part.state is None:
            raise ReplicaBehind(
                f"{part.name}: it is at step {version}, and cannot go to {step}; "
                f"{self.failures.get(index, 'steps are not undone: keep more of them with kept_steps')}"
            )
        return part.state

    def catch_up(self, index: int, step: int) -> None:
        """Brings a part to a step, as far as that is there. Takes the part's lock."""
        with suppress(ReplicaBehind), self._parts[index].lock:
            self.state_locked(index, step)

    def find_digest(self, indices: Sequence[int], step: int) -> None:
        """Computes a unit's digest after a step, for `digest_locked`, as far as its state is there. Takes the locks."""
        with suppress(ReplicaBehind), ExitStack() as locks:
            for index in indices:
                locks.enter_context(self._parts[index].lock)
            states = [self.state_locked(index, step) for index in indices]
            self._digests[tuple(indices)] = self._writes(indices), step, digests_of([states])[0]

    def digest_locked(self, indices: Sequence[int], step: int) -> int | None:
        """What `find_digest` has found, XXH3-64 of the unit's bytes; None where it was not asked, or is out of date."""
        writes, at, value = self._digests.get(tuple(indices), (-1, -1, 0))
        return value if (writes, at) == (self._writes(indices), step) else None

    def _writes(self, indices: Sequence[int]) -> int:
        return sum(self._parts[index].writes for index in indices)

    def take_damages(self) -> list[Damage]:
        """What was found to be damaged since this was called last."""
        found, self._damages = self._damages, []
        return found

    def _refuse(self, index: int, step: int, error: CorruptCopy) -> None:
        """The state is not to be used: it waits for the full one."""
        self.failures[index] = str(error)
        self._log.forget(index)
        self._damages.append(Damage(self._parts[index].unit.name, step, str(error)))
