"""What a checkpoint on disk holds: its manifest and its units, read and checked."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from evermoe._native import digest
from evermoe.errors import CorruptCopy

FORMAT = 1
KEPT = 2
"""How many of the newest checkpoints stay on disk."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: its version and, per unit, its file and the xxh3-64 digest of its bytes."""

    path: Path
    version: int
    units: dict[str, tuple[str, int]]
    names: dict[str, list[str]]
    """Per unit: the names of its tensors, in the order of its bytes."""
    layout: str | None = None
    """Layout of the model; only with persisted units."""


def find(directory: Path) -> dict[int, Path]:
    """Whole checkpoints by version. Unreadable or foreign folders are passed over."""
    found = {}
    for path in sorted(directory.glob("step-*/manifest.json")):
        if path.parent.suffix == ".writing":
            continue
        try:
            found[read_manifest(path.parent).version] = path.parent
        except CorruptCopy:
            continue
    return found


def read_manifest(path: Path, name: str = "manifest.json") -> Manifest:
    """The manifest of the checkpoint in folder `path`.

    Raises:
        CorruptCopy: it is missing, unreadable or of another format.
    """
    try:
        content = json.loads((path / name).read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, expected {FORMAT}")
        units = {name: (file, int(value, 16)) for name, (file, value, _) in content["units"].items()}
        names = {unit: names for unit, (_, _, names) in content["units"].items()}
        return Manifest(path, int(content["version"]), units, names, content.get("layout"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCopy(f"{path / name} is no manifest of a checkpoint: {error}") from None


def read_units(manifest: Manifest, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The tensors of each unit, digests checked."""
    by_file: dict[str, list[str]] = {}
    for name in names:
        if name not in manifest.units:
            raise CorruptCopy(f"{manifest.path} has no unit {name}: it was written for another model")
        by_file.setdefault(manifest.units[name][0], []).append(name)
    for file, members in by_file.items():
        try:
            with safe_open(manifest.path / file, framework="pt") as source:
                for name in members:
                    tensors = {key: source.get_tensor(f"{name}/{key}") for key in manifest.names[name]}
                    found, expected = digest(as_bytes(tensors).numpy()), manifest.units[name][1]
                    if found != expected:
                        raise CorruptCopy(
                            f"{name} in {manifest.path}: expected digest {expected:016x}, the bytes have {found:016x}"
                        )
                    yield name, tensors
        except (SafetensorError, OSError) as error:
            raise CorruptCopy(f"{manifest.path / file} cannot be read: {error}") from None


def as_bytes(tensors: dict[str, Tensor]) -> Tensor:
    """A unit's bytes, uint8 `[nbytes]`, from its tensors in order."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()])


def prune(directory: Path) -> None:
    """Removes all but the newest checkpoints."""
    for _, path in sorted(find(directory).items())[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
