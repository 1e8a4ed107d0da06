"""Manifests of what is saved together, and the units that they name, read and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from evermoe._native import digest, format_manifest, parse_manifest
from evermoe.errors import CorruptCopy
from evermoe.persist.plain_files import open_plain, read_plain
from evermoe.state.version import step_of

MANIFEST = "manifest.json"
MANIFEST_BYTES = 64 << 20
"""Size of a manifest at most: room for 400,000 units."""


@dataclass(frozen=True)
class Manifest:
    """What a folder holds: a version and, per unit, its file and the xxh3-64 digest of its bytes."""

    path: Path
    version: int
    units: dict[str, tuple[str, int]]
    names: dict[str, list[str]]
    """Per unit: the names of its tensors, in the order of its bytes."""
    layout: str = ""
    """Layout of the model."""


def manifest_text(version: int, layout: str, units: Mapping[str, tuple[str, int, Sequence[str]]]) -> str:
    """Text of a manifest: for each unit its file, the digest of its bytes and the names of its tensors.

    Raises:
        ValueError: a name cannot be that of a file, or is there twice.
    """
    rows = [(name, file, value, list(names)) for name, (file, value, names) in units.items()]
    return format_manifest(version, step_of(version), layout, rows)


def read_manifest(path: Path, name: str = MANIFEST) -> Manifest:
    """The manifest in folder `path`.

    Raises:
        CorruptCopy: it is missing, damaged, of another format, or names what it must not.
    """
    try:
        version, step, layout, rows = parse_manifest(read_plain(path / name, MANIFEST_BYTES))
        if step != step_of(version):
            raise CorruptCopy(f"version {version} has taken {step_of(version)} steps, not {step}")
    except CorruptCopy as error:
        raise CorruptCopy(f"{path / name} is no manifest of a checkpoint: {error}") from None
    units = {unit: (file, value) for unit, file, value, _ in rows}
    return Manifest(path, version, units, {unit: names for unit, _, _, names in rows}, layout)


def read_units(manifest: Manifest, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The tensors of each unit, digests checked.

    Raises:
        CorruptCopy: a unit is missing, or cannot be read, or does not match its digest.
    """
    by_file: dict[str, list[str]] = {}
    for name in names:
        if name not in manifest.units:
            raise CorruptCopy(f"{manifest.path} has no unit {name}: it was written for another model")
        by_file.setdefault(manifest.units[name][0], []).append(name)
    for file, members in by_file.items():
        yield from _read_file(manifest, file, members)


def _read_file(manifest: Manifest, file: str, members: Sequence[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    path = manifest.path / file
    with open_plain(path) as descriptor:
        try:
            # By its descriptor: the library opens it twice, and meanwhile another member may remove its name.
            with safe_open(f"/proc/self/fd/{descriptor}", framework="pt") as source:
                for name in members:
                    tensors = {key: source.get_tensor(f"{name}/{key}") for key in manifest.names[name]}
                    found, expected = digest(as_bytes(tensors).numpy()), manifest.units[name][1]
                    if found != expected:
                        raise CorruptCopy(
                            f"{name} in {manifest.path}: expected digest {expected:016x}, the bytes have {found:016x}"
                        )
                    yield name, tensors
        except (SafetensorError, OSError) as error:
            raise CorruptCopy(f"{path} cannot be read: {error}") from None


def as_bytes(tensors: dict[str, Tensor]) -> Tensor:
    """A unit's bytes, uint8 `[nbytes]`, from its tensors in order."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()])
