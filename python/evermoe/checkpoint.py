"""Checkpoints on disk: safetensors files and a manifest, committed by one atomic rename.

    DIRECTORY/step-00000120/manifest.json         version, progress, digest of every unit
    DIRECTORY/step-00000120/units-0.safetensors   tensors named "<unit>/<piece>"

A checkpoint is written as `step-….writing` and renamed when every file is on disk, so that one which exists is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from evermoe import planning
from evermoe._native import digest
from evermoe.config import SessionConfig
from evermoe.errors import CorruptCopy
from evermoe.group import Group
from evermoe.units import TrainingState, weight_tensors
from evermoe.versions import step_of

FORMAT = 1
KEPT = 2
"""How many of the newest checkpoints stay on disk."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: its version and, per unit, its file and the xxh3-64 digest of its bytes."""

    path: Path
    version: int
    units: dict[str, tuple[str, int]]
    pieces: dict[str, list[str]]
    """Per unit: the names of its tensors, in the order of its bytes."""
    layout: str | None = None
    """Of the model; only with persisted units."""


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
        pieces = {name: names for name, (_, _, names) in content["units"].items()}
        return Manifest(path, int(content["version"]), units, pieces, content.get("layout"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCopy(f"{path / name} is no manifest of a checkpoint: {error}") from None


def write(directory: Path, state: TrainingState, mine: Sequence[str], version: int, step: int, group: Group) -> Path:
    """Writes the units `mine` of this rank, and as rank 0 the manifest; collective. Returns the checkpoint's folder.

    Over all ranks every unit must be in exactly one `mine`. The folder appears only when all files are on disk, and
    is there when any rank returns.
    """
    final = directory / f"step-{step:08d}"
    draft = final.with_suffix(".writing")
    draft.mkdir(parents=True, exist_ok=True)
    file = f"units-{group.rank}.safetensors"
    tensors: dict[str, Tensor] = {}
    digests: dict[str, tuple[str, str, list[str]]] = {}
    for name in mine:
        unit = state.by_name[name]
        data = torch.empty(unit.nbytes, dtype=torch.uint8)
        state.read(name, data)
        digests[name] = (file, f"{digest(data.numpy()):016x}", [piece.name for piece in unit.pieces])
        tensors |= {f"{name}/{piece}": tensor.contiguous() for piece, tensor in unit.tensors(data).items()}
    save_file(tensors, draft / file)
    flush(draft / file)
    everyone = group.all_gather_bytes(json.dumps(digests).encode())
    if group.rank == 0:
        units = {name: entry for part in everyone for name, entry in json.loads(part).items()}
        manifest = {"format": FORMAT, "version": version, "step": step, "units": units}
        (draft / "manifest.json").write_text(json.dumps(manifest))
        flush(draft / "manifest.json")
        if final.exists():
            shutil.rmtree(final)
        os.rename(draft, final)
        flush(directory)
        _prune(directory)
    group.all_reduce(torch.zeros(1))  # nobody starts the next draft while this one is being renamed
    return final


def read(manifest: Manifest, state: TrainingState, names: Sequence[str]) -> dict[str, Tensor]:
    """Reads units, uint8 `[nbytes]` each, and checks their digests.

    Raises:
        CorruptCopy: a unit is missing, has another layout than the model, or does not match its digest.
    """
    units: dict[str, Tensor] = {}
    for name, tensors in read_units(manifest, names):
        pieces = [(piece.name, piece.shape, piece.dtype) for piece in state.by_name[name].pieces]
        found = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]
        if pieces != found:
            raise CorruptCopy(f"{name} in {manifest.path} belongs to another model: expected {pieces}, got {found}")
        units[name] = as_bytes(tensors)
    return units


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Loads a checkpoint's weights, without optimizer state, into a model that holds all its experts (no session).

        evermoe.load_weights(model, "checkpoints/step-00000500")

    Raises:
        CorruptCopy: the folder is no checkpoint of such a model, or its bytes do not match their digests.
    """
    manifest = read_manifest(Path(path))
    targets = weight_tensors(model)
    with torch.no_grad():
        for name, tensors in read_units(manifest, list(targets)):
            for key, target in targets[name].items():
                if key not in tensors or tensors[key].shape != target.shape:
                    found = list(tensors[key].shape) if key in tensors else "nothing"
                    raise CorruptCopy(f"{path}: expected {name}/{key} of shape {list(target.shape)}, found {found}")
                target.copy_(tensors[key])


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
                    tensors = {key: source.get_tensor(f"{name}/{key}") for key in manifest.pieces[name]}
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


def _prune(directory: Path) -> None:
    for _, path in sorted(find(directory).items())[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Checkpoints:
    """When a session writes checkpoints, and which units each of its members writes."""

    def __init__(self, config: SessionConfig, state: TrainingState, group: Group) -> None:
        self._config, self._state, self._group = config, state, group
        self._newest = -1

    def is_due(self, step: int) -> bool:
        """After so many steps."""
        every = self._config.checkpoint_every
        return bool(every) and step % every == 0

    def has(self, version: int) -> bool:
        """Whether there is nothing to write at the end of a job at this version, as far as is known here."""
        return self._config.checkpoint_dir is None or self._newest == version

    def forget(self) -> None:
        """Other members may know less of what was written."""
        self._newest = -1

    def write(self, version: int) -> Path:
        """Writes the state, which is that of `version`; collective. Returns the folder.

        Raises:
            PeerLost: a member is gone, and nothing is written.
        """
        assert self._config.checkpoint_dir is not None
        rank, ranks = self._group.rank, self._group.size
        units = self._state.units
        active = self._state.active(ranks)
        primaries = planning.primaries([active[unit.name] for unit in units], [unit.nbytes for unit in units], ranks)
        mine = [unit.name for unit, primary in zip(units, primaries, strict=True) if primary == rank]
        path = write(Path(self._config.checkpoint_dir), self._state, mine, version, step_of(version), self._group)
        self._newest = version
        return path
