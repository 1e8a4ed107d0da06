"""Workers that tell which experts they save to the place that all share."""

from __future__ import annotations

import json
import os
from collections.abc import Collection

from evermoe.persist.partial import PartialCheckpoints
from evermoe.state.version import step_of
from support import worker
from support.harness import Worker
from support.worker import Options


class SavingWorker(Worker):
    """Writes an event `saving` for each save that begins, with the steps that were taken and the experts in it."""

    @staticmethod
    def main(options: Options) -> None:
        save = PartialCheckpoints._save

        def save_and_tell(keeper: PartialCheckpoints, version: int, experts: Collection[str]) -> None:
            with options.events.open("a") as file:
                told = {"event": "saving", "pid": os.getpid(), "step": step_of(version), "units": sorted(experts)}
                file.write(json.dumps(told) + "\n")
            save(keeper, version, experts)

        PartialCheckpoints._save = save_and_tell  # type: ignore[method-assign]
        worker.main(options)
