"""`evermoe measure`: measure the cost of failures on this machine, and write constants for `evermoe simulate`."""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from evermoe.cli.measurements import (
    measure_capture,
    measure_digests,
    measure_link,
    measure_persisting,
    measure_session,
    measure_store,
)
from evermoe.cli.results import console
from evermoe.simulate import Constants, write_constants


def main(options: argparse.Namespace) -> int:
    """Measure, write the file and print its contents.

    Raises:
        OSError: a folder cannot be written.
    """
    out = console()
    with (
        tempfile.TemporaryDirectory(prefix=".evermoe-measure-", dir=options.folder) as disk,
        tempfile.TemporaryDirectory(prefix="evermoe-measure-", dir=options.memory_dir) as memory,
    ):
        found = measure_link() | measure_digests() | measure_capture(Path(memory)) | measure_store(Path(disk))
    details: dict[str, Any] = {}
    if not options.no_session:
        session, details = measure_session(out)
        found |= session | measure_persisting(out)
    source = f"measured by evermoe measure on {platform.node()}, {time.strftime('%Y-%m-%d')}"
    constants = replace(Constants(), **found, source=source)
    write_constants(constants, options.out, details)
    table = Table(box=SIMPLE_HEAD)
    table.add_column("constant", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    for name, value in found.items():
        table.add_row(name, f"{value / 1e9:.3g} GB/s" if name.endswith("bytes_per_second") else f"{value:.4g} s")
    out.print(table)
    out.print(f"wrote {options.out}", soft_wrap=True, markup=False)
    return 0
