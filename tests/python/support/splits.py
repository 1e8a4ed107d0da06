"""A worker that records how its layers split tokens over replicas."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from evermoe.moe import exchange_planner
from support import worker
from support.harness import Worker
from support.worker import Options


class SplittingWorker(Worker):
    """Writes an event `split` for each exchange of tokens: what all had, where replicas are, what goes from here."""

    @staticmethod
    def main(options: Options) -> None:
        split = exchange_planner.split_tokens

        def split_and_report(tokens: Any, matrix: Any, rank: int, policy: Any = "even") -> Any:
            send_ER, receive_RE = split(tokens, matrix, rank, policy)
            rows = {"tokens": np.asarray(tokens), "matrix": np.asarray(matrix), "send": send_ER}
            fields = {name: row.tolist() for name, row in rows.items()} | {"rank": rank, "policy": policy}
            with options.events.open("a") as file:
                file.write(json.dumps({"event": "split", "pid": os.getpid(), **fields}) + "\n")
            return send_ER, receive_RE

        exchange_planner.split_tokens = split_and_report
        worker.main(options)
