"""Reads checkpoints: safetensors files, and a manifest that is written last.

    DIRECTORY/step-00000120/manifest.json         version, progress, digest of every unit
    DIRECTORY/step-00000120/units-0.safetensors   tensors named "<unit>/<piece>"
    DIRECTORY/step-00000120/frozen-0.safetensors  the same of frozen units; see `evermoe.checkpoint.unit_files`

`evermoe.checkpoint.checkpoint_folder` and `evermoe.checkpoint.checkpoint_bucket` describe the other files;
`evermoe.checkpoint.checkpointer` writes checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from evermoe.checkpoint.assembly import Wanted, read_wanted
from evermoe.checkpoint.manifest import Manifest, as_bytes, read_manifest
from evermoe.checkpoint.object_store import locate_below
from evermoe.errors import CorruptCopy
from evermoe.state.catalog import UnitCatalog
from evermoe.state.shards import divide_again, extent_of, local_part
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import MARKS, Unit, expert_unit, weight_tensors


def read(manifest: Manifest, state: TrainingState, names: Sequence[str]) -> dict[str, Tensor]:
    """Read units, uint8 `[nbytes]` each, and check their digests.

    Raises:
        CorruptCopy: a unit is missing, has another layout than the model, or does not match its digest.
    """
    by_name = {name: state.catalog.by_name.get(name, Unit(name, ())) for name in names}
    _check_names(manifest, state.catalog, {unit.complete for unit in by_name.values()})
    wanted = [Wanted(name, unit.complete, {s.name: s.extent for s in unit.specs}) for name, unit in by_name.items()]
    units: dict[str, Tensor] = {}
    for name, saved in read_wanted(manifest, wanted):
        tensors = by_name[name].fitted(saved)
        specs = [(spec.name, spec.shape, spec.dtype) for spec in by_name[name].specs]
        found = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]
        if specs != found:
            raise CorruptCopy(f"{name} in {manifest.path} belongs to another model: expected {specs}, got {found}")
        units[name] = as_bytes(tensors)
    return units


def _check_names(manifest: Manifest, catalog: UnitCatalog, names: Collection[str]) -> None:
    """Check that complete units have the tensors of the model, and no others.

    Raises:
        CorruptCopy: one has not.
    """
    expected: dict[str, set[str]] = {}
    for unit in catalog.units:
        expected.setdefault(unit.complete, set()).update(spec.name for spec in unit.specs if not spec.is_optional)
    for name in sorted(names & expected.keys() & manifest.divided.keys()):
        found = {tensor for piece in manifest.divided[name] for tensor in piece.tensors}
        if found - {MARKS} != expected[name] - {MARKS}:
            raise CorruptCopy(
                f"{name} in {manifest.path} belongs to another model: expected {sorted(expected[name])}, got "
                f"{sorted(found)}"
            )


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load a checkpoint's weights, without optimizer state, into a model that holds all its experts (no session).

    Of tensors that `fully_shard` or `distribute_tensor` divides, each process loads its own part.

        evermoe.load_weights(model, "checkpoints/step-00000500")
        evermoe.load_weights(model, "s3://bucket/run/step-00000500.0000000003-7f01aa22")

    Raises:
        ValueError: the URL has an unknown scheme, or contains credentials.
        OSError: there are no credentials for the URL.
        CorruptCopy: the folder is not a checkpoint of a model with these names, shapes and dtypes, or its bytes do
            not match their digests.
    """
    manifest = read_manifest(locate_below(path))
    divide_again(model)
    targets = weight_tensors(model)
    wanted = [_wanted(*each) for each in targets.items()]
    for name, tensors in read_wanted(manifest, [each for each in wanted if each.extents]):
        _take_over(manifest, name, tensors, targets[name])


def _wanted(name: str, tensors: Mapping[str, Tensor]) -> Wanted:
    """Return the places of this process's parts of a unit of a model."""
    extents = {key: extent_of(f"{name}/{key}", each) for key, each in tensors.items() if local_part(each).numel()}
    return Wanted(name, name, extents)


@torch.no_grad()
def _take_over(manifest: Manifest, name: str, tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    for key, target in ((key, local_part(each)) for key, each in targets.items()):
        found = tensors.get(key)
        if found is None and not target.numel():
            continue
        if found is None or (found.shape, found.dtype) != (target.shape, target.dtype):
            came = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
            expected = f"{target.dtype} {list(target.shape)}"
            raise CorruptCopy(f"{manifest.path}: expected {name}/{key} as {expected}, found {came}")
        target.copy_(found)


class CheckpointWeights:
    """Reads the initial weights of a deferred model from a checkpoint, without optimizer state; see `WeightSource`.

        session = evermoe.Session(model, optimizer, sampler, weights=evermoe.CheckpointWeights("run/step-00000500"))

    A job that resumes from its own checkpoints needs no such source: `checkpoints` is enough.

    Args:
        path: path or URL of the checkpoint, of a model with the same names, shapes and dtypes.

    Raises:
        CorruptCopy: the path is not a checkpoint.
    """

    def __init__(self, path: str | Path) -> None:
        self._manifest = read_manifest(locate_below(path))

    def describe(self) -> str:
        """Return the version and the layout of the checkpoint."""
        return f"version {self._manifest.version} of {self._manifest.layout}"

    def fill(self, path: str, module: nn.Module, tensors: Mapping[str, Tensor], expert: int | None) -> None:
        """Write the initial values of one unit; see `WeightSource`."""
        name = (path or "model") if expert is None else expert_unit(path, expert)
        for _, found in read_wanted(self._manifest, [_wanted(name, tensors)]):
            _take_over(self._manifest, name, found, tensors)
