"""Partial persistence (PEC; MoC-System): snapshots of a few units at a time, written in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evermoe._native import TripleBuffer, digests
from evermoe.errors import LeftBehind, PersistFailed
from evermoe.persist.manifest import BYTES, Part
from evermoe.persist.object_store import LOOK_SECONDS
from evermoe.persist.partial_store import PartialStore
from evermoe.persist.saved import Saved, SavedUnit
from evermoe.state.unit import Unit
from evermoe.state.version import generation_of
from evermoe.warn import warn

ALIGNMENT = 64
"""Bytes at which each unit starts in a slot."""
WHOLE = ("snapshot", "persisting", "recovery")
"""States of slots in which all of a version is there."""


@dataclass(frozen=True)
class HeldUnit:
    """A version of one unit that waits in memory to be written, or has been written last."""

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
    """Of units that are there in part."""
    digests: Mapping[str, int] = field(default_factory=dict)
    """Of these, of all their bytes."""
    members: Sequence[str] = ()
    """Those that save what may not lag of the version."""

    def hold(self, version: int, units: Mapping[str, Part], members: Sequence[str]) -> _Snapshot:
        """Room for other units, in the same memory if that is large enough, and not much too large.

        The first snapshot of a job has all units, and those after it a few.
        """
        starts, end = {}, 0
        for name, part in units.items():
            starts[name] = end
            end += -(-(part.end - part.start) // ALIGNMENT) * ALIGNMENT
        memory = self.memory if end <= len(self.memory) <= 2 * end else torch.empty(end, dtype=torch.uint8)
        views = {name: memory[at : at + units[name].end - units[name].start] for name, at in starts.items()}
        parts = {name: part for name, part in units.items() if not part.is_whole}
        return _Snapshot(version, memory, views, parts, members=members)

    def whole_digests(self) -> dict[str, int]:
        """xxh3-64 of the units that are there whole."""
        whole = [name for name in self.units if name not in self.parts]
        return dict(zip(whole, digests([[self.units[name].numpy()] for name in whole]), strict=True))

    def saved(self, member: str, by_name: Mapping[str, Unit]) -> Saved:
        """What a member saves of it."""
        found = {}
        for name, value in {**self.whole_digests(), **self.digests}.items():
            unit, data = by_name[name], self.units[name]
            pieces = {BYTES: data} if name in self.parts else unit.tensors(data)
            found[name] = SavedUnit(value, [spec.name for spec in unit.specs], pieces, self.parts.get(name))
        return Saved(self.version, member, found, self.members)


class Persister:
    """Takes snapshots of some units at a time and writes them, one after another, in a thread of its own.

        views = persister.begin(version, {"moe.experts.3": Part.whole(nbytes)})
        state.read("moe.experts.3", views["moe.experts.3"])
        persister.commit()

    Several members may save a unit together, each a part of its bytes. Of three slots one is written, one is persisted
    and one has the newest durable version, so `begin` and `commit` never wait for the place. Where snapshots come too
    fast for it, the newest goes first and those in between are skipped: `on_durable` says which units became durable,
    `on_skipped` which did not.

    A member that was left out of the job without knowing it, since it slept, persists nothing more: the members that
    went on are of a newer generation, and so is what they have persisted.

    A place that refuses a snapshot does not disturb training: `error` keeps why, one warning tells it, and the next
    snapshot takes its place. `flush` tries the same one again.

    Args:
        store: shared by all members.
        member: whose snapshots these are; part of file names, unique among the members of a job.
        units: all of the model, `UnitCatalog.units`. Experts may lag in a recovery, other units may not.
        on_durable: gets (version, units) in the persister's thread, before any `rewind`; must not call the persister.
        on_skipped: gets (version, units) that were overwritten or overtaken before they were durable; from `begin` or
            in the persister's thread.

    Raises:
        ValueError: `member` cannot be part of a file name.
        OSError: the place cannot be made or read.
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
        """Why the last attempt failed; None after one that did not."""
        self._by_name = {unit.name: unit for unit in units}
        self._may_lag = {unit.name for unit in self._by_name.values() if unit.expert is not None}
        self._on_durable, self._on_skipped = on_durable, on_skipped
        self._buffer = TripleBuffer()
        self._slots = [_Snapshot(), _Snapshot(), _Snapshot()]
        self._changed = threading.Condition()
        """Guards all that both threads use; never held while the place is."""
        self._gate = threading.Lock()
        """Held while a manifest comes or goes: a rewind and a commit exclude each other."""
        self._generation = 0
        """Of the members that this one knows to be with."""
        self._owed: int | None = None
        """What is newer than this version and of older generations is still to be removed."""
        self._may_try, self._busy, self._closing, self._told = True, False, False, False
        store.join(member)
        self._durable = store.newest(member)
        self._thread = threading.Thread(target=self._run, name="evermoe-persist", daemon=True)
        self._thread.start()

    @property
    def durable_version(self) -> int | None:
        """The newest version of which this member has persisted a part."""
        return self._durable

    def whole(self) -> Iterator[HeldUnit]:
        """The units of all complete snapshots in memory, which stay as they are until the next `begin`."""
        with self._changed:
            slots = [self._slots[at] for at, (what, _) in enumerate(self._buffer.slots) if what in WHOLE]
        for snapshot in slots:
            for name, value in snapshot.whole_digests().items():
                yield HeldUnit(name, snapshot.version, value, snapshot.units[name])

    def begin(self, version: int, units: Mapping[str, Part], members: Sequence[str] = ()) -> dict[str, Tensor]:
        """Starts a snapshot of units, whole or in part: for each the view to write, uint8 `[end - start]`.

        Args:
            version: of the state.
            units: by name, which of its bytes.
            members: those that save what may not lag of the version; none where this one has all.

        Raises:
            ValueError: a unit is unknown or has another size, none is given, a snapshot is being written, a version as
                new is there, or the persister is closed.
        """
        _check(units, self._by_name)
        self._tell()
        with self._changed:
            self._check_open()
            if self._durable is not None and version <= self._durable:
                raise ValueError(f"version: {version} is not after {self._durable}, which is durable; rewind first")
            skipped = self._advance(lambda: self._buffer.begin(version))
            slot = self._buffer.writing
            assert slot is not None
            self._slots[slot] = self._slots[slot].hold(version, units, members)
            views = dict(self._slots[slot].units)
        self._tell_skipped(skipped)
        return views

    def can_begin(self, version: int) -> bool:
        """Whether nothing as new as a version was begun here, or is durable."""
        with self._changed:
            begun = [self._durable, *(found for _, found in self._buffer.slots)]
        return all(found is None or found < version for found in begun)

    def commit(self, digests: Mapping[str, int] | None = None) -> None:
        """The snapshot is whole: lets the persister have it.

        Args:
            digests: xxh3-64 of all bytes of each unit that is there in part, by name.

        Raises:
            ValueError: none is being written, or a digest is missing.
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
        """Abandons the snapshot that is being written.

        Raises:
            ValueError: none is being written.
        """
        with self._changed:
            self._buffer.abandon()

    def rewind(self, version: int, generation: int = 0) -> None:
        """Rolls back: members of a generation go on from a version. Newer ones of before go, of every member.

        What waits here of an older generation than the version goes, too: who was away while others went on does not
        know whether they have kept it. Nothing of either appears afterwards. Where it fails, what is persisted next
        tries it first. Members need not wait for each other, but without a generation: then everything newer goes.

        Raises:
            PersistFailed: the place does not let the files go, or is busy for long. A later recovery may find them.
        """
        with self._changed:
            self._generation, self._owed = generation, version
            if self._durable is not None and self._durable > version:
                self._durable = None  # or an older one, which is not known yet
            waiting = [self._slots[at] for at, (what, _) in enumerate(self._buffer.slots) if what in WHOLE[:2]]
            old = [each for each in waiting if generation_of(each.version) < generation_of(version)]
            if old or ((slot := self._buffer.recovery) is not None and self._slots[slot].version > version):
                self._buffer = TripleBuffer()  # all that is there is old or newer
            else:
                self._buffer.rewind(version)
            self._changed.notify_all()
        self._tell_skipped(old)
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
        """What is owed of the last rewind; the gate is held."""
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
        """Waits until the newest snapshot is durable and what it replaces is removed, for at most so many seconds.

        Raises:
            PersistFailed: it could not be persisted.
            TimeoutError: it is not durable yet.
            ValueError: the persister is closed.
        """
        with self._changed:
            self._check_open()
            self._may_try = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._busy and not self._has_work(), timeout):
                raise TimeoutError(f"{self.store.where}: not durable after {timeout} s: {self._buffer!r}")
            if not self._may_try and self.error is not None:
                self._told = True
                raise self.error

    def close(self, timeout: float | None = 10.0) -> None:
        """Ends the thread once what it persists is done, or after `timeout` seconds; the rest needs `flush` before."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        self._tell()

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
            except Exception as error:  # whatever it is, training continues
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
                self._durable, self.error, self._told = snapshot.version, None, False
            if self._on_durable is not None:
                self._on_durable(snapshot.version, list(snapshot.units))
        self._tell_skipped(skipped)
        self.store.prune(self.member, self._may_lag)

    def _failed(self, snapshot: _Snapshot, error: Exception) -> None:
        with self._changed:
            is_durable = self._durable == snapshot.version
            if not is_durable and not self._is_persisting(snapshot):
                return  # rewound meanwhile: no longer wanted
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
        """After the event: the snapshots that it took away before they were persisted."""
        before = self._buffer.slots
        event()
        left = {version for _, version in self._buffer.slots}
        lost = [slot for slot, (what, version) in enumerate(before) if what == "snapshot" and version not in left]
        return [self._slots[slot] for slot in lost]

    def _tell_skipped(self, skipped: Sequence[_Snapshot]) -> None:
        if self._on_skipped is not None:
            for snapshot in skipped:
                self._on_skipped(snapshot.version, list(snapshot.units))

    def _tell(self) -> None:
        if self.error is not None and not self._told:
            self._told = True
            warn(f"{self.error}. Training continues; the next snapshot tries again")


def _check(units: Mapping[str, Part], by_name: Mapping[str, Unit]) -> None:
    """Raises as `Persister.begin` does."""
    if not units:
        raise ValueError("units: expected one or more, got none")
    for name, part in units.items():
        known = by_name.get(name)
        if known is None or known.nbytes != part.of or not 0 <= part.start <= part.end <= part.of:
            expected = "a unit of this model" if known is None else f"{known.nbytes} bytes"
            got = f"{part.of} bytes" if part.is_whole else f"those from {part.start} to {part.end} of {part.of}"
            raise ValueError(f"units: {name}: expected {expected}, got {got}")
