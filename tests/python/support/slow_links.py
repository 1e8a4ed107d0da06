"""Workers whose messages to peers, or copies from a GPU, take as long as on a slow link."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from evermoe.comm.courier import Courier
from evermoe.protection import Protection
from support import worker
from support.harness import Worker
from support.worker import Options

RATE = 40_000
"""Bytes per second."""
HOST_RATE = 2_000_000
"""Bytes per second of a copy from a GPU to its host."""


class SlowHostWorker(Worker):
    """Of a stand-in for a GPU, from which nothing comes to the host faster than `HOST_RATE`."""

    @staticmethod
    def main(options: Options) -> None:
        os.environ["EVERMOE_TEST_HOST_BYTES_PER_SECOND"] = str(HOST_RATE)
        worker.main(options)


class SlowLinkWorker(Worker):
    """Writes an event `followed` for each choice of experts whose copies on peers are brought up to date."""

    @staticmethod
    def main(options: Options) -> None:
        note_sent, select = Courier._note_sent, Protection._select

        def note_sent_late(courier: Courier, each: Any) -> None:
            time.sleep(each.message.data.nbytes / RATE)
            note_sent(courier, each)

        def select_and_tell(protection: Protection) -> set[str] | None:
            found = select(protection)
            experts = set(protection.state.catalog.experts())
            fields = {
                "units": sorted(experts & (found or set())),
                "budget": protection.window_planner.budgets.remote,
                "step_seconds": protection.window_planner.step_seconds,
                "expert_bytes": max(unit.nbytes for unit in protection.state.catalog.units if unit.layer is not None),
            }
            with options.events.open("a") as file:
                file.write(json.dumps({"event": "followed", "pid": os.getpid(), **fields}) + "\n")
            return found

        Courier._note_sent = note_sent_late  # type: ignore[method-assign]
        Protection._select = select_and_tell  # type: ignore[method-assign]
        worker.main(options)
