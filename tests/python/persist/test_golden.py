"""Files of today's formats, byte by byte: who changes a format gives it another number, and makes new files here."""

import shutil
from pathlib import Path

import torch

from evermoe._native import Arena, digest
from evermoe.checkpoint.checkpoint_folder import find
from evermoe.checkpoint.manifest import Row, as_bytes, manifest_text, read_manifest, read_units
from evermoe.checkpoint.owner import Owner, read_owner, write_owner

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINT = GOLDEN / "checkpoints-2"
ARENA = GOLDEN / "arena-3.bin"
VERSION = 3 << 40 | 7
UNITS = {
    "head": {"weight": torch.arange(6.0).view(2, 3), "bias": torch.tensor([0.5, -2.0], dtype=torch.bfloat16)},
    "moe.experts.1": {"weights": torch.arange(4.0, 8.0), "weights/exp_avg": torch.arange(4, dtype=torch.int64)},
}
FILE = "units-0.safetensors"


def rows():
    return [Row(name, FILE, digest(as_bytes(tensors).numpy()), list(tensors)) for name, tensors in UNITS.items()]


def make_arena(path: Path) -> None:
    """Version 7 in one buffer, and one that is being written in the other."""
    arena = Arena.create(str(path), '{"generation": 3}', [(name, len(as_bytes(UNITS[name]))) for name in UNITS])
    index = arena.begin(VERSION)
    for name, offset, nbytes in arena.units():
        arena.buffer(index)[offset : offset + nbytes] = as_bytes(UNITS[name]).numpy()
    arena.commit(index)
    arena.begin(VERSION + 1)


def test_a_checkpoint_of_todays_format_is_read():
    ((version, path),) = find(CHECKPOINT).items()
    manifest = read_manifest(path)
    assert (version, manifest.layout) == (VERSION, "00c0ffee")
    found = dict(read_units(manifest, list(UNITS)))
    for name, tensors in UNITS.items():
        assert list(found[name]) == list(tensors)
        assert all(torch.equal(found[name][key], tensor) for key, tensor in tensors.items())


def test_a_checkpoint_is_written_in_todays_format(tmp_path):
    path = CHECKPOINT / "step-00000007" / "manifest.json"
    assert manifest_text(VERSION, "00c0ffee", rows()) == path.read_text()
    assert read_owner(CHECKPOINT) == Owner("golden", "00c0ffee")
    write_owner(tmp_path, Owner("golden", "00c0ffee"))
    assert (tmp_path / "owner.json").read_text() == (CHECKPOINT / "owner.json").read_text()


def test_an_arena_of_todays_format_is_read(tmp_path):
    arena = Arena.open(shutil.copy(ARENA, tmp_path))
    assert arena.versions() == [(0, VERSION)]
    assert arena.verify(0) == []
    for name, offset, nbytes in arena.units():
        assert arena.buffer(0)[offset : offset + nbytes].tobytes() == as_bytes(UNITS[name]).numpy().tobytes()


def test_an_arena_is_written_in_todays_format(tmp_path):
    make_arena(tmp_path / "arena")
    assert (tmp_path / "arena").read_bytes() == ARENA.read_bytes()
