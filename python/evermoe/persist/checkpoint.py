"""Checkpoints on disk: safetensors files and a manifest, committed by one atomic rename.

    DIRECTORY/step-00000120/manifest.json         version, progress, digest of every unit
    DIRECTORY/step-00000120/units-0.safetensors   tensors named "<unit>/<piece>"

See `evermoe.persist.checkpoint_folder` for what else is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from evermoe._native import digest
from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.comm.membership import Membership
from evermoe.errors import CorruptCopy, PersistFailed
from evermoe.options import Options, option
from evermoe.persist.checkpoint_folder import CheckpointFolder, find
from evermoe.persist.manifest import Manifest, as_bytes, manifest_text, read_manifest, read_units
from evermoe.persist.owner import Owner
from evermoe.persist.plain_files import write_tensors
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit, primary_units, weight_tensors

MOST_PROBLEMS = 3
"""Ranks whose problems are named when a checkpoint cannot be written."""


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


def write(
    folder: CheckpointFolder, state: TrainingState, mine: Sequence[str], version: int, generation: int, group: Group
) -> Path:
    """Writes the units `mine` of this rank, and as rank 0 the manifest; collective. Returns the checkpoint's folder.

    Over all ranks every unit must be in exactly one `mine`. The folder appears only when all files are on disk, and
    is there when any rank returns. A version that is there already is not written again.

    Args:
        folder: of rank 0 the one that publishes.
        state: this rank's units.
        mine: names of those that this rank writes.
        version: of the state.
        generation: of the group's members.
        group: all that train.

    Raises:
        PersistFailed: some rank could not do its part; the same on all of them, and no other checkpoint has changed.
        PeerLost: a member is gone.
    """
    attempt = _Attempt(folder, group)
    if group.rank == 0:
        attempt.run(lambda: _begin(folder, version, generation))
    complete, begun = attempt.agree()[0]
    if complete is not None:
        return folder.directory / complete
    draft = folder.directory / begun
    attempt.run(lambda: _write_units(draft, f"units-{group.rank}.safetensors", state, mine))
    parts = attempt.agree(draft)
    if group.rank == 0:
        units = {name: entry for part in parts for name, entry in part.items()}
        text = manifest_text(version, state.catalog.layout, units)
        attempt.run(lambda: folder.publish(draft, version, text).name)
    return folder.directory / attempt.agree(draft)[0]


class _Attempt:
    """Parts that all ranks do before any goes on; if one of them fails, all do."""

    def __init__(self, folder: CheckpointFolder, group: Group) -> None:
        self._folder, self._group = folder, group
        self._result: Any = None
        self._problem = ""

    def run(self, part: Callable[[], Any]) -> None:
        """Does this rank's part."""
        try:
            self._result = part()
        except (OSError, SafetensorError, PersistFailed) as error:
            self._problem = str(error) or type(error).__name__

    def agree(self, draft: Path | None = None) -> list[Any]:
        """What the parts of all ranks returned.

        Raises:
            PersistFailed: one failed; rank 0 has removed the draft.
        """
        everyone = gather_json(self._group, (self._result, self._problem))
        self._result = None
        problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(everyone) if problem]
        if problems:
            if draft is not None and self._group.rank == 0:
                self._folder.discard(draft)
            raise PersistFailed("; ".join(problems[:MOST_PROBLEMS]))
        return [result for result, _ in everyone]


def _begin(folder: CheckpointFolder, version: int, generation: int) -> tuple[str | None, str | None]:
    """Names of the complete checkpoint of this version, if there is one, else of a new draft."""
    path = find(folder.directory).get(version)
    return (path.name, None) if path is not None else (None, folder.begin(version, generation).name)


def _write_units(
    draft: Path, file: str, state: TrainingState, mine: Sequence[str]
) -> dict[str, tuple[str, int, list[str]]]:
    """Writes units to one file; returns for each the file, the digest of its bytes and the names of its tensors."""
    tensors: dict[str, Tensor] = {}
    written: dict[str, tuple[str, int, list[str]]] = {}
    for name in mine:
        unit = state.catalog.by_name[name]
        data = torch.empty(unit.nbytes, dtype=torch.uint8)
        state.read(name, data)
        written[name] = (file, digest(data.numpy()), [spec.name for spec in unit.specs])
        tensors |= {f"{name}/{key}": tensor.contiguous() for key, tensor in unit.tensors(data).items()}
    write_tensors(draft / file, tensors)
    return written


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
    for name, tensors in read_units(manifest, list(targets)):
        _take_over(manifest, name, tensors, targets[name])


@torch.no_grad()
def _take_over(manifest: Manifest, name: str, tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    for key, target in targets.items():
        found = tensors.get(key)
        if found is None or (found.shape, found.dtype) != (target.shape, target.dtype):
            came = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
            expected = f"{target.dtype} {list(target.shape)}"
            raise CorruptCopy(f"{manifest.path}: expected {name}/{key} as {expected}, found {came}")
        target.copy_(found)


class CheckpointWeights:
    """Reads a deferred model's first weights from a checkpoint, without optimizer state; see `evermoe.WeightSource`.

        session = evermoe.Session(model, optimizer, sampler, weights=evermoe.CheckpointWeights("run/step-00000500"))

    A job that goes on with its own checkpoints needs no such source: `checkpoint_dir` is enough.

    Args:
        path: of the checkpoint, of a model with the same names, shapes and dtypes.

    Raises:
        CorruptCopy: it is no checkpoint.
    """

    def __init__(self, path: str | Path) -> None:
        self._manifest = read_manifest(Path(path))

    def describe(self) -> str:
        """Version and layout of the checkpoint."""
        return f"version {self._manifest.version} of {self._manifest.layout}"

    def fill(self, path: str, module: nn.Module, tensors: Mapping[str, Tensor], expert: int | None) -> None:
        """Writes the first values of one unit; see `evermoe.WeightSource`."""
        name = (path or "model") if expert is None else expert_unit(path, expert)
        for _, found in read_units(self._manifest, [name]):
            _take_over(self._manifest, name, found, tensors)


class Checkpointer:
    """When a session writes checkpoints, and which units each of its members writes.

    Args:
        options: where, and when.
        state: this member's units.
        membership: the job, and who trains.

    Raises:
        ValueError: another job runs in the folder, or its checkpoints are of another model.
        OSError: the folder cannot be written to.
    """

    def __init__(self, options: CheckpointOptions, state: TrainingState, membership: Membership) -> None:
        self._options, self._state, self._membership = options, state, membership
        self._newest = -1
        self._folder: CheckpointFolder | None = None
        if options.checkpoint_dir is not None and membership.role == "train":
            owner = Owner(membership.identity.job, state.catalog.layout)
            self._folder = CheckpointFolder(Path(options.checkpoint_dir), owner, membership.id)

    def newest_generation(self) -> int:
        """The newest generation that wrote to the folder; 0 if there is none."""
        return 0 if self._folder is None else self._folder.newest_generation()

    def restart(self, generation: int) -> None:
        """The members of a generation resume: what was written may be unknown to some, what was begun is void."""
        self._newest = -1
        if self._folder is not None and self._membership.trainer_group.rank == 0:
            self._folder.sweep(generation)

    def is_due(self, step: int) -> bool:
        """After so many steps."""
        every = self._options.checkpoint_every
        return bool(every) and step % every == 0

    def has(self, version: int) -> bool:
        """Whether there is nothing to write at the end of a job at this version, as far as is known here."""
        return self._folder is None or self._newest == version

    def write(self, version: int) -> Path:
        """Writes the state, which is that of `version`; collective. Returns the folder.

        Raises:
            PersistFailed: it could not be written; the same on all members.
            PeerLost: a member is gone, and nothing is written.
        """
        assert self._folder is not None
        group = self._membership.trainer_group
        mine = primary_units(self._state.catalog.units, self._state.active(group.size), group.rank, group.size)
        path = write(self._folder, self._state, mine, version, self._membership.generation, group)
        self._newest = version
        return path

    def close(self) -> None:
        """Lets other jobs have the folder."""
        if self._folder is not None:
            self._folder.close()
