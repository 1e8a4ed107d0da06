"""A job's checkpoints and saves in an object store: complete ones, attempts under way, and given up ones.

    URL/step-00000120.0000000003-7f01aa22/manifest.json     last: version, digest and file of every unit
    URL/step-00000120.0000000003-7f01aa22/begun.json        first: the job that writes it
    URL/step-00000120.0000000003-7f01aa22/verified.json     see `evermoe.checkpoint.verified_mark`
    URL/step-00000120.0000000003-7f01aa22/0000-00007-moe.experts.3.safetensors
    URL/save-00000125.0000000003-52c0e81d/…                 a save: its manifest also names files of earlier ones
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
from collections.abc import Collection, Mapping
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
    write_index,
)
from evermoe.checkpoint.manifest import CHECKPOINT, MANIFEST, SAVE, Manifest, Row, parsed
from evermoe.checkpoint.object_store import LOOK_SECONDS, ObjectPath, ObjectStore, hurried
from evermoe.checkpoint.owner import OWNER, Owner, owner_text, read_owner
from evermoe.checkpoint.plain_files import PROBE, in_groups
from evermoe.checkpoint.retention import NEWEST, SAVES, Retention, is_undone
from evermoe.checkpoint.unit_share import Share
from evermoe.checkpoint.verified_mark import superseded_of
from evermoe.errors import PersistFailed
from evermoe.process.run_claim import RUN, RUN_BYTES, Run
from evermoe.state.version import generation_of, step_of

BEGUN = "begun.json"
BOTH = CHECKPOINT, SAVE
FILE_BYTES = 64 << 20
"""Units of a save share a file up to this size, since a request has a fixed cost."""
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
        self.awaited: set[int] = set()
        self._attempts = Attempts(place)
        self._cleaner = Cleaner(self._attempts)
        self._left: set[str] = set()
        """Decided attempts whose files remain."""
        self._cleaning = threading.Lock()
        """Held while files are removed: a checkpoint and a save may be published at the same time."""
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
        if found is not None and is_other and sort(self._attempts.read_all(), kinds=BOTH):
            raise ValueError(
                f"checkpoints: {self.directory} has checkpoints of job {found.job!r}, which trained another model or "
                f"optimizer than this job, {self._owner.job!r}, or with another number of readers or another "
                "state_bytes of ElasticReaders. Give it a URL of its own, or remove those"
            )
        if found != self._owner:
            self._place.put(OWNER, owner_text(self._owner).encode())

    def newest_generation(self) -> int:
        """Return the newest generation that wrote here, attempts included; that of the running job must be newer."""
        known = self._attempts.read_all()
        writers = [int(match[3] or 0) for name in known if (match := ATTEMPT.match(name))]
        return max([*writers, *(generation_of(each.version) for each in sort(known, kinds=BOTH))], default=0)

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

    def draft(self, version: int, generation: int, attempt: str, kind: str = CHECKPOINT) -> ObjectPath:
        """Return the location where the members of a generation write a version; each attempt has its own."""
        return self.directory / f"{kind}-{step_of(version):08d}.{generation:010d}-{attempt}"

    def newest_save(self, version: int, generation: int) -> Manifest | None:
        """Return the newest save after a recovery, and remove those that it has undone; see `CheckpointStore`."""
        quick = hurried(self.directory, LOOK_SECONDS)
        assert isinstance(quick, ObjectPath)
        attempts = Attempts(quick.place)
        found = sort(attempts.read_all(), self._owner.layout, (SAVE,))
        undone = [each for each in found if is_undone(each.version, version, generation)]
        for each in undone:
            Cleaner(attempts).remove_checkpoint(each.path.name)
        with self._cleaning:
            self._left |= {name for each in undone for name in (each.path.name, *_owners(each.manifest))}
        return next((each.manifest for each in reversed(found) if each not in undone), None)

    def _check_owner(self) -> None:
        found = read_owner(self.directory)
        if found is not None and found.job != self._owner.job:
            raise PersistFailed(
                f"{self.directory} now belongs to job {found.job!r}, not to {self._owner.job!r}: give each its own URL"
            )
        self._check_run()

    def write(self, draft: ObjectPath, rank: int, shares: Collection[Share]) -> list[Row]:
        """Write a rank's shares except units that a checkpoint or save already contains; rank 0 begins the attempt.

        Raises:
            PersistFailed: the URL now belongs to another job.
            OSError: the shares cannot be written.
        """
        if rank == 0:
            self._check_owner()
            announce_draft(draft, self._owner)
        kind = SAVE if draft.name.startswith(SAVE) else CHECKPOINT
        newest = sort(self._attempts.read_all(), self._owner.layout, (kind,))[-1:]
        base = newest[0].manifest if newest else None

        def write_file(at: int, members: list[Share]) -> list[Row]:
            file = f"{rank:04d}-{at:05d}-{_ODD.sub('_', members[0].unit.name)[:_MAX_NAME]}.safetensors"
            own = [each.row(file, digest(each.data.numpy()) if each.part is None else None) for each in members]
            rows = [shared_row(base, row) or row for row in own]
            if new := [each for each, row in zip(members, rows, strict=True) if row.origin is None]:
                put_tensors(draft / file, {key: tensor for each in new for key, tensor in each.tensors().items()})
            return rows

        most_bytes = FILE_BYTES if kind == SAVE else 0
        with ThreadPoolExecutor(WRITES, thread_name_prefix="evermoe-write") as pool:
            groups = in_groups(shares, lambda share: len(share.data), most_bytes)
            files = [pool.submit(write_file, at, members) for at, members in enumerate(groups)]
            try:
                return [row for file in files for row in file.result()]
            finally:
                for file in files:
                    file.cancel()

    def publish(self, draft: ObjectPath, version: int, manifest: str) -> ObjectPath:
        """Commit an attempt whose units are written as the checkpoint or save of its version; remove superseded ones.

        Raises:
            PersistFailed: the URL now belongs to another job, newer members gave the attempt up, or a checkpoint whose
                files it shares was removed.
            OSError: the manifest cannot be written; nothing is removed.
        """
        self._check_owner()
        content = manifest.encode()
        shared = {file for file in parsed(draft, content).files if file[0] != draft.name}
        if shared and not shared <= files_of(self._attempts.read_all().values()):
            raise PersistFailed(
                "a checkpoint whose unchanged units this one shares was removed: the next checkpoint writes all units"
            )
        if not self._place.create(f"{draft.name}/{MANIFEST}", content):
            raise PersistFailed(f"{draft.name} was given up by members that continued without this one")
        self.remove_superseded(draft, version)
        return draft

    def remove_superseded(self, written: ObjectPath, version: int) -> None:
        """Remove the older checkpoints that need not stay, as a checkpoint was written or verified."""
        with contextlib.suppress(OSError), self._cleaning:  # files that remain are removed later
            self._prune(written.name, version)

    def _prune(self, written: str, version: int) -> None:
        known = self._attempts.read_all()
        mine = ATTEMPT.match(written)
        assert mine is not None
        for name, each in known.items():
            match = ATTEMPT.match(name)
            if each.is_open and match and int(match[3] or 0) < int(mine[3]) and self._cleaner.give_up(name):
                self._left.add(name)
        retention = SAVES if mine[1] == SAVE else self._retention
        awaited = () if mine[1] == SAVE else self.awaited
        found = sort(known, kinds=(mine[1],))
        for going in superseded_of(found, retention, before=version, written=written, awaited=awaited):
            self._cleaner.remove_checkpoint(going.path.name)
            self._left |= {going.path.name, *_owners(going.manifest)}
        if mine[1] == CHECKPOINT:
            write_index(self._attempts)
        self._remove_left()

    def _remove_left(self) -> None:
        if self._left and self._cleaner.remove_files(self._left):
            self._left.clear()

    def discard(self, draft: ObjectPath) -> None:
        """Give an attempt up unless it has become a checkpoint."""
        with contextlib.suppress(OSError), self._cleaning:  # a later attempt gives it up
            if self._cleaner.give_up(draft.name):
                self._left.add(draft.name)
                self._remove_left()

    def sweep(self, generation: int) -> None:
        """Give up, in the background, the attempts of processes that died or were left behind."""
        threading.Thread(target=self._sweep, args=(generation,), name="evermoe-sweep", daemon=True).start()

    def _sweep(self, generation: int) -> None:
        attempts = Attempts(self._place)
        with contextlib.suppress(OSError, PersistFailed):  # the next publication does it, or another run owns the store
            self._check_run()
            give_up_older(attempts, generation)
            with self._cleaning:
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


def _owners(manifest: Manifest) -> set[str]:
    """Return the names of the attempts whose files a manifest uses."""
    return {owner for owner, _ in manifest.files}


def shared_row(base: Manifest | None, row: Row) -> Row | None:
    """Return the row of a checkpoint's file that has the same bytes of a unit; None if there is no such file."""
    found = None if base is None or row.part is not None else base.units.get(row.unit)
    if found is None or found.is_cut or (found.digest, list(found.tensors)) != (row.digest, list(row.tensors)):
        return None
    return found.rows[0]._replace(version=None)


def put_tensors(file: ObjectPath, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file.

    Raises:
        OSError: the file cannot be written.
    """
    file.place.put(file.key, save({key: tensor.contiguous() for key, tensor in tensors.items()}))
