"""Files of a checkpoint in a folder, each with some complete units."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from evermoe._native import digests
from evermoe.checkpoint.manifest import Manifest, Row
from evermoe.checkpoint.plain_files import write_units
from evermoe.checkpoint.unit_share import Share


def write_complete(file: Path, shares: Sequence[Share]) -> list[Row]:
    """Write complete units to a new file; return their rows.

    Raises:
        OSError: the file cannot be written.
    """
    found = write_units(file, {each.unit.name: (each.unit, each.data) for each in shares})
    return [each.row(file.name, found[each.unit.name]) for each in shares]


def write_frozen(file: Path, shares: Sequence[Share], earlier: Sequence[Manifest]) -> list[Row]:
    """Link a file of an earlier checkpoint that has the same bytes of these units alone, or write it; return the rows.

    The newest checkpoint shares no file with the next one: a damaged file then leaves the other of the two.

    Args:
        file: its new path, in a draft next to the checkpoints.
        shares: complete units that no step writes.
        earlier: manifests of the checkpoints, the newest last.

    Raises:
        OSError: the file cannot be written.
    """
    values = digests([[each.data.numpy()] for each in shares])
    rows = [each.row(file.name, value) for each, value in zip(shares, values, strict=True)]
    wanted = {row.unit: row.digest for row in rows}
    for manifest in reversed(earlier[:-1]):
        by_file: dict[str, dict[str, int]] = {}
        for row in manifest.rows:
            by_file.setdefault(row.file, {})[row.unit] = row.digest
        for name in [name for name, units in by_file.items() if units == wanted]:
            try:
                os.link(file.parents[1] / manifest.path.name / name, file)
            except OSError:  # it was removed meanwhile, or the file system has no links
                continue
            return rows
    return write_complete(file, shares)
