"""Damages what members send each other and what folders hold, and reads it; run as a program of its own.

    python -m support.damage KIND=CASES…

Each case is named by its number before it is read, so that the last one says what ended the process: a crash, a case
that takes too long, or memory beyond a bound.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evermoe._native import digest
from evermoe.checkpoint import checkpoint
from evermoe.checkpoint.checkpoint_folder import CheckpointFolder, find, find_manifests
from evermoe.checkpoint.manifest import (
    CHECKPOINT,
    SAVE,
    Manifest,
    as_bytes,
    parsed,
    read_manifest,
    read_saved,
    read_units,
)
from evermoe.checkpoint.owner import Owner
from evermoe.copies.replay.frame import Frame
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.errors import CorruptCopy, PeerLost, UnsafeFolder
from evermoe.recovery.survey import Holding, Inventory, Standing
from support.stores import NEWEST, Arenas, Checkpoints, Saves, contents, model, names

ROOM_BYTES = 1 << 30
"""Bytes that the cases may allocate in addition to those at the start."""
MAX_SECONDS = 30
"""Time for one case: a loop without an end is what it finds."""
SAFETENSORS_LENGTH = 8
"""Bytes of the length of a safetensors file's header."""

TYPES = (
    "BOOL",
    "U8",
    "F8_E5M2",
    "F8_E8M0",
    "F4",
    "F6_E2M3",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "C64",
    "I64",
    "X",
)
"""Names of types of tensors, most of which some version of safetensors knows."""

Case = Callable[[random.Random], bool]
"""Reads something damaged: whether it was refused. What was written and comes back as something else fails."""


# ---- damage


def harm(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """One to three accidents; `other` is something valid of the same kind."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        at, end = sorted(draw.randint(0, len(found)) for _ in range(2))
        end = min(end, at + draw.choice((1, 4, 16, 10_000)))
        accident = draw.randrange(8)
        if accident <= 1 and found:
            for _ in range(draw.randint(1, 3)):
                found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
        elif accident == 2:
            found[at:end] = bytes([draw.choice((0, 255, 32, 48))]) * (end - at)
        elif accident == 3:
            found[at:end] = draw.randbytes(end - at)
        elif accident == 4:
            found[at:end] = draw.choice((0, 1, 1 << 40, (1 << 64) - 1)).to_bytes(8, "little")
        elif accident == 5:
            del found[draw.choice((at, end)) :]
        elif accident == 6:
            found[at:at] = found[at:end] * draw.randint(1, 3)
        else:
            found[at:] = other[draw.choice((at, end)) :]
    return bytes(found)


RAW = (
    "NaN",
    "Infinity",
    "1e999",
    "-1",
    "0.5",
    "1.0",
    "18446744073709551616",
    "null",
    "true",
    '"7"',
    "[]",
    "{}",
    "9" * 5000,
)


def harm_json(draw: random.Random, text: str) -> str:
    """The text of an object in which one node is replaced by another, repeated, or left out."""
    root: Any = [json.loads(text)]
    nodes = [(root, 0)]
    for holder, key in nodes:
        inner = holder[key]
        if isinstance(inner, dict | list):
            nodes += [(inner, each) for each in (inner if isinstance(inner, dict) else range(len(inner)))]
    (holder, key), (elsewhere, other) = draw.choice(nodes), draw.choice(nodes)
    accident = draw.randrange(5)
    if accident == 0 and isinstance(holder, dict):
        holder[draw.choice(("extra", "version", "name"))] = holder.pop(key)
    elif accident == 1 and holder is not root:
        del holder[key]
    else:
        raw = json.dumps(elsewhere[other]) if accident == 2 else raw_instead(draw, holder[key])
        holder[key] = "\x01"
        return json.dumps(root)[1:-1].replace(json.dumps("\x01"), raw, 1)
    return json.dumps(root)[1:-1]


def raw_instead(draw: random.Random, node: Any) -> str:
    """Text in the place of a node: of another type, too deep, too long, or with something twice."""
    accident = draw.randrange(7)
    if accident == 0 and isinstance(node, dict):
        return json.dumps([*node.values()])
    if accident == 1 and isinstance(node, list):
        return json.dumps({str(index): each for index, each in enumerate(node)})
    if accident == 2 and isinstance(node, dict) and node:
        again = draw.choice([*node])
        value = draw.choice((json.dumps(node[again]), *RAW))
        return json.dumps(node)[:-1] + f", {json.dumps(again)}: {value}}}"
    long = (json.dumps([node]), json.dumps("ü/" * draw.randrange(20_000)), "[" * draw.randrange(100_000))
    return draw.choice((*long, '{"a":' * draw.randrange(100_000), *RAW))


# ---- messages of members


def inventory(draw: random.Random) -> Inventory:
    standing = Standing(
        draw.getrandbits(60), draw.random() < 0.5, boosts={"moe": [1.0, 2.5]}, lagging=draw.choice(("never", "always"))
    )
    holdings = [
        Holding(f"moe.experts.{e}", draw.getrandbits(50), draw.getrandbits(64), draw.choice(("active", "snapshot")))
        for e in range(draw.randrange(6))
    ]
    return Inventory(standing, holdings, [draw.getrandbits(50)], draw.random() < 0.5)


def inventories() -> Iterator[Case]:
    """Damaged bytes, and bytes of a writer with other rules that match their checksum."""

    def case(draw: random.Random) -> bool:
        one, two = inventory(draw), inventory(draw)
        data, is_sealed = one.to_bytes(), draw.random() < 0.5
        if is_sealed:
            text = harm_json(draw, data[8:].decode()).encode()
            data = digest(np.frombuffer(text, np.uint8)).to_bytes(8, "little") + text
        else:
            data = harm(draw, data, two.to_bytes())
        try:
            found = Inventory.from_bytes(data)
        except CorruptCopy:
            return True
        if is_sealed:
            assert json.loads(found.to_bytes()[8:]) == json.loads(text), text[:1000]
            assert len(found.to_bytes()) == len(data), "nothing is said twice"
        else:
            assert found in (one, two)
        return False

    yield case


def frames() -> Iterator[Case]:
    """The sizes of a peer's messages, which say how many bytes to wait for."""

    def case(draw: random.Random) -> bool:
        messages = [np.frombuffer(draw.randbytes(draw.randint(1, 40)), np.uint8) for _ in range(draw.randrange(5))]
        sent, came = Frame(6, 100), Frame(6, 100)
        head, tail = sent.write_records(messages)
        harmed = harm(draw, head.numpy().tobytes()[:56], bytes(56))[:56]
        came.data[: len(head)] = head
        came.data[: len(harmed)] = torch.frombuffer(bytearray(harmed), dtype=torch.uint8) if harmed else 0
        try:
            came.check_sizes(1)
        except PeerLost:
            return True
        assert came.tail_bytes() == len(tail)
        found = [each for data, sizes in came.split_records(tail) for each in data.split(sizes)]
        assert [each.numpy().tobytes() for each in found] == [each.tobytes() for each in messages]
        return False

    yield case


# ---- what folders hold


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        yield path
    finally:
        shutil.rmtree(path)


VERSIONS = (3 << 40 | 1, 3 << 40 | 2)


def write(store: Any, folder: Path, *versions: int) -> None:
    each = store(folder)
    for version in versions:
        each.write(version, contents(version))
    each.close()


def tensors() -> Iterator[Case]:
    """Files of tensors, whose header has no checksum: types, shapes and offsets."""
    with new_folder() as folder:
        write(Checkpoints, folder, *VERSIONS)
        one, two = (read_manifest(path) for _, path in sorted(find(folder).items()))
        written, others = contents(one.version), next(two.path.glob("*.safetensors")).read_bytes()
        path = next(one.path.glob("*.safetensors"))
        intact = path.read_bytes()
        end = SAFETENSORS_LENGTH + int.from_bytes(intact[:SAFETENSORS_LENGTH], "little")

        def case(draw: random.Random) -> bool:
            harmed = intact
            kind = draw.randrange(4)
            if kind == 0:
                harmed = harm(draw, intact, others)
            elif kind == 1:
                harmed = harm(draw, intact[:end], others[:end]) + intact[end:]
            else:
                header = intact[SAFETENSORS_LENGTH:end].decode()
                header = harm_json(draw, header) if kind == 2 else retyped(draw, header)
                harmed = len(header.encode()).to_bytes(SAFETENSORS_LENGTH, "little") + header.encode() + intact[end:]
            path.write_bytes(harmed)
            refused = is_refused(lambda: checkpoint.read(one, model(), names()), written)
            return is_refused(lambda: read_one_by_one(one), written) or refused

        yield case


def retyped(draw: random.Random, header: str) -> str:
    """The header with other types of tensors, most of which some version of safetensors knows."""
    fields = json.loads(header)
    for each in draw.sample([*fields.values()], draw.randint(1, 3)):
        if "dtype" in each:
            each["dtype"] = draw.choice(TYPES)
            each["shape"] = draw.choice((each["shape"], [*reversed(each["shape"])], [*each["shape"], 1], [8, 4]))
    return json.dumps(fields)


def read_one_by_one(manifest: Manifest) -> dict[str, torch.Tensor]:
    return {name: as_bytes(each) for name, each in read_units(manifest, names())}


def is_refused(read: Callable[[], dict[str, torch.Tensor]], written: dict[str, torch.Tensor]) -> bool:
    try:
        found = read()
    except CorruptCopy:
        return True
    wrong = [name for name, data in found.items() if not torch.equal(data, written[name])]
    assert not wrong, f"{wrong} have other bytes than were written"
    return False


def accident(draw: random.Random, folder: Path) -> None:
    """Something happens to a file or a folder within."""
    paths = sorted(folder.rglob("*"))
    if not paths:
        return
    path = draw.choice(paths)
    odd = (
        "step-000000001",
        "step-00000001-1",
        "step-00000001\n",
        "save-" + "9" * 20,
        "²" * 10 + "-0-m.arena",
    )
    names = (*odd, path.name + "-2", path.name + ".new", path.name[:-1] or "x", "٠" * 10 + "-0-m.arena", "\udcff.arena")
    sibling = path.parent / draw.choice(names)
    kind = draw.randrange(8)
    if kind == 0 and not sibling.exists():
        path.rename(sibling)
    elif kind == 1 and not path.is_symlink() and not sibling.exists():
        copy = functools.partial(shutil.copytree, symlinks=True) if path.is_dir() else shutil.copy
        with contextlib.suppress(shutil.Error, OSError):  # a pipe cannot be copied
            copy(path, sibling)
    elif kind == 2 and path.is_file() and path.stat().st_size < 1 << 20:
        path.write_bytes(harm(draw, path.read_bytes(), path.read_bytes()[::-1]))
    elif kind == 3 and path.is_file():
        size = path.stat().st_size
        os.truncate(path, draw.choice((0, 1, size // 2, size + 1, 1 << 26)))
    else:
        remove(path)
        if kind == 4:
            os.mkfifo(path)
        elif kind == 5:
            path.mkdir()
        elif kind == 6:
            path.symlink_to(draw.choice((path.parent, path, Path("/dev/zero"), Path("/nowhere"))))


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_units(found: Any) -> bool:
    """Whether some are refused; what is not has the bytes of its version."""
    refused = False
    for each in found:
        if digest(each.data.numpy()) == each.digest:
            assert torch.equal(each.data, contents(each.version)[each.unit]), f"{each.unit} is not of {each.version}"
        else:
            refused = True
    return refused


def folders(store: Any, read: Callable[[Path], bool]) -> Iterator[Case]:
    """Files that are damaged, missing, renamed, copied, or not files."""
    with new_folder() as folder:
        write(store, folder / "intact", *VERSIONS)
        number = len(store.files(folder / "intact"))

        def case(draw: random.Random) -> bool:
            remove(folder / "harmed")
            shutil.copytree(folder / "intact", folder / "harmed", symlinks=True)
            for _ in range(draw.choice((1, 1, 2, 4))):
                accident(draw, folder / "harmed")
            refused = read(folder / "harmed")
            return refused or len(store.files(folder / "harmed")) != number

        yield case


def read_memory(folder: Path) -> bool:
    store = SnapshotStore(folder, model())
    try:
        refused = check_units(store.stored())
        with contextlib.suppress(UnsafeFolder):
            store.check_folder()
        store.prune(store.newest_generation())
    finally:
        store.engine.shutdown()
    return refused


def read_checkpoints(folder: Path) -> bool:
    layout = model().catalog.layout
    refused = False
    for version, path in find(folder, layout).items():
        refused |= is_refused(
            lambda path=path: checkpoint.read(read_manifest(path), model(), names()), contents(version)
        )
    for manifest in find_manifests(folder, layout, (CHECKPOINT, SAVE)):
        refused |= check_units(manifest.saved)
        for each in manifest.saved:
            refused |= is_refused(lambda each=each: {each.unit: read_saved(each)}, contents(each.version))
    with contextlib.suppress(OSError):  # what is in the way cannot be written to
        opened = CheckpointFolder(folder, Owner("job", layout), "m")
        opened.newest_generation()
        opened.newest_save(NEWEST, 9)
        opened.sweep(9)
        opened.close()
    return refused


def manifests() -> Iterator[Case]:
    """Manifests, also with a checksum that matches what was changed, as a writer with other rules writes it."""
    with new_folder() as folder:
        write(Saves, folder, *VERSIONS)
        two, one = (each.path / "manifest.json" for each in find_manifests(folder, model().catalog.layout, (SAVE,)))
        intact, other = one.read_text(), two.read_text()
        body = intact[: intact.rindex(',"checksum"')] + "}"

        def case(draw: random.Random) -> bool:
            if draw.randrange(2):
                harmed = harm_json(draw, body)
                with contextlib.suppress(UnicodeEncodeError):
                    checksum = digest(np.frombuffer(harmed.encode(), np.uint8))
                    harmed = f'{harmed[:-1]},"checksum":"{checksum:016x}"}}'
                content = harmed.encode(errors="surrogatepass")
            else:
                content = harm(draw, intact.encode(), other.encode())
            try:
                found = parsed(one.parent, content)
            except CorruptCopy:
                return True
            assert found.saved and all(each.files and each.tensors for each in found.saved)
            return content == intact.encode()

        yield case


KINDS: dict[str, Callable[[], Iterator[Case]]] = {
    "inventories": inventories,
    "frames": frames,
    "tensors": tensors,
    "memory": lambda: folders(Arenas, read_memory),
    "checkpoints": lambda: folders(Checkpoints, read_checkpoints),
    "saves": lambda: folders(Saves, read_checkpoints),
    "manifests": manifests,
}


def main(kind: str, cases: int) -> None:
    """Runs cases 0 to `cases` - 1."""
    started, refused = time.monotonic(), 0
    with contextlib.contextmanager(KINDS[kind])() as case:
        case(random.Random(0))  # what is made once
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, resource.RLIM_INFINITY))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(cases):
            os.write(1, f"{kind} {number}\n".encode())
            signal.alarm(MAX_SECONDS)
            refused += case(random.Random(f"{kind} {number}"))
        signal.alarm(0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    said = (
        f"{cases} cases, {refused} refused, the others the same; {time.monotonic() - started:.1f} s, {grown} bytes more"
    )
    print(f"{kind}: {said}", flush=True)
    assert refused > cases / 4, "most damage matters"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for each in sys.argv[1:]:
        main(each.split("=")[0], int(each.split("=")[1]))
