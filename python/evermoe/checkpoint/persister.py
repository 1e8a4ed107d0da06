"""Partial persistence (PEC; MoC-System): snapshots of a few units at a time, written in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evermoe._native import TripleBuffer, digests
from evermoe.checkpoint.manifest import BYTES, Part
from evermoe.checkpoint.object_store import LOOK_SECONDS
from evermoe.checkpoint.partial_store import PartialStore
from evermoe.checkpoint.saved import Saved, SavedUnit
from evermoe.errors import LeftBehind, PersistFailed
from evermoe.process.warn import warn
from evermoe.state.unit import Unit
from evermoe.state.version import generation_of

ALIGNMENT = 64
"""Alignment of each unit in a slot, in bytes."""
COMPLETE = ("snapshot", "persisting", "recovery")
"""States of slots that hold a complete snapshot."""


@dataclass(frozen=True)
class HeldUnit:
    """A version of one unit in memory: still to be written, or the last one written."""

    unit: str
    version: int
    digest: int
    data: Tensor
    """uint8 `[nbytes]`."""


@dataclass
class _Snapshot:
    """One slot: the bytes of a version's units, or of parts of them, each at its offset."""

    version: int = 0
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    units: dict[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, Part] = field(default_factory=dict)
    """Ranges of the units of which it has only a part."""
    digests: Mapping[str, int] = field(default_factory=dict)
    """Digests of these units, each of all its bytes."""
    members: Sequence[str] = ()
    """Members that save the version's units which may not lag."""

    def resized(self, version: int, units: Mapping[str, Part], members: Sequence[str]) -> _Snapshot:
        """Return a snapshot for other units, in the same memory if that is large enough, and at most twice as large.

        The first snapshot of a job has all units, and later ones a few.
        """
        starts, end = {}, 0
        for name, part in units.items():
            starts[name] = end
            end += -(-(part.end - part.start) // ALIGNMENT) * ALIGNMENT
        memory = self.memory if end <= len(self.memory) <= 2 * end else torch.empty(end, dtype=torch.uint8)
        views = {name: memory[at : at + units[name].end - units[name].start] for name, at in starts.items()}
        parts = {name: part for name, part in units.items() if not part.is_complete}
        return _Snapshot(version, memory, views, parts, members=members)

    def complete_digests(self) -> dict[str, int]:
        """Return xxh3-64 digests of the complete units."""
        complete = [name for name in self.units if name not in self.parts]
        return dict(zip(complete, digests([[self.units[name].numpy()] for name in complete]), strict=True))

    def saved(self, member: str, by_name: Mapping[str, Unit]) -> Saved:
        """Return what a member saves of this snapshot."""
        found = {}
        for name, value in {**self.complete_digests(), **self.digests}.items():
            unit, data = by_name[name], self.units[name]
            pieces = {BYTES: data} if name in self.parts else unit.tensors(data)
            found[name] = SavedUnit(value, [spec.name for spec in unit.specs], pieces, self.parts.get(name))
        return Saved(self.version, member, found, self.members)


class Persister:
    """Takes snapshots of some units at a time and writes them, one after another, in a background thread.

        views = persister.begin_snapshot(version, {"moe.experts.3": Part.all_of(nbytes)})
        state.read("moe.experts.3", views["moe.experts.3"])
        persister.commit()

    Several members may save a unit together, each a part of its bytes. Of three slots, one is filled, one is written to
    the store, and one has the newest durable version, so `begin_snapshot` and `commit` never wait for the store. If
    snapshots come faster than the store takes them, the newest goes first and those in between are skipped:
    `on_durable` reports the units that became durable, and `on_skipped` the others.

    A member that was suspended while the others resumed without it persists nothing more: the others are of a newer
    generation, and so are their persisted versions.

    A failed write does not disturb training: `error` keeps the reason, one warning reports it, and the next snapshot
    replaces the failed one. `flush` retries the same one.

    Args:
        store: shared by all members.
        member: the member that takes the snapshots; part of file names, unique among the members of a job.
        units: all of the model, `UnitCatalog.units`. Experts may lag in a recovery, other units may not.
        on_durable: called with (version, units) in the persister's thread, before any `rewind`; must not call the
            persister.
        on_skipped: called with (version, units) that were overwritten or superseded before they were durable; from
            `begin_snapshot` or in the persister's thread.

    Raises:
        ValueError: `member` cannot be part of a file name.
        OSError: the store cannot be created or read.
    """

    def __init__(
        self,
        store: PartialStore,
        member: str,
        *,
        units: Iterable[Unit],
        on_durable: Callable[[int, Sequence[str]], None] | None = None,
        on_skipped: Callable[[int, Sequence[str]], None] | None = None,
    ) -> None:
        if not member or "/" in member or "\0" in member:
            raise ValueError(f"member: expected a name that can be part of a file name, got {member!r}")
        self.store, self.member = store, member
        self.error: PersistFailed | None = None
        """Reason why the last attempt failed; None after a successful one."""
        self._by_name = {unit.name: unit for unit in units}
        self._may_lag = {unit.name for unit in self._by_name.values() if unit.expert is not None}
        self._on_durable, self._on_skipped = on_durable, on_skipped
        self._buffer = TripleBuffer()
        self._slots = [_Snapshot(), _Snapshot(), _Snapshot()]
        self._changed = threading.Condition()
        """Guards the state of both threads; never held during an operation of the store."""
        self._gate = threading.Lock()
        """Held while a manifest is created or removed: a rewind and a commit exclude each other."""
        self._generation = 0
        """Newest generation of members that this one knows that it belongs to."""
        self._owed: int | None = None
        """Version of a rewind whose removals are still to be done; None: none are."""
        self._may_try, self._busy, self._closing, self._has_warned = True, False, False, False
        store.prepare_for(member)
        self._durable = store.newest(member)
        self._thread = threading.Thread(target=self._run, name="evermoe-persist", daemon=True)
        self._thread.start()

    @property
    def durable_version(self) -> int | None:
        """The newest version of which this member has persisted a part."""
        return self._durable

    def complete_units(self) -> Iterator[HeldUnit]:
        """Yield the units of all complete snapshots in memory, which do not change until the next `begin_snapshot`."""
        with self._changed:
            slots = [self._slots[at] for at, (what, _) in enumerate(self._buffer.slots) if what in COMPLETE]
        for snapshot in slots:
            for name, value in snapshot.complete_digests().items():
                yield HeldUnit(name, snapshot.version, value, snapshot.units[name])

    def begin_snapshot(self, version: int, units: Mapping[str, Part], members: Sequence[str] = ()) -> dict[str, Tensor]:
        """Begin a snapshot of units, or of parts of them; return for each the view to fill, uint8 `[end - start]`.

        Args:
            version: of the state.
            units: by name, the range of bytes to save.
            members: those that save the units which may not lag; empty where this member saves all of them.

        Raises:
            ValueError: a unit is unknown or has another size, no unit is given, a snapshot is being filled, the version
                is not newer than all others, or the persister is closed.
        """
        _check(units, self._by_name)
        self._warn_of_error()
        with self._changed:
            self._check_open()
            if self._durable is not None and version <= self._durable:
                raise ValueError(f"version: {version} is not after {self._durable}, which is durable; rewind first")
            skipped = self._advance(lambda: self._buffer.begin(version))
            slot = self._buffer.writing
            assert slot is not None
            self._slots[slot] = self._slots[slot].resized(version, units, members)
            views = dict(self._slots[slot].units)
        self._report_skipped(skipped)
        return views

    def can_begin(self, version: int) -> bool:
        """Return whether a version is newer than every version that was begun or is durable."""
        with self._changed:
            begun = [self._durable, *(found for _, found in self._buffer.slots)]
        return all(found is None or found < version for found in begun)

    def commit(self, digests: Mapping[str, int] | None = None) -> None:
        """Hand the filled snapshot to the persister's thread.

        Args:
            digests: xxh3-64 of all bytes of each unit that was saved in part, by name.

        Raises:
            ValueError: no snapshot is being filled, or a digest is missing.
        """
        with self._changed:
            slot = self._buffer.writing
            if slot is not None:
                missing = self._slots[slot].parts.keys() - (digests or {}).keys()
                if missing:
                    raise ValueError(f"digests: expected those of {sorted(self._slots[slot].parts)}, got no {missing}")
                self._slots[slot].digests = dict(digests or {})
            self._buffer.commit()
            self._may_try = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Abandon the snapshot that is being filled.

        Raises:
            ValueError: no snapshot is being filled.
        """
        with self._changed:
            self._buffer.abandon()

    def rewind(self, version: int, generation: int = 0) -> None:
        """Roll back to a version from which members of a generation resume: remove every member's newer versions.

        Snapshots that wait in memory and are of an older generation than the version are dropped, too: a member that
        was suspended cannot know whether the others have kept them. None of these becomes durable afterwards. If the
        removal fails, the next snapshot retries it first. Members need not wait for each other, unless `generation` is
        0: then all newer versions are removed.

        Raises:
            PersistFailed: the store cannot remove the files, or is busy for long. A later recovery may find them.
        """
        with self._changed:
            self._generation, self._owed = generation, version
            if self._durable is not None and self._durable > version:
                self._durable = None  # or an older version, which is not known yet
            waiting = [self._slots[at] for at, (what, _) in enumerate(self._buffer.slots) if what in COMPLETE[:2]]
            old = [each for each in waiting if generation_of(each.version) < generation_of(version)]
            if old or ((slot := self._buffer.recovery) is not None and self._slots[slot].version > version):
                self._buffer = TripleBuffer()  # all slots are old or newer
            else:
                self._buffer.rewind(version)
            self._changed.notify_all()
        self._report_skipped(old)
        problem: object = f"no answer for {LOOK_SECONDS:.0f} s"
        if self._gate.acquire(timeout=LOOK_SECONDS):
            try:
                self._rewind_store()
                return
            except (OSError, LeftBehind) as error:
                problem = error
            finally:
                self._gate.release()
        raise PersistFailed(f"versions after {version} cannot be removed from {self.store.where}: {problem}")

    def _rewind_store(self) -> None:
        """Finish the last rewind in the store; the caller holds the gate."""
        with self._changed:
            version, generation = self._owed, self._generation
        if version is None:
            return
        self.store.rewind(version, generation)
        newest = self.store.newest(self.member)
        with self._changed:
            self._durable = newest
            if (self._owed, self._generation) == (version, generation):
                self._owed = None

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the newest snapshot is durable and what it replaces is removed, for at most `timeout` seconds.

        Raises:
            PersistFailed: the snapshot could not be persisted.
            TimeoutError: the snapshot is not durable yet.
            ValueError: the persister is closed.
        """
        with self._changed:
            self._check_open()
            self._may_try = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._busy and not self._has_work(), timeout):
                raise TimeoutError(f"{self.store.where}: not durable after {timeout} s: {self._buffer!r}")
            if not self._may_try and self.error is not None:
                self._has_warned = True
                raise self.error

    def close(self, timeout: float | None = 10.0) -> None:
        """Stop the thread once the current snapshot is written, or after `timeout` seconds; `flush` writes the rest."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        self._warn_of_error()

    # ---- the persister's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._has_work())
                if self._closing:
                    return
                self._buffer.persist()
                self._busy = True
                assert self._buffer.persisting is not None
                snapshot = self._slots[self._buffer.persisting]
            try:
                self._persist(snapshot)
            except Exception as error:  # training continues after any error
                self._failed(snapshot, error)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _persist(self, snapshot: _Snapshot) -> None:
        with self._gate:
            self._rewind_store()
        draft = self.store.write(snapshot.saved(self.member, self._by_name))
        with self._gate:
            with self._changed:
                is_wanted, generation = self._is_persisting(snapshot), self._generation
            if not is_wanted:  # rewound meanwhile
                self.store.discard(draft)
                return
            self.store.commit(draft, generation)
            with self._changed:
                skipped = self._advance(self._buffer.durable)
                self._durable, self.error, self._has_warned = snapshot.version, None, False
            if self._on_durable is not None:
                self._on_durable(snapshot.version, list(snapshot.units))
        self._report_skipped(skipped)
        self.store.prune(self.member, self._may_lag)

    def _failed(self, snapshot: _Snapshot, error: Exception) -> None:
        with self._changed:
            is_durable = self._durable == snapshot.version
            if not is_durable and not self._is_persisting(snapshot):
                return  # rewound meanwhile
            what = "is durable, but what comes after it failed" if is_durable else "was not persisted"
            self.error = PersistFailed(f"version {snapshot.version} {what}: {type(error).__name__}: {error}")
            self.error.__cause__ = error
            if not is_durable:
                self._buffer.failed()
                self._may_try = False

    # ---- states

    def _check_open(self) -> None:
        if self._closing:
            raise ValueError(f"the persister of {self.store.where} is closed")

    def _has_work(self) -> bool:
        return self._may_try and self._buffer.next_to_persist is not None

    def _is_persisting(self, snapshot: _Snapshot) -> bool:
        slot = self._buffer.persisting
        return slot is not None and self._slots[slot] is snapshot

    def _advance(self, event: Callable[[], None]) -> list[_Snapshot]:
        """Apply an event to the buffer; return the snapshots that it dropped before they were persisted."""
        before = self._buffer.slots
        event()
        left = {version for _, version in self._buffer.slots}
        lost = [slot for slot, (what, version) in enumerate(before) if what == "snapshot" and version not in left]
        return [self._slots[slot] for slot in lost]

    def _report_skipped(self, skipped: Sequence[_Snapshot]) -> None:
        if self._on_skipped is not None:
            for snapshot in skipped:
                self._on_skipped(snapshot.version, list(snapshot.units))

    def _warn_of_error(self) -> None:
        if self.error is not None and not self._has_warned:
            self._has_warned = True
            warn(f"{self.error}. Training continues; the next snapshot tries again")


def _check(units: Mapping[str, Part], by_name: Mapping[str, Unit]) -> None:
    """Check the units of `Persister.begin_snapshot`; raises as it does."""
    if not units:
        raise ValueError("units: expected one or more, got none")
    for name, part in units.items():
        known = by_name.get(name)
        if known is None or known.nbytes != part.of or not 0 <= part.start <= part.end <= part.of:
            expected = "a unit of this model" if known is None else f"{known.nbytes} bytes"
            got = f"{part.of} bytes" if part.is_complete else f"bytes {part.start} to {part.end} of {part.of}"
            raise ValueError(f"units: {name}: expected {expected}, got {got}")
