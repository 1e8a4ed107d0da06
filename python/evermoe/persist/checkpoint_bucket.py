"""A job's checkpoints in an object store: what is complete, what is being written, what was given up.

    URL/step-00000120.0000000003-7f01aa22/manifest.json     last: version, digest and file of every unit
    URL/step-00000120.0000000003-7f01aa22/begun.json        first: the job that writes it
    URL/step-00000120.0000000003-7f01aa22/00007-moe.experts.3.safetensors
    URL/owner.json, run.json                                see `evermoe.persist.owner`, `run_claim`; without locks
    URL/index.json                                          names of the checkpoints, for readers that cannot list

The name is that of one attempt: step, generation of the members that write, and a word of their own. The rules, which
need nothing of a store but a create-only write and lists that show what was written before:

1. Whoever creates an attempt's manifest decides about it: its writer, with the manifest; or another, with an empty one,
   and then it never becomes a checkpoint. So a writer that was stopped for hours finds its attempt given up.
2. A checkpoint is removed by making its manifest empty. Empty manifests stay for a week, lest a request that was under
   way brings one back.
3. A unit that has not changed since a checkpoint is not written again: the manifest names that one's file. It is
   committed only after the attempt was begun and every such file then seen in use by a checkpoint.
4. Files are removed only of what was given up or removed, if no checkpoint uses them and, seen after 1 or 2, no attempt
   is undecided. By 3 and 4 no checkpoint loses a file: if it saw its base in use, it was begun before that was removed.
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
from evermoe.errors import PersistFailed
from evermoe.persist.attempts import (
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
from evermoe.persist.folder import PERSISTED
from evermoe.persist.manifest import MANIFEST, Entry, Manifest, as_bytes, parsed
from evermoe.persist.object_store import ObjectPath, ObjectStore
from evermoe.persist.owner import OWNER, Owner, owner_text, read_owner
from evermoe.persist.partial_bucket import generations
from evermoe.persist.plain_files import PROBE
from evermoe.persist.retention import NEWEST, Retention
from evermoe.run_claim import RUN, RUN_BYTES, Run
from evermoe.state.unit import Unit
from evermoe.state.version import generation_of, step_of

BEGUN = "begun.json"
_ODD = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME = 100


class CheckpointBucket:
    """The checkpoints below a URL, as one member of a job writes them; see the head of this file.

    Args:
        place: where.
        owner: the member's job, and the layout of its model.
        member: its name, unique among all processes of the job.
        retention: which checkpoints stay when a new one is complete.

    Raises:
        ValueError: its checkpoints are of another model.
        OSError: it cannot be written there.
    """

    def __init__(self, place: ObjectStore, owner: Owner, member: str, retention: Retention = NEWEST) -> None:
        self.directory = ObjectPath(place)
        self._place, self._owner, self._retention = place, owner, retention
        self._attempts = Attempts(place)
        self._cleaner = Cleaner(self._attempts)
        self._left: set[str] = set()
        """Attempts that are over, whose files are left."""
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
        if found is not None and is_other and (sort(self._attempts.look()) or self._saved()):
            raise ValueError(
                f"checkpoints: {self.directory} has checkpoints of job {found.job!r}, which trained another model or "
                f"optimizer than this job, {self._owner.job!r}. Give it a URL of its own, or remove those"
            )
        if found != self._owner:
            self._place.put(OWNER, owner_text(self._owner).encode())

    def newest_generation(self) -> int:
        """The newest generation that wrote here, also of attempts: that of the running job must be newer."""
        known = self._attempts.look()
        writers = [int(match[2] or 0) for name in known if (match := ATTEMPT.match(name))]
        writers += self._saved()
        return max([*writers, *(generation_of(each.version) for each in sort(known))], default=0)

    def found(self) -> Run | None:
        """The run that has written `run.json`, living or not; None if the store does not answer."""
        with contextlib.suppress(OSError):
            return self._read_run()
        return None

    def _read_run(self) -> Run | None:
        return Run.parsed(self._place.read(RUN, RUN_BYTES) or b"")

    def take(self, run: Run, patience: float) -> None:
        """Takes the place for a run; a previous one finds that before it publishes. Later, if no store answers now."""
        if run != self._run:
            self._run, self._has_taken = run, False
        with contextlib.suppress(OSError):
            self._check_run()

    def _check_run(self) -> None:
        """Writes `run.json` once, and checks later that it is the same.

        Raises:
            PersistFailed: another run has taken the place over.
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
        """Where the members of a generation write a version, at an attempt that has a name of its own."""
        return self.directory / f"step-{step_of(version):08d}.{generation:010d}-{attempt}"

    def _check_owner(self) -> None:
        found = read_owner(self.directory)
        if found is not None and found.job != self._owner.job:
            raise PersistFailed(
                f"{self.directory} belongs to job {found.job!r} now, not to {self._owner.job!r}: give each a URL"
            )
        self._check_run()

    def write(self, draft: ObjectPath, rank: int, units: Mapping[str, tuple[Unit, Tensor]]) -> dict[str, Entry]:
        """Writes a rank's units, but for those that a checkpoint has already; rank 0 begins the attempt.

        Args:
            draft: of the attempt.
            rank: of this member.
            units: by name, and their bytes, uint8 `[nbytes]`.

        Raises:
            PersistFailed: the URL belongs to another job now.
            OSError: they cannot be written.
        """
        if rank == 0:
            self._check_owner()
            begin(draft, self._owner)
        newest = sort(self._attempts.look(), self._owner.layout)[-1:]
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
        """Makes an attempt whose units are written the checkpoint of its version; removes what it supersedes.

        Raises:
            PersistFailed: the URL belongs to another job now, or the attempt was given up by newer members, or what it
                shares with other checkpoints has gone with those.
            OSError: it cannot be done; nothing is removed.
        """
        self._check_owner()
        content = manifest.encode()
        ours = parsed(draft, content)
        shared = {(origin, ours.units[unit][0]) for unit, origin in ours.origins.items()}
        if shared and not shared <= files_of(self._attempts.look().values()):
            raise PersistFailed("what has not changed since a checkpoint was removed with that one: the next is whole")
        if not self._place.create(f"{draft.name}/{MANIFEST}", content):
            raise PersistFailed(f"{draft.name} was given up by members that went on without this one")
        with contextlib.suppress(OSError):  # what is left goes later
            self._prune(draft.name, version)
        return draft

    def _prune(self, written: str, version: int) -> None:
        known = self._attempts.look()
        mine = ATTEMPT.match(written)
        assert mine is not None
        for name, each in known.items():
            match = ATTEMPT.match(name)
            if each.is_open and match and int(match[2] or 0) < int(mine[2]) and self._cleaner.give_up(name):
                self._left.add(name)
        for going in superseded(known, self._retention, before=version, written=written):
            self._cleaner.remove(going.path.name)
            self._left |= {going.path.name, *going.manifest.origins.values()}
        write_index(self._attempts)
        if self._left and self._cleaner.clean(self._left):
            self._left.clear()

    def discard(self, draft: ObjectPath) -> None:
        """Gives an attempt up, unless it has become a checkpoint meanwhile."""
        with contextlib.suppress(OSError):  # its successors will
            if self._cleaner.give_up(draft.name):
                self._left.add(draft.name)
                if self._cleaner.clean(self._left):
                    self._left.clear()

    def sweep(self, generation: int) -> None:
        """Gives up what processes have begun that died, or were left behind; in the background.

        Args:
            generation: of the members, of which this is one.
        """
        threading.Thread(target=self._sweep, args=(generation,), name="evermoe-sweep", daemon=True).start()

    def _sweep(self, generation: int) -> None:
        attempts = Attempts(self._place)
        with contextlib.suppress(OSError, PersistFailed):  # the next publication does it, or it is another run's place
            self._check_run()
            give_up_older(attempts, generation)
            if not Cleaner(attempts).clean(now=time.time()):
                self._left |= {name for name, each in attempts.look().items() if each.is_over}
            self._place.remove([name for name in self._place.names() if name.startswith(PROBE)])

    def close(self) -> None:
        """Nothing is held: the next job may have the URL."""


def begin(draft: ObjectPath, owner: Owner) -> None:
    """Shows all others that an attempt is under way.

    Raises:
        OSError: it cannot be written.
    """
    draft.place.put((draft / BEGUN).key, owner_text(owner).encode())


def shared_entry(base: Manifest | None, name: str, value: int, names: Sequence[str]) -> Entry | None:
    """Where a checkpoint has a unit with this digest and these tensors; None if it has not."""
    if base is None or base.units.get(name, ("", None))[1] != value or base.names[name] != list(names):
        return None
    return base.units[name][0], value, names, base.origins.get(name, base.path.name)


def put_unit(draft: ObjectPath, number: str, name: str, tensors: Mapping[str, Tensor]) -> Entry:
    """Writes a unit to a file of its own, whose name begins with a number that no other unit of the attempt has.

    Raises:
        OSError: it cannot be written.
    """
    apart = {key: tensor.contiguous() for key, tensor in tensors.items()}
    file = f"{number}-{_ODD.sub('_', name)[:_MAX_NAME]}.safetensors"
    draft.place.put((draft / file).key, save({f"{name}/{key}": tensor for key, tensor in apart.items()}))
    return file, digest(as_bytes(apart).numpy()), list(apart), None
