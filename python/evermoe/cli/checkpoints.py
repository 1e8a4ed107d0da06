"""`evermoe checkpoints`: what is in a folder of checkpoints, whether it is whole, and what may go."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from evermoe.errors import CorruptCopy
from evermoe.options import checked
from evermoe.persist.checkpoint_folder import Retention, Stored, remove, stored, superseded
from evermoe.persist.manifest import Manifest, read_manifest, read_units
from evermoe.persist.owner import no_job, read_owner
from evermoe.state.version import generation_of, step_of

MB = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions and their flags."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    every = actions.add_parser("list", help="the complete checkpoints, older ones first")
    show = actions.add_parser("show", help="the units of a checkpoint: their files, tensors and digests")
    verify = actions.add_parser("verify", help="read checkpoints whole, and compare all bytes with their digests")
    prune = actions.add_parser("prune", help="remove the checkpoints of a folder that need not stay")
    for each in (every, show):
        each.add_argument("--json", action="store_true", help="print JSON")
    every.add_argument("folder", metavar="FOLDER", help="checkpoint_dir of a session")
    show.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder step-… of it")
    verify.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint_dir, or folders step-… of one")
    prune.add_argument("folder", metavar="FOLDER", help="checkpoint_dir of a session that does not run")
    prune.add_argument("--keep", type=int, default=2, metavar="N", help="newest ones that stay (%(default)s)")
    prune.add_argument("--every", type=int, default=0, metavar="STEPS", help="multiples of so many steps stay, too")
    prune.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")


def main(options: argparse.Namespace) -> int:
    """Carries out the action; returns the exit code: 1 if `verify` found damage.

    Raises:
        ValueError: an argument is wrong, or a job runs in the folder that should be pruned.
        CorruptCopy: a checkpoint to show is none.
        OSError: a folder cannot be read.
    """
    if options.action == "list":
        return _list(stored(Path(options.folder)), options.folder, as_json=options.json)
    if options.action == "show":
        return _show(read_manifest(Path(options.checkpoint)), as_json=options.json)
    if options.action == "verify":
        return _verify([path for each in options.paths for path in _checkpoints(Path(each))])
    return _prune(Path(options.folder), options)


def _list(found: Sequence[Stored], folder: str, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps([each._asdict() | {"path": str(each.path)} for each in found], indent=2))
        return 0
    owner = read_owner(Path(folder))
    print(f"{folder}: {len(found)} complete checkpoints" + (f" of job {owner.job}" if owner else ""))
    for each in found:
        generation = generation_of(each.version)
        print(f"  {each.path.name}  generation {generation}  {each.units} units  {each.nbytes / MB:.1f} MB")
    return 0


def _show(manifest: Manifest, *, as_json: bool) -> int:
    units = {
        name: {"file": file, "digest": f"{digest:016x}", "tensors": manifest.names[name]}
        for name, (file, digest) in manifest.units.items()
    }
    if as_json:
        fields = {"step": step_of(manifest.version), "version": manifest.version, "layout": manifest.layout}
        print(json.dumps(fields | {"units": units}, indent=2))
        return 0
    print(f"{manifest.path}: step {step_of(manifest.version)}, generation {generation_of(manifest.version)}")
    for name, unit in units.items():
        print(f"  {name}  {unit['file']}  {unit['digest']}  {', '.join(unit['tensors'])}")
    return 0


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoints in a folder, or the one that it is."""
    if path.name.startswith("step-"):
        return [path]
    return [each.path for each in stored(path)]


def _verify(paths: Sequence[Path]) -> int:
    if not paths:
        raise ValueError("expected a checkpoint, found none")
    wrong = 0
    for path in paths:
        try:
            manifest = read_manifest(path)
            num_units = sum(1 for _ in read_units(manifest, list(manifest.units)))
            print(f"{path}: {num_units} units are whole")
        except CorruptCopy as error:
            wrong += 1
            print(f"{path}: damaged: {error}")
    return int(wrong > 0)


def _prune(folder: Path, options: argparse.Namespace) -> int:
    keep = checked("--keep", options.keep, int, least=1)
    retention = Retention(keep, checked("--every", options.every, int, least=0))
    if options.dry_run:
        for path in superseded(folder, retention):
            print(f"would remove {path}")
        return 0
    with no_job(folder):
        for path in superseded(folder, retention):
            remove(path)
            print(f"removed {path}")
    return 0
