"""`evermoe export`: convert checkpoints to formats of other libraries."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from evermoe.checkpoint.manifest import Manifest

FORMATS = ("hf", "dcp")
WEIGHTS = "weights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `evermoe export`."""
    parser.add_argument("--to", choices=FORMATS, required=True, help="format: that of transformers, or of torch's DCP")
    parser.add_argument("--config", metavar="FOLDER", help="hf: folder with the model's config.json")
    parser.add_argument(
        "--prefix",
        default="",
        metavar="NAME",
        help="hf: attribute that held the model, if it was a submodule of the trained module",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint step-… of a session")
    parser.add_argument("out", metavar="OUT", help="folder to write; it must be empty or missing")


def main(options: argparse.Namespace) -> int:
    """Write the folder and return the exit code.

    Raises:
        ValueError: the checkpoint or an argument is wrong; the message says which.
        OSError: a folder cannot be read or written.
    """
    from evermoe.checkpoint.manifest import read_manifest
    from evermoe.checkpoint.object_store import locate_below
    from evermoe.state.version import step_of

    out = Path(options.out)
    manifest = read_manifest(locate_below(options.checkpoint))
    if options.to == "hf":
        if options.config is None:
            raise ValueError("--to hf: expected --config FOLDER with the model's config.json, got none")
        _to_hub(manifest, options.config, out, options.prefix)
    else:
        _to_dcp(manifest, out)
    print(f"{out} has step {step_of(manifest.version)} of {manifest.path}")
    return 0


def _to_hub(manifest: Manifest, config: str, out: Path, prefix: str) -> None:
    from evermoe.checkpoint.checkpoint import CheckpointWeights
    from evermoe.checkpoint.manifest import read_units
    from evermoe.integrations.transformers import export, make_elastic
    from evermoe.integrations.transformers.hub_model import build_model, read_config
    from evermoe.state.deferred import deferred

    unit = next((name for name, found in manifest.units.items() if WEIGHTS in found.tensors), None)
    if unit is None:
        raise ValueError(f"{manifest.path}: expected a model with experts, found none")
    ((_, tensors),) = read_units(manifest, [unit])
    with deferred():
        model = build_model(read_config(config), tensors[WEIGHTS].dtype)
        make_elastic(model)
    export(CheckpointWeights(str(manifest.path)), model, out, prefix=prefix)


def _to_dcp(manifest: Manifest, out: Path) -> None:
    import torch
    from torch.distributed import checkpoint as dcp

    from evermoe.checkpoint.assembly import complete_units, read_wanted

    if out.exists() and any(out.iterdir()):
        raise FileExistsError(17, "expected an empty folder", str(out))
    state: dict[str, Any] = {}
    for unit, tensors in read_wanted(manifest, complete_units(manifest)):
        state |= {f"{unit}/{key}": tensor for key, tensor in tensors.items()}
    with torch.no_grad():
        dcp.save(state, checkpoint_id=out, no_dist=True)
