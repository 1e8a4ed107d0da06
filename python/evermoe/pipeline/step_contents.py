"""Content of a version's messages, some bundles of it as the step that leads to them.

    primary   captures the bundle in its own arena; sends the table of its digests and the step
    holder    copies the previous version to the place of the new one, repeats the step, and compares digests;
              if they differ, or the previous version is missing, it asks for the state that the primary has captured

A complete version is therefore the same, whichever way it was sent, and a recovery uses it like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evermoe._native import digest
from evermoe.copies.replay.source import wait_for_gradients
from evermoe.copies.replay.step_bytes import repeat_step, step_bytes, write_step
from evermoe.copies.replay.step_notes import UnitSteps
from evermoe.copies.snapshot.asked_states import AskedStates
from evermoe.copies.snapshot.bundles import BundleArena
from evermoe.copies.snapshot.round import STATES, SnapshotRound
from evermoe.copies.snapshot.segments import Segment, Segments, even_parts
from evermoe.events import Damaged
from evermoe.state.stored import KeptCopies
from evermoe.state.unit import Unit
from evermoe.state.version import step_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Repeated:
    """A bundle that is sent as a step."""

    base: int
    """The version before the step, which its holders have."""
    units: Sequence[Unit]
    """Its units with their tensors, in its order."""

    @property
    def nbytes(self) -> int:
        """Bytes of the step."""
        return sum(map(step_bytes, self.units))

    def split(self, data: Tensor) -> tuple[Tensor, ...]:
        """The steps of its units."""
        return data.split([step_bytes(unit) for unit in self.units])


class StepContents(AskedStates):
    """Some bundles of a version as steps, all others as their state.

    Args:
        repeated: bundles that are sent as steps, by number.
        steps: the step of this rank's units.
    """

    def __init__(self, repeated: Mapping[int, Repeated], steps: UnitSteps) -> None:
        super().__init__(repeated.keys())
        self.nbytes = {number: each.nbytes for number, each in repeated.items()}
        """Bytes of the step of each bundle, by number."""
        self._repeated, self._steps = repeated, dict(steps)
        self._data: dict[int, Tensor] = {}
        """Table of digests and step of each bundle, by its number."""
        self._mine: dict[int, BundleArena] = {}
        """Bundles that this rank sends as steps, by number."""

    # ---- sending

    def even_segments(self, sent: SnapshotRound, copies: KeptCopies) -> Segments:
        """Return messages of even size: those of steps take the place of their bundles' first ones."""
        tables = {kept.number: _table_bytes(kept) for kept in (*sent.own, *sent.peers)}

        def as_steps(segments: Iterable[Segment]) -> Iterator[Segment]:
            for segment in segments:
                known = self._repeated.get(segment.bundle)
                if known is None:
                    yield segment
                elif not segment.place:
                    first = tables[segment.bundle]
                    parts = [(first, known.nbytes)]
                    yield from even_parts(segment.bundle, segment.peer, parts, first, sent.store.chunk_bytes)

        return Segments(*([*as_steps(each)] for each in STATES.even_segments(sent, copies)))

    def data(self, sent: SnapshotRound, kept: BundleArena) -> Tensor:
        """Return the table of digests and the step of a bundle, or its state."""
        known = self._repeated.get(kept.number)
        if known is None:
            return STATES.data(sent, kept)
        if kept.number not in self._data:
            first = _table_bytes(kept)
            data = self._data[kept.number] = torch.empty(first + known.nbytes, dtype=torch.uint8)
            if kept in sent.own:
                self._mine[kept.number] = kept
                wait_for_gradients(sent.store.state.devices())
                for unit, step in zip(known.units, known.split(data[first:]), strict=True):
                    write_step(unit, self._steps.pop(unit.name, []), step)
        return self._data[kept.number]

    def make_ready(self, segment: Segment, wait: Callable[[int | None], object]) -> None:
        """Wait for the capture, which computes the table of digests; a step is complete before it."""
        kept = self._mine.get(segment.bundle)
        if kept is None:
            STATES.make_ready(segment, wait)
        elif segment.offset < (first := _table_bytes(kept)):
            wait(None)
            self._data[segment.bundle][:first] = torch.from_numpy(kept.arena.buffer(kept.index)[:first])

    # ---- receiving

    def accept(self, sent: SnapshotRound, kept: BundleArena) -> bool:
        """Repeat the step of a bundle, and make it visible. If it is not its trainer's, its state is asked for."""
        known = self._repeated.get(kept.number)
        if known is None:
            return sent.commit(kept)
        problem = self._repeat(sent, kept, known)
        if not problem and sent.commit(kept):
            return True
        self.asked.append(kept)
        for unit in [kept.bundle.units[0]] if problem else _differing(kept):
            why = problem or "its digest is not that of its trainer"
            reason = f"{unit}: the step to version {step_of(sent.version)} was not repeated exactly: {why}"
            logger.warning("a copy on this rank is replaced by its full state, which is sent next: %s", reason)
            sent.emit(Damaged(unit, step_of(sent.version), reason))
        return True

    def _repeat(self, sent: SnapshotRound, kept: BundleArena, known: Repeated) -> str:
        """Make the version from the previous one. Return the problem, empty if there is none."""
        before = {version: index for index, version in kept.arena.versions()}.get(known.base)
        if before is None:
            return f"version {step_of(known.base)} is missing"
        data, out, first = self._data[kept.number], STATES.data(sent, kept), _table_bytes(kept)
        out.copy_(torch.from_numpy(kept.arena.buffer(before)))
        out[:first] = data[:first]
        steps = known.split(data[first:])
        try:
            for unit, step, (_, offset, nbytes) in zip(known.units, steps, kept.arena.units(), strict=True):
                repeat_step(unit, step, out[offset : offset + nbytes])
                sent.courier.progress += 1
        except (ValueError, RuntimeError) as error:
            return str(error)
        return ""

    def finish(self, sent: SnapshotRound) -> bool:
        """Exchange the states that holders ask for, and drop the steps."""
        is_complete = super().finish(sent)
        self._data, self._steps = {}, {}
        return is_complete


def _table_bytes(kept: BundleArena) -> int:
    """Bytes of the table of digests with which a bundle's bytes begin."""
    return kept.arena.units()[0][1]


def _differing(kept: BundleArena) -> list[str]:
    """Units of a bundle whose digests differ from its table; if none, its first unit, since the table is damaged."""
    data = kept.arena.buffer(kept.index)
    digests = data[: _table_bytes(kept)].view(np.uint64)[1:].tolist()
    units = zip(kept.arena.units(), digests, strict=False)
    found = [name for (name, offset, nbytes), value in units if digest(data[offset : offset + nbytes]) != value]
    return found or [kept.bundle.units[0]]
