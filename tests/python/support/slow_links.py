"""Workers whose messages to peers, or copies from a GPU, take as long as on a slow link."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any

from evermoe.comm.courier import Courier
from evermoe.copies.copy_selection import CopySelection
from evermoe.copies.snapshot.rank_plan import RankReport
from evermoe.copies.snapshot.snapshots import Snapshots
from evermoe.copies.snapshot.window_plan import WindowPlanner
from evermoe.planning.budgets import Budgets
from evermoe.planning.schedule import DEFAULT_LINK
from evermoe.planning.windows import Windows
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
    """Writes an event `followed` for each choice of experts whose copies on peers are brought up to date, `captured`
    for each capture that was timed, and `budgeted` for each budget that follows from what was measured."""

    @staticmethod
    def main(options: Options) -> None:
        note_sent, select = Courier._note_sent, CopySelection.begin_step
        start, budgets_of = Snapshots.begin_copies, WindowPlanner._budgets

        def write(event: str, **fields: Any) -> None:
            with options.events.open("a") as file:
                file.write(json.dumps({"event": event, "pid": os.getpid(), **fields}) + "\n")

        def note_sent_late(courier: Courier, each: Any) -> None:
            time.sleep(each.message.data.nbytes / RATE)
            note_sent(courier, each)

        def select_and_report(selection: CopySelection) -> None:
            select(selection)
            experts = set(selection._state.catalog.experts())
            write(
                "followed",
                units=sorted(experts & (selection.now or set())),
                budget=selection._planner.budgets.remote,
                expert_bytes=max(unit.nbytes for unit in selection._state.catalog.units if unit.layer is not None),
            )

        def start_and_report(snapshots: Snapshots, *args: Any) -> None:
            before = snapshots.rounds.current
            start(snapshots, *args)
            if before is not None and snapshots.rounds.current is not before:
                nbytes = sum(kept.arena.payload_bytes for kept in before.own)
                write("captured", nbytes=nbytes, seconds=before.captures.seconds)

        def budgets_of_and_report(planner: WindowPlanner, reports: Sequence[RankReport]) -> Budgets:
            found = budgets_of(planner, reports)
            mine = reports[planner._group.rank]
            link = None if mine.link == DEFAULT_LINK else mine.link[1]
            write("budgeted", budgets=found, link=link, step_seconds=Windows.from_json(mine.windows).step_seconds)
            return found

        Courier._note_sent = note_sent_late  # type: ignore[method-assign]
        CopySelection.begin_step = select_and_report  # type: ignore[method-assign]
        Snapshots.begin_copies = start_and_report  # type: ignore[method-assign]
        WindowPlanner._budgets = budgets_of_and_report  # type: ignore[method-assign]
        worker.main(options)
