"""`evermoe checkpoints`: list, verify, copy and prune the checkpoints in a folder or at a URL."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from evermoe.checkpoint.checkpoint_folder import Stored
from evermoe.checkpoint.checkpoint_store import prune, stored, superseded
from evermoe.checkpoint.copying import copy
from evermoe.checkpoint.manifest import (
    CHECKPOINT,
    SAVE,
    Manifest,
    Row,
    Saved,
    read_manifest,
    read_saved,
    read_units,
)
from evermoe.checkpoint.object_store import Location, locate, locate_below
from evermoe.checkpoint.owner import read_owner
from evermoe.checkpoint.retention import Retention
from evermoe.cli import export
from evermoe.errors import CorruptCopy
from evermoe.options import checked
from evermoe.state.version import generation_of, step_of

MB = 1e6


def main(options: argparse.Namespace) -> int:
    """Carry out the action and return the exit code, which is 1 if `verify` found damage.

    Raises:
        ValueError: an argument is wrong, or a job runs in the folder that should be pruned.
        CorruptCopy: a checkpoint to show or copy is damaged or none.
        OSError: a folder or an object store cannot be read or written.
    """
    if options.action == "list":
        return _list(options.folder, as_json=options.json)
    if options.action == "show":
        return _show(read_manifest(locate_below(options.checkpoint)), as_json=options.json)
    if options.action == "verify":
        return _verify([path for each in options.paths for path in _checkpoints(each)])
    if options.action == "copy":
        return _copy([path for each in options.paths for path in _checkpoints(each)], locate(options.to))
    if options.action == "export":
        return export.main(options)
    return _prune(locate(options.folder), options)


def _list(folder: str, *, as_json: bool) -> int:
    where = locate(folder)
    found: Sequence[Stored] = stored(where)
    if as_json:
        print(json.dumps([each._asdict() | {"path": str(each.path)} for each in found], indent=2))
        return 0
    owner, saves = read_owner(where), stored(where, SAVE)
    counts = f"{len(found)} complete checkpoints" + (f", {len(saves)} saves" if saves else "")
    print(f"{folder}: {counts}" + (f" of job {owner.job}" if owner else ""))
    for each in (*found, *saves):
        generation = generation_of(each.version)
        sizes = f"{each.units} units  {each.nbytes / MB:.1f} MB"
        verified = "not verified" if each.verified_at is None else f"verified at step {each.verified_at}"
        is_save = each.path.name.startswith(SAVE)
        print(f"  {each.path.name}  generation {generation}  {sizes}{'' if is_save else f'  {verified}'}")
    return 0


def _show(manifest: Manifest, *, as_json: bool) -> int:
    if as_json:
        fields = {"step": step_of(manifest.version), "version": manifest.version, "layout": manifest.layout}
        units = {name: _fields(unit, manifest) for name, unit in manifest.units.items()}
        print(json.dumps(fields | {"units": units}, indent=2))
        return 0
    print(f"{manifest.path}: step {step_of(manifest.version)}, generation {generation_of(manifest.version)}")
    for unit in manifest.saved:
        files = " ".join(_file(row, manifest) for row in unit.rows)
        step = f"  step {step_of(unit.version)}" if manifest.is_save else ""
        print(f"  {unit.unit}{step}  {files}  {unit.digest:016x}  {', '.join(unit.tensors)}")
    return 0


def _fields(unit: Saved, manifest: Manifest) -> dict[str, Any]:
    """Return what `show --json` says of a unit; of one that was saved in parts, all their files."""
    file, origin = unit.rows[0].file, unit.rows[0].origin
    fields: dict[str, Any] = {"file": file, "digest": f"{unit.digest:016x}", "tensors": unit.tensors}
    fields |= {"origin": origin} if origin != manifest.path.name else {}
    fields |= {"version": unit.version} if unit.version != manifest.version else {}
    fields |= {"extents": unit.extents} if unit.extents else {}
    return fields | ({"files": [_file(row, manifest) for row in unit.rows]} if unit.is_cut else {})


def _file(row: Row, manifest: Manifest) -> str:
    return row.file if row.origin == manifest.path.name else f"{row.origin}/{row.file}"


def _checkpoints(path: str) -> list[Location]:
    """Return the checkpoints in a folder or at a URL, or the single one that the path names."""
    below = locate_below(path)
    if below.name.startswith((f"{CHECKPOINT}-", f"{SAVE}-")):
        return [below]
    return [each.path for each in stored(locate(path))]


def _verify(paths: Sequence[Location]) -> int:
    if not paths:
        raise ValueError("expected a checkpoint, found none")
    wrong = 0
    for path in paths:
        try:
            manifest = read_manifest(path)
            for _ in read_units(manifest, [name for name, unit in manifest.units.items() if not unit.is_cut]):
                pass
            for unit in manifest.units.values():
                if unit.is_cut:
                    read_saved(unit)
            print(f"{path}: {len(manifest.units)} units are complete")
        except CorruptCopy as error:
            wrong += 1
            print(f"{path}: damaged: {error}")
    return int(wrong > 0)


def _copy(paths: Sequence[Location], to: Location) -> int:
    if not paths:
        raise ValueError("expected a checkpoint, found none")
    for path in paths:
        copied = copy(read_manifest(path), to)
        print(f"{path}: already in {to}" if copied is None else f"{path}: copied to {copied}")
    return 0


def _prune(where: Location, options: argparse.Namespace) -> int:
    keep = checked("--keep", options.keep, int, least=1)
    retention = Retention(keep, checked("--every", options.every, int, least=0))
    if options.dry_run:
        for path in superseded(where, retention):
            print(f"would remove {path}")
        return 0
    for path in prune(where, retention, abandoned=options.abandoned):
        print(f"removed {path}")
    return 0
