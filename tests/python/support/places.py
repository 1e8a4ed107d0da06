"""Places of checkpoints that tests write to: each kind behind the same few functions."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from evermoe.checkpoint import attempts, checkpoint
from evermoe.checkpoint.checkpoint_store import CheckpointStore, find, open_store
from evermoe.checkpoint.checkpoint_write import CheckpointWrite, Increment
from evermoe.checkpoint.manifest import read_manifest
from evermoe.checkpoint.object_store import Location, ObjectPath, locate
from evermoe.checkpoint.owner import Owner
from evermoe.checkpoint.retention import NEWEST, Retention
from evermoe.comm.group import Group
from evermoe.errors import CorruptCopy
from support.models import everyone, make
from support.stores import NEWEST as NOTHING_UNDONE
from support.stores import Units, contents, model, names

PATIENCE = 20.0
MAX_STOP = 100.0


@dataclass
class Spot:
    """A place of a test's own."""

    url: str
    environment: dict[str, str] = field(default_factory=dict)
    """Variables by which it is found."""

    def locate(self, patience: float = PATIENCE) -> Location:
        return locate(self.url, patience=patience)

    @property
    def is_bucket(self) -> bool:
        return "://" in self.url

    def read(self, name: str) -> bytes:
        where = self.locate() / name
        if isinstance(where, Path):
            return where.read_bytes()
        data = where.place.read(where.key, 1 << 30)
        assert data is not None, name
        return data

    def write(self, name: str, data: bytes) -> None:
        where = self.locate() / name
        if isinstance(where, ObjectPath):
            where.place.put(where.key, data)
        else:
            where.write_bytes(data)

    def remove(self, name: str) -> None:
        where = self.locate() / name
        if isinstance(where, ObjectPath):
            where.place.remove([where.key])
        else:
            where.unlink()

    def files(self) -> dict[str, int]:
        """Sizes by name."""
        where = self.locate()
        if isinstance(where, ObjectPath):
            return {name: nbytes for name, nbytes, _ in where.place.below("")}
        return {str(path.relative_to(where)): path.stat().st_size for path in where.rglob("*") if path.is_file()}

    def copy_to(self, other: Spot) -> None:
        """All files as they are."""
        for name in self.files():
            other.write(name, self.read(name))

    def clear(self) -> None:
        """Removes all files of a place that is no folder."""
        where = self.locate()
        assert isinstance(where, ObjectPath)
        where.place.remove(list(self.files()))


def make_spot(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Spot:
    """A place of a kind: `folder`, or the name of a fixture that gives a server, whose keys go to the environment."""
    if kind == "folder":
        return Spot(str(request.getfixturevalue("tmp_path") / "saved"))
    server = request.getfixturevalue(kind)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return Spot(f"{server.url}/{uuid.uuid4().hex[:8]}", server.environment())


def another_spot(spot: Spot) -> Spot:
    """Another place of the same kind, which nothing else uses."""
    return Spot(f"{spot.url.rpartition('/')[0]}/{uuid.uuid4().hex[:8]}", spot.environment)


class Stop:
    """Where a writer stops: all its units are written, and it publishes them only once it may continue."""

    def __init__(self, store: CheckpointStore) -> None:
        self._publish = store.publish
        self._is_reached, self._may_go_on = threading.Event(), threading.Event()
        store.publish = self._publish_late  # type: ignore[method-assign]

    def _publish_late(self, *arguments: object) -> Location:
        self._is_reached.set()
        assert self._may_go_on.wait(MAX_STOP)
        path: Location = self._publish(*arguments)  # type: ignore[arg-type]
        return path

    def wait(self) -> None:
        """Until all is written but the manifest."""
        assert self._is_reached.wait(PATIENCE)

    def go_on(self) -> None:
        self._may_go_on.set()


class Writer:
    """The only member of a job, from its start to its end."""

    def __init__(
        self,
        spot: Spot,
        generation: int = 3,
        member: str = "m",
        *,
        job: str = "job",
        retention: Retention = NEWEST,
        patience: float = PATIENCE,
    ) -> None:
        self.state, self.generation = make("sgd-momentum")[2], generation
        self.store = open_store(spot.locate(patience), Owner(job, model().catalog.layout), member, retention)

    def begin(self, step: int, units: Units | None = None) -> CheckpointWrite:
        """All is read of the state when this returns, and being written."""
        self.state.adopt(everyone(self.state), dict(contents(step) if units is None else units))
        version = self.generation << 40 | step
        write = CheckpointWrite(self.store, self.state, names(), version, self.generation, Group())
        write.wait_captured()
        return write

    def write(self, step: int, units: Units | None = None) -> Location:
        return self.begin(step, units).wait_published()

    def begin_save(self, step: int, experts: Sequence[str], resumed_from: int = NOTHING_UNDONE) -> CheckpointWrite:
        """A save of some experts, and of all that is no expert."""
        self.state.adopt(everyone(self.state), dict(contents(step)))
        version, units = self.generation << 40 | step, [*experts, *model().catalog.dense()]
        increment = Increment({}, resumed_from)
        write = CheckpointWrite(self.store, self.state, units, version, self.generation, Group(), increment=increment)
        write.wait_captured()
        return write

    def save(self, step: int, experts: Sequence[str], resumed_from: int = NOTHING_UNDONE) -> Location:
        return self.begin_save(step, experts, resumed_from).wait_published()

    def close(self) -> None:
        self.store.close()


def write(spot: Spot, *steps: int, generation: int = 3) -> list[Location]:
    writer = Writer(spot, generation)
    found = [writer.write(step) for step in steps]
    writer.close()
    return found


def steps(spot: Spot) -> list[int]:
    """Of the complete checkpoints, newest first."""
    return sorted((version & (1 << 40) - 1 for version in find(spot.locate())), reverse=True)


def forget() -> None:
    """Read all manifests again, as another process does."""
    attempts._seen.clear()


def is_whole(path: Location, step: int) -> bool:
    """Whether all units can be read; to read what was never written fails the test."""
    try:
        found = checkpoint.read(read_manifest(path), model(), names())
    except CorruptCopy:
        return False
    wrong = [name for name, data in contents(step).items() if not torch.equal(data, found[name])]
    assert not wrong, f"{wrong} are said to be of step {step}, and have other bytes"
    return True


def all_whole(spot: Spot) -> list[int]:
    """Steps of the checkpoints, newest first, each of which can be read."""
    found = find(spot.locate())
    for version, path in found.items():
        assert is_whole(path, version & (1 << 40) - 1), path
    return steps(spot)


def write_as_process(spot: Spot, generation: int, step: int) -> None:
    """Write one checkpoint in a process, and end."""
    os.environ |= spot.environment
    write(spot, step, generation=generation)
