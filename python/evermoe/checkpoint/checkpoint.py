"""Reads checkpoints: safetensors files, and a manifest that is written last.

    DIRECTORY/step-00000120/manifest.json         version, progress, digest of every unit
    DIRECTORY/step-00000120/units-0.safetensors   tensors named "<unit>/<piece>"
    DIRECTORY/step-00000120/frozen-0.safetensors  the same of frozen units; see `evermoe.checkpoint.unit_files`

`evermoe.checkpoint.checkpoint_folder` and `evermoe.checkpoint.checkpoint_bucket` describe the other files;
`evermoe.checkpoint.checkpointer` writes checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from evermoe.checkpoint.manifest import Manifest, as_bytes, read_manifest, read_units
from evermoe.checkpoint.object_store import locate_below
from evermoe.errors import CorruptCopy
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit, weight_tensors


def read(manifest: Manifest, state: TrainingState, names: Sequence[str]) -> dict[str, Tensor]:
    """Read units, uint8 `[nbytes]` each, and check their digests.

    Raises:
        CorruptCopy: a unit is missing, has another layout than the model, or does not match its digest.
    """
    units: dict[str, Tensor] = {}
    for name, saved in read_units(manifest, names):
        tensors = state.catalog.by_name[name].fitted(saved)
        specs = [(spec.name, spec.shape, spec.dtype) for spec in state.catalog.by_name[name].specs]
        found = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]
        if specs != found:
            raise CorruptCopy(f"{name} in {manifest.path} belongs to another model: expected {specs}, got {found}")
        units[name] = as_bytes(tensors)
    return units


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load a checkpoint's weights, without optimizer state, into a model that holds all its experts (no session).

        evermoe.load_weights(model, "checkpoints/step-00000500")
        evermoe.load_weights(model, "s3://bucket/run/step-00000500.0000000003-7f01aa22")

    Raises:
        ValueError: the URL has an unknown scheme, or contains credentials.
        OSError: there are no credentials for the URL.
        CorruptCopy: the folder is not a checkpoint of a model with these names, shapes and dtypes, or its bytes do
            not match their digests.
    """
    manifest = read_manifest(locate_below(path))
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
        for _, found in read_units(self._manifest, [name]):
            _take_over(self._manifest, name, found, tensors)
