"""Repeat logged steps on the states of a replica, and detect states that differ from the trainer's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from torch import Tensor

from evermoe._native import ReplayLog
from evermoe.copies.replay.dispute import Dispute, LoggedBatch
from evermoe.copies.replay.part import Part
from evermoe.errors import CorruptCopy, ReplicaBehind
from evermoe.planning.protection import batch_steps
from evermoe.state.unit import digests_of

DISPUTE_STEPS = 32
"""Steps from a dispute that a third member has decided to the next: if all states differ, one shows whose are wrong."""


class Damage(NamedTuple):
    """A unit whose state on this replica differs from the trainer's, and is no longer used."""

    unit: str
    step: int
    """The trainer's step at which the state should have been."""
    reason: str


class Repeater:
    """The states of a replica, which logged steps advance. Methods named `locked` need the part's lock.

    Before a state or a logged step is used, it is compared with what was written. If the trainer has sent its digest of
    a state, that is compared, too. A part that differs has no state until its full state arrives.

    Args:
        parts: in the order of the log.
        log: of their steps.
        keeps_disputes: a state that differs from the trainer's alone stays until `end_disputes`, but cannot be read.
    """

    def __init__(self, parts: Sequence[Part], log: ReplayLog, *, keeps_disputes: bool) -> None:
        self._parts, self._log, self._keeps_disputes = parts, log, keeps_disputes
        self.disputes: dict[int, Dispute] = {}
        """States that differ from the trainer's, by the part's index."""
        self._disputes_from = 0
        """Step from which one may be kept: those that differ soon after another are not."""
        self.trusted: set[int] = set()
        """Indices of parts whose trainer was found to be wrong: its digests do not count."""
        self._proven: dict[int, int | None] = {}
        """The latest step after which the trainer had the same state, by the part's index."""
        self.failures: dict[int, str] = {}
        """Reasons why parts have no state, by index."""
        self._damages: list[Damage] = []
        self._digests: dict[tuple[int, ...], tuple[int, int, int]] = {}
        """By the indices of a unit's parts: their number of writes, their step, and the digest of all of them."""

    def install_state(self, index: int, state: Tensor, digest: int | None = None) -> None:
        """Install a full state that the log knows of: see `Part.install_state`. Takes the part's lock."""
        with self._parts[index].lock:
            self._parts[index].install_state(state, digest)
            self._log.installed(index)
            self._proven[index] = self._log.version(index)
            self.disputes.pop(index, None)
            self.failures.pop(index, None)

    def apply_locked(self, index: int, until: int) -> bool:
        """Apply one batch, no further than to a step; return whether there was one."""
        part = self._parts[index]
        taken = self._log.take(index, batch_steps(part.elements), max(until, 0))
        if taken is None:
            return False
        epoch, version, t, numbers, gradients, nbytes, is_intact, has_proof = taken
        batch = None
        try:
            if not is_intact:
                raise CorruptCopy(f"{part.name}: a logged step differs from what arrived; a bit has flipped in memory")
            is_proven = self._keeps_disputes and has_proof and self._proven.get(index) == self._log.version(index)
            is_proven = is_proven and version >= self._disputes_from
            if is_proven and part.state is not None:
                batch = LoggedBatch(part.state.clone(), numbers, gradients, t)
            part.apply_steps(numbers, gradients, t)
        except CorruptCopy as error:
            self._refuse(index, version, error)
        except RuntimeError as error:
            self.failures[index] = f"{part.name}: {error}"
            self._log.forget(index)
        self._log.applied(index, epoch, version, nbytes)
        self.compare_locked(index, batch)
        return True

    def make_room(self, index: int | None, before: int, kept_steps: int) -> None:
        """Apply a batch of the part that takes most of the log, or of another that has older steps. Takes the locks.

        Args:
            index: of that part; None if a thread, which holds one of the locks, is applying all of the log.
            before: bytes of the log when it was too large.
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
        with self._parts[index].lock:  # only steps that should wait are left
            newest = self._log.newest(index)
            if newest is not None and self._log.nbytes >= before:
                self.apply_locked(index, newest)

    def compare_locked(self, index: int, batch: LoggedBatch | None = None) -> None:
        """Compare the state with the trainer's digest, if there is one of its version.

        `batch`: the steps that led to it, for a dispute.
        """
        expected, version = self._log.proof(index), self._log.version(index)
        if expected is not None and version is not None and index not in self.trusted:
            part = self._parts[index]
            try:
                part.compare_digest(expected)
                self._proven[index] = version
            except CorruptCopy as error:
                if not self._keeps_disputes or version < self._disputes_from:
                    self._refuse(index, version, error)
                elif index not in self.disputes:
                    self.disputes[index] = Dispute(part.unit.name, part.name, version, expected, part.digest(), batch)

    def state_locked(self, index: int, step: int) -> Tensor:
        """Return a part's state after a step.

        Raises:
            ReplicaBehind: the step has not arrived, later steps were already applied, or the state is damaged.
        """
        part, is_fresh = self._parts[index], False
        while self.apply_locked(index, step):
            is_fresh = True
        if index in self.disputes:
            self._end_dispute(index)
        version = self._log.version(index)
        if version is not None and not is_fresh:
            try:
                part.check_seal()
            except CorruptCopy as error:
                self._refuse(index, version, error)
                version = None
        if version != step or part.state is None:
            raise ReplicaBehind(
                f"{part.name}: the copy is at step {version} and cannot be brought to step {step}; "
                f"{self.failures.get(index, 'applied steps cannot be undone: raise kept_steps')}"
            )
        return part.state

    def catch_up(self, index: int, step: int) -> None:
        """Bring a part to a step, as far as its log allows. Takes the part's lock."""
        with suppress(ReplicaBehind), self._parts[index].lock:
            self.state_locked(index, step)

    def find_digest(self, indices: Sequence[int], step: int) -> None:
        """Compute a unit's digest after a step, for `digest_locked`, if the log reaches the step. Takes the locks."""
        with suppress(ReplicaBehind), ExitStack() as locks:
            for index in indices:
                locks.enter_context(self._parts[index].lock)
            states = [self.state_locked(index, step) for index in indices]
            self._digests[tuple(indices)] = self._writes(indices), step, digests_of([states])[0]

    def digest_locked(self, indices: Sequence[int], step: int) -> int | None:
        """Return what `find_digest` computed, the XXH3-64 of the unit's bytes; None if it is missing or out of date."""
        writes, at, value = self._digests.get(tuple(indices), (-1, -1, 0))
        return value if (writes, at) == (self._writes(indices), step) else None

    def _writes(self, indices: Sequence[int]) -> int:
        return sum(self._parts[index].writes for index in indices)

    def end_disputes(self, trusted: Collection[int]) -> None:
        """Stop using the states in dispute: their full states must arrive. Takes the locks.

        `trusted`: indices of parts whose trainer was found to be wrong, which are used without its digests.
        """
        self.trusted.update(trusted)
        for index in self.trusted:
            self.disputes.pop(index, None)
        for index in list(self.disputes):
            with self._parts[index].lock:
                self._end_dispute(index)

    def _end_dispute(self, index: int) -> None:
        dispute = self.disputes.pop(index, None)
        if dispute is None:
            return
        if dispute.batch is not None:
            self._disputes_from = dispute.step + DISPUTE_STEPS
        self._refuse(index, dispute.step, CorruptCopy(f"{dispute.part}: the state differs from the trainer's"))

    def take_damages(self) -> list[Damage]:
        """Return the damage that was found since the previous call."""
        found, self._damages = self._damages, []
        return found

    def _refuse(self, index: int, step: int, error: CorruptCopy) -> None:
        """Stop using a damaged state: the part waits for its full state."""
        self.failures[index] = str(error)
        self._log.forget(index)
        self._damages.append(Damage(self._parts[index].unit.name, step, str(error)))
