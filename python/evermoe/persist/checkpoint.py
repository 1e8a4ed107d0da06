"""Checkpoints on disk: safetensors files and a manifest, committed by one atomic rename.

    DIRECTORY/step-00000120/manifest.json         version, progress, digest of every unit
    DIRECTORY/step-00000120/units-0.safetensors   tensors named "<unit>/<piece>"

A checkpoint is written as `step-….writing` and renamed when every file is on disk, so that one which exists is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from evermoe._native import digest
from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.errors import CorruptCopy
from evermoe.options import Options, option
from evermoe.persist.manifest import FORMAT, Manifest, as_bytes, flush, prune, read_manifest, read_units
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import primary_units, weight_tensors
from evermoe.state.version import step_of


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Options):
    """Where and when checkpoints are written."""

    checkpoint_dir: str | Path | None = None
    """Folder for checkpoints on a file system that all members share; None for none."""
    checkpoint_every: int = option(0, shared=True, least=0)
    """Steps between checkpoints; 0 for none. With a checkpoint_dir one is also written at the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checkpoint_every and self.checkpoint_dir is None:
            raise ValueError("checkpoint_every is set, so checkpoint_dir must say where to write")


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
        unit = state.catalog.by_name[name]
        data = torch.empty(unit.nbytes, dtype=torch.uint8)
        state.read(name, data)
        digests[name] = (file, f"{digest(data.numpy()):016x}", [spec.name for spec in unit.specs])
        tensors |= {f"{name}/{key}": tensor.contiguous() for key, tensor in unit.tensors(data).items()}
    save_file(tensors, draft / file)
    flush(draft / file)
    everyone = gather_json(group, digests)
    if group.rank == 0:
        units = {name: entry for part in everyone for name, entry in part.items()}
        manifest = {"format": FORMAT, "version": version, "step": step, "units": units}
        (draft / "manifest.json").write_text(json.dumps(manifest))
        flush(draft / "manifest.json")
        if final.exists():
            shutil.rmtree(final)
        os.rename(draft, final)
        flush(directory)
        prune(directory)
    group.all_reduce(torch.zeros(1))  # no member starts the next draft while this one is being renamed
    return final


def read(manifest: Manifest, state: TrainingState, names: Sequence[str]) -> dict[str, Tensor]:
    """Reads units, uint8 `[nbytes]` each, and checks their digests.

    Raises:
        CorruptCopy: a unit is missing, has another layout than the model, or does not match its digest.
    """
    units: dict[str, Tensor] = {}
    for name, tensors in read_units(manifest, names):
        specs = [(spec.name, spec.shape, spec.dtype) for spec in state.catalog.by_name[name].specs]
        found = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]
        if specs != found:
            raise CorruptCopy(f"{name} in {manifest.path} belongs to another model: expected {specs}, got {found}")
        units[name] = as_bytes(tensors)
    return units


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Loads a checkpoint's weights, without optimizer state, into a model that holds all its experts (no session).

        evermoe.load_weights(model, "checkpoints/step-00000500")

    Raises:
        CorruptCopy: the folder is no checkpoint of a model with these names, shapes and dtypes, or its bytes do not
            match their digests.
    """
    manifest = read_manifest(Path(path))
    targets = weight_tensors(model)
    with torch.no_grad():
        for name, tensors in read_units(manifest, list(targets)):
            for key, target in targets[name].items():
                found = tensors.get(key)
                if found is None or (found.shape, found.dtype) != (target.shape, target.dtype):
                    came = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
                    expected = f"{target.dtype} {list(target.shape)}"
                    raise CorruptCopy(f"{path}: expected {name}/{key} as {expected}, found {came}")
                target.copy_(tensors[key])


class Checkpointer:
    """When a session writes checkpoints, and which units each of its members writes."""

    def __init__(self, options: CheckpointOptions, state: TrainingState, group: Group) -> None:
        self._options, self._state, self._group = options, state, group
        self._newest = -1

    def is_due(self, step: int) -> bool:
        """After so many steps."""
        every = self._options.checkpoint_every
        return bool(every) and step % every == 0

    def has(self, version: int) -> bool:
        """Whether there is nothing to write at the end of a job at this version, as far as is known here."""
        return self._options.checkpoint_dir is None or self._newest == version

    def forget(self) -> None:
        """Forgets what was written: other members may know less of it."""
        self._newest = -1

    def write(self, version: int) -> Path:
        """Writes the state, which is that of `version`; collective. Returns the folder.

        Raises:
            PeerLost: a member is gone, and nothing is written.
        """
        assert self._options.checkpoint_dir is not None
        rank, ranks = self._group.rank, self._group.size
        mine = primary_units(self._state.catalog.units, self._state.active(ranks), rank, ranks)
        path = write(Path(self._options.checkpoint_dir), self._state, mine, version, step_of(version), self._group)
        self._newest = version
        return path
