"""A worker that reports what its plans of copies are about."""

from __future__ import annotations

import json
import os
from typing import Any

from evermoe.copies.snapshot.window_plan import WindowPlanner
from support import worker
from support.harness import Worker
from support.worker import Options


class OutgoingWorker(Worker):
    """Writes an event `outgoing` for each plan: offset and bytes of each unit of the bundles that go to peers."""

    @staticmethod
    def main(options: Options) -> None:
        outgoing = WindowPlanner._outgoing

        def tell_outgoing(planner: WindowPlanner) -> Any:
            found = outgoing(planner)
            with options.events.open("a") as file:
                bundles = [each.parts for each in found]
                file.write(json.dumps({"event": "outgoing", "pid": os.getpid(), "bundles": bundles}) + "\n")
            return found

        WindowPlanner._outgoing = tell_outgoing  # type: ignore[method-assign]
        worker.main(options)
