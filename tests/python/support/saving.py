"""Workers that record which experts they copy at a time, to the place that all share and to their own node."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from typing import Any

from evermoe.checkpoint.unit_saver import UnitSaver
from evermoe.copies.snapshot.snapshots import Snapshots
from evermoe.state.keeper import ScheduledCopies
from evermoe.state.version import step_of
from support import worker
from support.harness import Worker
from support.worker import Options


class SavingWorker(Worker):
    """Writes an event for each copy that begins, with the number of steps that were taken and the experts in it.

    `saving` for the place that all share, `snapshotting` for the node's own memory.
    """

    @staticmethod
    def main(options: Options) -> None:
        save, snapshot = UnitSaver._begin, Snapshots.begin_copies

        def write(event: str, version: int, units: Collection[str]) -> None:
            with options.events.open("a") as file:
                fields: dict[str, Any] = {"step": step_of(version), "units": sorted(units)}
                file.write(json.dumps({"event": event, "pid": os.getpid(), **fields}) + "\n")

        def save_and_write(saver: UnitSaver, version: int, experts: Collection[str]) -> None:
            write("saving", version, experts)
            save(saver, version, experts)

        def snapshot_and_write(keeper: Snapshots, version: int, scheduled: ScheduledCopies) -> None:
            experts = {*keeper._state.catalog.experts()}
            write("snapshotting", version, experts.intersection(scheduled.local or ()))
            snapshot(keeper, version, scheduled)

        UnitSaver._begin = save_and_write  # type: ignore[method-assign]
        Snapshots.begin_copies = snapshot_and_write  # type: ignore[method-assign]
        worker.main(options)
