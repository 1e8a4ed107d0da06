"""Sends a version of a pipeline's stages, some bundles of it as the step that leads to them.

    primary   captures the bundle in its own arena; sends the table of its digests and the step
    holder    copies the previous version to the place of the new one, repeats the step, and compares digests;
              if they differ, or the previous version is missing, it asks for the state that the primary has captured

A complete version is therefore the same, whichever way it was sent, and a recovery uses it like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evermoe._native import Capture, digest
from evermoe.comm.courier import Message
from evermoe.comm.pacer import ANY_TIME
from evermoe.copies.replay.source import wait_for_gradients
from evermoe.copies.replay.step_bytes import repeat_step, step_bytes, write_step
from evermoe.copies.snapshot.round import SnapshotRound
from evermoe.copies.snapshot.segments import Segment, Segments, even, even_runs
from evermoe.copies.snapshot.store import BundleArena
from evermoe.events import Damaged
from evermoe.pipeline.stage_replay import Repeated, SentSteps
from evermoe.state.stored import KeptCopies
from evermoe.state.version import step_of

logger = logging.getLogger(__name__)


class RepeatedRound(SnapshotRound):
    """Send one version; without steps a `SnapshotRound`.

    Args:
        args, options: of a `SnapshotRound`.
        sent: bundles that are sent as steps.
    """

    def __init__(self, *args: Any, sent: SentSteps, **options: Any) -> None:
        self._repeated, self._steps = sent.bundles, dict(sent.steps)
        self._data: dict[int, Tensor] = {}
        """Table of digests and step of each bundle, by its number."""
        self._asked: list[BundleArena] = []
        """Bundles whose state is needed."""
        super().__init__(*args, **options)
        self._mine = {kept.number: kept for kept in self._own if kept.number in self._repeated}
        """Bundles that this rank sends as steps, by number."""

    # ---- sending

    def _even_segments(self, copies: KeptCopies) -> Segments:
        return Segments(*([*self._as_steps(each)] for each in super()._even_segments(copies)))

    def _as_steps(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        """Replace the segments of states by those of steps, each at the place of its bundle's first segment."""
        tables = {kept.number: _table_bytes(kept) for kept in (*self._store.own, *self._store.peers)}
        for segment in segments:
            known = self._repeated.get(segment.bundle)
            if known is None:
                yield segment
            elif not segment.place:
                first = tables[segment.bundle]
                run = [(first, first + known.nbytes)]
                yield from even_runs(segment.bundle, segment.peer, run, first, self._store.chunk_bytes)

    def _bytes_of(self, kept: BundleArena) -> Tensor:
        known = self._repeated.get(kept.number)
        if known is None:
            return super()._bytes_of(kept)
        if kept.number not in self._data:
            first = _table_bytes(kept)
            data = self._data[kept.number] = torch.empty(first + known.nbytes, dtype=torch.uint8)
            if kept.number in self._mine:
                wait_for_gradients(self._store.state.devices())
                for unit, step in zip(known.units, _split(known, data[first:]), strict=True):
                    write_step(unit, self._steps.pop(unit.name, []), step)
        return self._data[kept.number]

    def _make_ready(self, segment: Segment, capture: Capture | None) -> None:
        kept = self._mine.get(segment.bundle)
        if kept is None:
            super()._make_ready(segment, capture)
        elif segment.offset < (first := _table_bytes(kept)):
            super()._make_ready(segment._replace(offset=0), capture)
            self._data[segment.bundle][:first] = super()._bytes_of(kept)[:first]

    # ---- receiving

    def _is_complete(self, kept: BundleArena) -> bool:
        known = self._repeated.get(kept.number)
        if known is None:
            return super()._is_complete(kept)
        problem = self._repeat(kept, known)
        if not problem and super()._is_complete(kept):
            return True
        self._asked.append(kept)
        for unit in [kept.bundle.units[0]] if problem else _differing(kept):
            why = problem or "its digest is not that of its trainer"
            reason = f"{unit}: the step to version {step_of(self.version)} was not repeated exactly: {why}"
            logger.warning("a copy on this rank is replaced by its full state, which is sent next: %s", reason)
            self._emit(Damaged(unit, step_of(self.version), reason))
        return True

    def _repeat(self, kept: BundleArena, known: Repeated) -> str:
        """Make the version from the previous one. Return the problem, empty if there is none."""
        before = {version: index for index, version in kept.arena.versions()}.get(known.base)
        if before is None:
            return f"version {step_of(known.base)} is missing"
        data, out, first = self._data[kept.number], super()._bytes_of(kept), _table_bytes(kept)
        out.copy_(torch.from_numpy(kept.arena.buffer(before)))
        out[:first] = data[:first]
        steps = _split(known, data[first:])
        try:
            for unit, step, (_, offset, nbytes) in zip(known.units, steps, kept.arena.units(), strict=True):
                repeat_step(unit, step, out[offset : offset + nbytes])
                self._courier.progress += 1
        except (ValueError, RuntimeError) as error:
            return str(error)
        return ""

    def _exchange(self) -> bool:
        is_complete = super()._exchange()
        is_healed = self._heal()
        self._data, self._steps = {}, {}
        return is_complete and is_healed

    def _heal(self) -> bool:
        """Ask the primaries for the state of damaged bundles, and send the state of those that others ask for."""
        courier, asked = self._courier, {kept.number for kept in self._asked}
        sent = self._by_peer((peer, kept) for kept in self._mine.values() for peer in kept.bundle.holders[1:])
        answers = {peer: torch.zeros(len(some), dtype=torch.uint8) for peer, some in sent.items()}
        coming = [courier.begin_receive(Message(data, peer, _tag(sent[peer][0]))) for peer, data in answers.items()]
        states = [
            courier.begin_receive(message)
            for kept in self._asked
            for message in self._state_messages(kept, kept.bundle.holders[0])
        ]
        came = self._by_peer((kept.bundle.holders[0], kept) for kept in self._peers)
        courier.send_messages(
            Message(
                torch.tensor([kept.number in asked for kept in some], dtype=torch.uint8), peer, _tag(some[0]), ANY_TIME
            )
            for peer, some in came.items()
        )
        for transfer in coming:
            courier.wait_received(transfer)
        needed = [
            (kept, peer)
            for peer, some in sent.items()
            for kept, is_needed in zip(some, answers[peer].tolist(), strict=True)
            if is_needed
        ]
        self._total_bytes += sum(kept.arena.payload_bytes for kept, _ in needed)
        courier.send_messages(
            (message for kept, peer in needed for message in self._state_messages(kept, peer)), self._note_sent
        )
        for transfer in states:
            courier.wait_received(transfer)
        return all([super(RepeatedRound, self)._is_complete(kept) for kept in self._asked])

    def _by_peer(self, pairs: Iterable[tuple[int, BundleArena]]) -> dict[int, list[BundleArena]]:
        """Bundles that are sent as steps to or from each peer, in the order of their numbers, which both ends know."""
        found: dict[int, list[BundleArena]] = {}
        for peer, kept in sorted(pairs, key=lambda each: each[1].number):
            if kept.number in self._repeated:
                found.setdefault(peer, []).append(kept)
        return found

    def _state_messages(self, kept: BundleArena, peer: int) -> Iterator[Message]:
        data = super()._bytes_of(kept)
        for each in even(kept.number, kept.arena, peer, (), self._store.chunk_bytes):
            yield Message(data[each.offset : each.offset + each.nbytes], peer, each.tag)


def _table_bytes(kept: BundleArena) -> int:
    """Bytes of the table of digests with which a bundle's bytes begin."""
    return kept.arena.units()[0][1]


def _split(known: Repeated, data: Tensor) -> tuple[Tensor, ...]:
    """The steps of a bundle's units."""
    return data.split([step_bytes(unit) for unit in known.units])


def _tag(kept: BundleArena) -> int:
    return Segment(kept.number, 0, 0, 0, 0).tag


def _differing(kept: BundleArena) -> list[str]:
    """Units of a bundle whose digests differ from its table; if none, its first unit, since the table is damaged."""
    data = kept.arena.buffer(kept.index)
    digests = data[: _table_bytes(kept)].view(np.uint64)[1:].tolist()
    units = zip(kept.arena.units(), digests, strict=False)
    found = [name for (name, offset, nbytes), value in units if digest(data[offset : offset + nbytes]) != value]
    return found or [kept.bundle.units[0]]
