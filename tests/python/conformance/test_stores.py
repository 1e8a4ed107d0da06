"""The contract of every store of versions, whatever happens to its writers: one body for all of them."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

from evermoe.checkpoint.owner import LOCK, OWNER
from evermoe.errors import CorruptCopy
from support.harness import SERVER, wait_until
from support.kills import kill_at_each_operation, operations
from support.stores import STORES, Checkpoints, Saves, contents, names, versions

FILES = [Saves, Checkpoints]
LONG = (3 << 40 | 1, 3 << 40 | 2)
"""Versions of many digits, any of which may change."""
WRITTEN = "written"
"""A file next to a store's folder: a byte for each version that was written."""


def stores(among: list[type] = STORES):
    """Runs a test on every store."""
    return pytest.mark.parametrize("store", among, ids=lambda store: store.__name__)


@contextlib.contextmanager
def new_place(otherwise: Path):
    """A folder in shared memory, where arenas are and other files are quickest."""
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else otherwise
    path = root / f"evermoe-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture
def place(tmp_path):
    with new_place(tmp_path) as path:
        yield path


@pytest.fixture
def folder(place):
    path = place / "store"
    path.mkdir(mode=0o700)
    return path


def is_whole(store, folder: Path, version: int, expected: int | None = None, units: list[str] | None = None) -> bool:
    """Whether the units can be read, all of them if none are named; to read what was never written fails the test."""
    try:
        found = store.read(folder, version, names() if units is None else units)
    except CorruptCopy:
        return False
    written = contents(version if expected is None else expected)
    wrong = [name for name, data in found.items() if not torch.equal(data, written[name])]
    assert not wrong, f"{wrong} are said to be of version {version}, and have other bytes"
    return True


def write(store, folder: Path, *numbers: int, member: str = "m") -> None:
    """As one process does from its start to its end."""
    each = store(folder, member)
    for version in numbers:
        each.write(version, contents(version))
    each.close()


# ---- what is written


@stores()
def test_versions_are_read_as_they_were_written_and_the_two_newest_stay(store, folder):
    writer = store(folder)
    for version in range(1, 6):
        writer.write(version, contents(version))
        assert versions(store, folder) == [version, version - 1][: min(version, 2)]
        assert all(is_whole(store, folder, each) for each in versions(store, folder))
    writer.close()
    assert versions(store, folder) == [5, 4]


@stores()
def test_a_later_process_finds_what_was_left_and_goes_on(store, folder):
    write(store, folder, 1, 2)
    later = store(folder)
    assert versions(store, folder) == [2, 1]
    assert is_whole(store, folder, 2)
    later.write(3, contents(3))
    later.write(4, contents(4))
    later.close()
    assert versions(store, folder) == [4, 3]
    assert is_whole(store, folder, 4)


@stores()
def test_a_version_that_is_there_is_written_again_or_refused(store, folder):
    writer = store(folder)
    for version in (1, 2):
        writer.write(version, contents(version))
    with contextlib.suppress(ValueError):
        writer.write(2, contents(2))
    writer.close()
    assert is_whole(store, folder, 2)


@stores()
def test_what_is_written_last_stays_or_is_refused(store, folder):
    writer = store(folder)
    writer.write(1000, contents(1000))
    writer.write(2000, contents(2000))
    try:
        writer.write(10, contents(10))
        assert 10 in versions(store, folder) and is_whole(store, folder, 10)
    except ValueError:
        assert versions(store, folder) == [2000, 1000]
    writer.close()


# ---- damage


def flip(path: Path, position: int) -> None:
    """Another bit each time; twice is as if never."""
    with path.open("r+b", buffering=0) as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << position % 8]))


def data_positions(path: Path, version: int) -> list[int]:
    """Where a file has the last bytes of units."""
    held = path.read_bytes()
    ends = [data.numpy().tobytes()[-12:] for data in contents(version).values()]
    return [held.index(end) + 11 for end in ends if end in held and any(end)]


def data_files(folder: Path, version: int) -> dict[Path, list[int]]:
    found = {path: data_positions(path, version) for path in folder.rglob("*") if path.is_file()}
    return {path: positions for path, positions in found.items() if positions}


@stores()
def test_a_changed_byte_of_a_unit_is_refused_and_the_version_before_is_there(store, folder):
    write(store, folder, 1, 2)
    damaged = [(path, position) for path, found in data_files(folder, 2).items() for position in found]
    assert len(damaged) >= 7
    for path, position in damaged:
        flip(path, position)
        assert not is_whole(store, folder, 2), (path, position)
        assert is_whole(store, folder, 1)
        flip(path, position)
    assert is_whole(store, folder, 2)


@pytest.mark.filterwarnings("ignore:.* (is|are) ignored")
@stores()
@pytest.mark.few(1)
@pytest.mark.full
def test_a_changed_byte_anywhere_else_shows_no_unit_under_a_wrong_version(store, folder):
    write(store, folder, *LONG)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = {position for version in LONG for position in data_positions(path, version)}
        size = path.stat().st_size
        for position in set(range(0, min(size, 4000), 3 if size < 4000 else 7)) - data:
            flip(path, position)
            held = store.held(folder)
            for version in set().union(*held.values()):
                units = [name for name in held if version in held[name]]
                assert not is_whole(store, folder, version, units=units) or version in LONG
            flip(path, position)
    assert versions(store, folder) == [LONG[1], LONG[0]]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.filterwarnings("ignore:.* (is|are) ignored")
@stores()
@pytest.mark.parametrize("harm", [cut, empty, Path.unlink])
def test_a_file_that_is_cut_or_gone_is_refused(store, folder, place, harm):
    write(store, folder, 1, 2)
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (OWNER, LOCK)):
        copy = place / "copy"
        shutil.copytree(folder, copy)
        harm(copy / path.relative_to(folder))
        found = versions(store, copy)
        complete = [version for version in found if is_whole(store, copy, version)]
        assert len(complete) < 2
        assert complete or store.__name__ == "Arenas", "an arena holds both versions, another file only one"
        shutil.rmtree(copy)
    assert is_whole(store, folder, 2)


# ---- kills


def write_and_note(folder: Path, store, numbers: tuple[int, ...]) -> None:
    """Note what was written next to the folder; names come in the order that is worst for the store."""
    scandir = os.scandir

    def last_first(path):
        with scandir(path) as found:
            return contextlib.nullcontext(sorted(found, key=lambda entry: entry.name, reverse=True))

    writer = store(folder)
    os.scandir = last_first
    for version in numbers:
        writer.write(version, contents(version))
        with open(f"{folder}.{WRITTEN}", "ab", buffering=0) as file:
            file.write(bytes([version]))
    writer.close()


def written(folder: Path) -> int:
    """Return the last version that was noted as written; 0 for none."""
    told = Path(f"{folder}.{WRITTEN}")
    return told.read_bytes()[-1] if told.exists() else 0


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """`killed(store)`: what is left of a process that writes versions 1, 2 and 3, killed at each of its operations.

    The last one came to its end.
    """
    with new_place(tmp_path_factory.mktemp("killed")) as place:

        @functools.cache
        def runs(store) -> list[Path]:
            return kill_at_each_operation(place / store.__name__, writer_of(store, 1, 2, 3))

        yield runs


def writer_of(store, *numbers: int) -> Callable[[Path], None]:
    contents(max(numbers))
    return functools.partial(write_and_note, store=store, numbers=numbers)


def copied(run: Path, place: Path) -> Path:
    return shutil.copytree(run, place / run.name)


def is_within_file(run: Path) -> bool:
    """Return whether the kill came before all bytes of a file were written."""
    return not all(map(is_whole_file, run.rglob("*.safetensors")))


def is_whole_file(path: Path) -> bool:
    try:
        with safe_open(path, "pt"):
            return True
    except (SafetensorError, OSError):  # for an empty one
        return False


def is_without_manifest(run: Path) -> bool:
    """Return whether the kill came before a folder's manifest was written."""
    return any(path.is_dir() and not any(each.stat().st_size for each in path.glob("man*")) for path in run.iterdir())


@stores()
@pytest.mark.few(1)
def test_killed_at_any_operation_what_was_written_is_there_and_nothing_is_torn(store, killed):
    runs = killed(store)
    assert len(runs) > 20
    assert (written(runs[0]), written(runs[-1])) == (0, 3)
    for run in runs:
        last, found = written(run), versions(store, run)
        assert last == 0 or last in found, (run.name, last, found)
        assert all(is_whole(store, run, version) for version in found if version >= last), (run.name, last, found)


@stores()
@pytest.mark.few(1)
def test_killed_at_any_operation_no_version_is_there_in_part(store, killed):
    for run in killed(store):
        found = versions(store, run)
        assert all(is_whole(store, run, version) for version in found), (run.name, found)


@stores()
@pytest.mark.few(1)
def test_killed_while_a_version_is_written_again_one_of_the_two_is_there(store, place, folder):
    write(store, folder, 1, 2)
    again = store(folder)
    with contextlib.suppress(ValueError):
        again.write(2, contents(2))
        again.close()
        for run in kill_at_each_operation(place / "runs", writer_of(store, 2), before=folder):
            assert is_whole(store, run, 2), run.name
    assert is_whole(store, folder, 2)


@stores(among=FILES)
def test_what_gets_its_name_is_on_disk_and_the_old_one_goes_when_the_name_is_too(store, place):
    """A power failure may undo everything that was not flushed."""
    above = [place / "run", place / "run" / "new"]
    changed: set[Path] = set()
    """Files whose bytes, and folders whose names, may not be on disk."""
    named: set[Path] = set()
    """Folders with names of new versions that may not be on disk."""
    published = 0
    for kind, *paths in operations(place, functools.partial(write_below, store=store)):
        if kind == "flush":
            changed.discard(paths[0])
            named.discard(paths[0])
        elif kind == "write":
            changed.add(paths[0])
        else:
            if is_publication(kind, *paths):
                published += 1
                inside = [path for path in changed if path.is_relative_to(paths[0])]
                assert not inside, f"{paths[0]} gets its name before these are on disk: {inside}"
                named |= {paths[1].parent} | ({paths[1].parent.parent} if paths[1].name == "manifest.json" else set())
            elif paths[0].name == "manifest.json" or (kind == "rename" and paths[1].name != OWNER):
                assert not named, f"{paths[0]} goes before new names in these are on disk: {named}"
            if kind == "rename" and paths[0] in changed:
                changed.add(paths[1])
            changed.discard(paths[0])
            changed |= {path.parent for path in paths}
    assert published == 3
    assert not named
    assert not changed & set(above)


def write_below(run: Path, store) -> None:
    """The folder does not exist, nor does its parent."""
    write(store, run / "new" / "store", 1, 2, 3)


def is_publication(kind: str, source: Path, target: Path | None = None) -> bool:
    names = (source.name, target.name if target is not None else "")
    return kind == "rename" and (names[1] == "manifest.json" or bool(re.fullmatch(r"(step|save)-\d+", names[1])))


def check_that_the_same_versions_are_written(store, place: Path, runs: list[Path]) -> None:
    assert runs
    for run in runs:
        left = copied(run, place)
        first = max(versions(store, left), default=0) + 1
        write(store, left, *range(first, 6))
        assert versions(store, left) == [5, 4], run.name
        assert all(is_whole(store, left, version) for version in (4, 5)), run.name


@stores()
@pytest.mark.few(1)
def test_killed_between_files_the_next_process_writes_the_same_versions(store, place, killed):
    check_that_the_same_versions_are_written(store, place, [run for run in killed(store) if not is_within_file(run)])


@stores(among=FILES)
def test_killed_within_a_file_the_next_process_writes_the_same_versions(store, place, killed):
    check_that_the_same_versions_are_written(store, place, [run for run in killed(store) if is_within_file(run)])


def check_that_nothing_is_left(store, place: Path, runs: list[Path], last: Path, member: str) -> None:
    """After three more versions the folder is as if nobody had been killed."""
    assert runs
    expected = None
    for run in [last, *runs]:
        left = copied(run, place)
        write(store, left, 11, 12, 13, member=member)
        expected = expected or store.files(left)
        assert store.files(left) == expected, run.name


@stores()
def test_killed_between_files_the_next_process_leaves_nothing_of_it(store, place, killed):
    *runs, last = killed(store)
    check_that_nothing_is_left(store, place, [run for run in runs if not is_within_file(run)], last, "m")


@stores()
def test_killed_between_files_another_member_leaves_nothing_of_it(store, place, killed):
    *runs, last = killed(store)
    known = [run for run in runs if not is_within_file(run) and not is_without_manifest(run)]
    check_that_nothing_is_left(store, place, known, last, "other")


@stores(among=FILES)
def test_killed_before_a_manifest_another_member_leaves_nothing_of_it(store, place, killed):
    *runs, last = killed(store)
    check_that_nothing_is_left(store, place, [run for run in runs if is_without_manifest(run)], last, "other")


@stores(among=FILES)
@pytest.mark.parametrize("member", ["m", "other"])
def test_killed_within_a_file_nothing_of_it_is_left(store, place, killed, member):
    *runs, last = killed(store)
    check_that_nothing_is_left(store, place, [run for run in runs if is_within_file(run)], last, member)


def write_for_ever(folder: Path, store) -> None:
    writer, version = store(folder), 0
    while True:
        version += 1
        writer.write(version, contents(1 + version % 5))


@stores()
def test_killed_at_any_moment(store, place):
    """Not only between operations: also while memory is written."""
    draw = random.Random(7)
    for run in range(5):
        folder = place / str(run)
        folder.mkdir(mode=0o700)
        process = SERVER.Process(target=write_for_ever, args=(folder, store), daemon=True)
        process.start()
        seen = wait_until(functools.partial(versions, store, folder), "a version exists")[0]
        time.sleep(draw.uniform(0.0, 0.02))
        process.kill()
        process.join()
        newest, *older = versions(store, folder)
        assert newest >= seen
        assert all(is_whole(store, folder, each, expected=1 + each % 5) for each in (newest, *older[:1]))
