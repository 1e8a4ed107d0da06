"""A job's checkpoints in an object store: complete ones, attempts under way, and attempts that were given up.

    URL/step-00000120.0000000003-7f01aa22/manifest.json     last: version, digest and file of every unit
    URL/step-00000120.0000000003-7f01aa22/begun.json        first: the job that writes it
    URL/step-00000120.0000000003-7f01aa22/00007-moe.experts.3.safetensors
    URL/owner.json, run.json                                see `evermoe.checkpoint.owner`, `run_claim`; without locks
    URL/index.json                                          names of the checkpoints, for readers that cannot list

The name is that of one attempt: its step, the generation of the members that write, and a unique word. The store needs
only create-only writes, and lists that show every earlier write. The rules:

1. Whoever creates an attempt's manifest decides its outcome. The writer creates the manifest; another process creates
an empty one, and then the attempt never becomes a checkpoint. So a writer that was stopped for hours finds its attempt
given up.
2. A checkpoint is removed by emptying its manifest. Empty manifests stay for a week, so that a delayed request cannot
restore one.
3. A unit that has not changed since a checkpoint is not written again: the manifest names the file of that checkpoint.
The manifest is committed only if each such file was seen in use by a checkpoint after the attempt began.
4. Only files of attempts that were given up or removed are deleted, if no checkpoint uses them and no attempt is
undecided after 1 or 2. By 3 and 4 no checkpoint loses a file: if it saw its base in use, it began before the base was
removed.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from safetensors.torch import save
from torch import Tensor

from evermoe._native import digest
from evermoe.checkpoint.attempts import (
    ATTEMPT,
    WRITES,
    Attempts,
    Cleaner,
    files_of,
    give_up_older,
    sort,
    superseded,
    write_index,
)
from evermoe.checkpoint.folder import PERSISTED
from evermoe.checkpoint.manifest import MANIFEST, Entry, Manifest, as_bytes, parsed
from evermoe.checkpoint.object_store import ObjectPath, ObjectStore
from evermoe.checkpoint.owner import OWNER, Owner, owner_text, read_owner
from evermoe.checkpoint.partial_bucket import generations
from evermoe.checkpoint.plain_files import PROBE
from evermoe.checkpoint.retention import NEWEST, Retention
from evermoe.errors import PersistFailed
from evermoe.process.run_claim import RUN, RUN_BYTES, Run
from evermoe.state.unit import Unit
from evermoe.state.version import generation_of, step_of

BEGUN = "begun.json"
_ODD = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME = 100


class CheckpointBucket:
    """The checkpoints below a URL, as one member of a job writes them; see the module's description.

    Args:
        place: the object store.
        owner: the member's job, and the layout of its model.
        member: its name, unique among all processes of the job.
        retention: checkpoints to keep when a new one is complete.

    Raises:
        ValueError: the existing checkpoints are of another model.
        OSError: the store cannot be written to.
    """

    def __init__(self, place: ObjectStore, owner: Owner, member: str, retention: Retention = NEWEST) -> None:
        self.directory = ObjectPath(place)
        self._place, self._owner, self._retention = place, owner, retention
        self._attempts = Attempts(place)
        self._cleaner = Cleaner(self._attempts)
        self._left: set[str] = set()
        """Decided attempts whose files remain."""
        probe = f"{PROBE}{member}"
        place.put(probe, b"x")
        place.remove([probe])
        self._run: Run | None = None
        self._has_taken = False
        """Whether `run.json` was seen to name that run."""
        self._take_over()

    def _take_over(self) -> None:
        found = read_owner(self.directory)
        is_other = found is not None and found.layout != self._owner.layout
        if found is not None and is_other and (sort(self._attempts.read_all()) or self._saved()):
            raise ValueError(
                f"checkpoints: {self.directory} has checkpoints of job {found.job!r}, which trained another model or "
                f"optimizer than this job, {self._owner.job!r}. Give it a URL of its own, or remove those"
            )
        if found != self._owner:
            self._place.put(OWNER, owner_text(self._owner).encode())

    def newest_generation(self) -> int:
        """Return the newest generation that wrote here, attempts included; that of the running job must be newer."""
        known = self._attempts.read_all()
        writers = [int(match[2] or 0) for name in known if (match := ATTEMPT.match(name))]
        writers += self._saved()
        return max([*writers, *(generation_of(each.version) for each in sort(known))], default=0)

    def found(self) -> Run | None:
        """Return the run that has written `run.json`, alive or not; None if the store does not answer."""
        with contextlib.suppress(OSError):
            return self._read_run()
        return None

    def _read_run(self) -> Run | None:
        return Run.parsed(self._place.read(RUN, RUN_BYTES) or b"")

    def claim_for(self, run: Run, patience: float) -> None:
        """Claim the store for a run, which the previous run finds out before it publishes.

        If the store does not answer now, the run is claimed later.
        """
        if run != self._run:
            self._run, self._has_taken = run, False
        with contextlib.suppress(OSError):
            self._check_run()

    def _check_run(self) -> None:
        """Write `run.json` once; later check that it has not changed.

        Raises:
            PersistFailed: another run has claimed the store.
            OSError: the store does not answer.
        """
        if self._run is None:
            return
        found = self._read_run()
        if found == self._run:
            self._has_taken = True
        elif found is None or not self._has_taken:
            self._place.put(RUN, self._run.to_text().encode())
            self._has_taken = True
        else:
            raise PersistFailed(f"{self.directory} was taken over by {found.describe()}")

    def _saved(self) -> list[int]:
        return generations(self.directory / PERSISTED)

    def draft(self, version: int, generation: int, attempt: str) -> ObjectPath:
        """Return the location where the members of a generation write a version; each attempt has its own."""
        return self.directory / f"step-{step_of(version):08d}.{generation:010d}-{attempt}"

    def _check_owner(self) -> None:
        found = read_owner(self.directory)
        if found is not None and found.job != self._owner.job:
            raise PersistFailed(
                f"{self.directory} now belongs to job {found.job!r}, not to {self._owner.job!r}: give each its own URL"
            )
        self._check_run()

    def write(self, draft: ObjectPath, rank: int, units: Mapping[str, tuple[Unit, Tensor]]) -> dict[str, Entry]:
        """Write a rank's units except those that a checkpoint already contains; rank 0 begins the attempt.

        Args:
            draft: of the attempt.
            rank: of this member.
            units: by name, and their bytes, uint8 `[nbytes]`.

        Raises:
            PersistFailed: the URL now belongs to another job.
            OSError: the units cannot be written.
        """
        if rank == 0:
            self._check_owner()
            announce_draft(draft, self._owner)
        newest = sort(self._attempts.read_all(), self._owner.layout)[-1:]
        base = newest[0].manifest if newest else None

        def write_one(at: int, name: str, unit: Unit, data: Tensor) -> Entry:
            entry = shared_entry(base, name, digest(data.numpy()), [spec.name for spec in unit.specs])
            return entry or put_unit(draft, f"{rank:04d}-{at:05d}", name, unit.tensors(data))

        with ThreadPoolExecutor(WRITES, thread_name_prefix="evermoe-write") as pool:
            parts = [pool.submit(write_one, at, name, *unit) for at, (name, unit) in enumerate(units.items())]
            try:
                return {name: part.result() for name, part in zip(units, parts, strict=True)}
            finally:
                for part in parts:
                    part.cancel()

    def publish(self, draft: ObjectPath, version: int, manifest: str) -> ObjectPath:
        """Commit an attempt whose units are written as the checkpoint of its version; remove the superseded ones.

        Raises:
            PersistFailed: the URL now belongs to another job, newer members gave the attempt up, or a checkpoint whose
                files it shares was removed.
            OSError: the manifest cannot be written; nothing is removed.
        """
        self._check_owner()
        content = manifest.encode()
        ours = parsed(draft, content)
        shared = {(origin, ours.units[unit][0]) for unit, origin in ours.origins.items()}
        if shared and not shared <= files_of(self._attempts.read_all().values()):
            raise PersistFailed(
                "a checkpoint whose unchanged units this one shares was removed: the next checkpoint writes all units"
            )
        if not self._place.create(f"{draft.name}/{MANIFEST}", content):
            raise PersistFailed(f"{draft.name} was given up by members that continued without this one")
        with contextlib.suppress(OSError):  # files that remain are removed later
            self._prune(draft.name, version)
        return draft

    def _prune(self, written: str, version: int) -> None:
        known = self._attempts.read_all()
        mine = ATTEMPT.match(written)
        assert mine is not None
        for name, each in known.items():
            match = ATTEMPT.match(name)
            if each.is_open and match and int(match[2] or 0) < int(mine[2]) and self._cleaner.give_up(name):
                self._left.add(name)
        for going in superseded(known, self._retention, before=version, written=written):
            self._cleaner.remove_checkpoint(going.path.name)
            self._left |= {going.path.name, *going.manifest.origins.values()}
        write_index(self._attempts)
        if self._left and self._cleaner.remove_files(self._left):
            self._left.clear()

    def discard(self, draft: ObjectPath) -> None:
        """Give an attempt up unless it has become a checkpoint."""
        with contextlib.suppress(OSError):  # a later attempt gives it up
            if self._cleaner.give_up(draft.name):
                self._left.add(draft.name)
                if self._cleaner.remove_files(self._left):
                    self._left.clear()

    def sweep(self, generation: int) -> None:
        """Give up, in the background, the attempts of processes that died or were left behind.

        Args:
            generation: of the members, this one included.
        """
        threading.Thread(target=self._sweep, args=(generation,), name="evermoe-sweep", daemon=True).start()

    def _sweep(self, generation: int) -> None:
        attempts = Attempts(self._place)
        with contextlib.suppress(OSError, PersistFailed):  # the next publication does it, or another run owns the store
            self._check_run()
            give_up_older(attempts, generation)
            if not Cleaner(attempts).remove_files(now=time.time()):
                self._left |= {name for name, each in attempts.read_all().items() if each.is_over}
            self._place.remove([name for name in self._place.names() if name.startswith(PROBE)])

    def close(self) -> None:
        """Do nothing: no lock is held, and the next job may use the URL."""


def announce_draft(draft: ObjectPath, owner: Owner) -> None:
    """Announce an attempt to all other members.

    Raises:
        OSError: the announcement cannot be written.
    """
    draft.place.put((draft / BEGUN).key, owner_text(owner).encode())


def shared_entry(base: Manifest | None, name: str, value: int, names: Sequence[str]) -> Entry | None:
    """Return the entry of a checkpoint's unit with this digest and these tensors; None if the checkpoint has none."""
    if base is None or base.units.get(name, ("", None))[1] != value or base.names[name] != list(names):
        return None
    return base.units[name][0], value, names, base.origins.get(name, base.path.name)


def put_unit(draft: ObjectPath, number: str, name: str, tensors: Mapping[str, Tensor]) -> Entry:
    """Write a unit to a file of its own; `number` begins the file's name and is unique within the attempt.

    Raises:
        OSError: the file cannot be written.
    """
    apart = {key: tensor.contiguous() for key, tensor in tensors.items()}
    file = f"{number}-{_ODD.sub('_', name)[:_MAX_NAME]}.safetensors"
    draft.place.put((draft / file).key, save({f"{name}/{key}": tensor for key, tensor in apart.items()}))
    return file, digest(as_bytes(apart).numpy()), list(apart), None
