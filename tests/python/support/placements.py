"""A worker that records with which loads and factors its recoveries place experts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from evermoe.recovery import target
from evermoe.state.placement import LayerPlacements
from support import worker
from support.harness import Worker
from support.worker import Options


class PlacingWorker(Worker):
    """Writes an event `placed` for each placement of a recovery."""

    @staticmethod
    def main(options: Options) -> None:
        place = target.place_layers

        def place_and_report(
            experts: Mapping[str, int],
            load_LE: Sequence[Sequence[float]],
            previous: Any,
            nodes: Sequence[str],
            config: Any,
            boosts: Mapping[str, Sequence[float]],
            spread: Any = None,
        ) -> LayerPlacements:
            found = place(experts, load_LE, previous, nodes, config, boosts, spread)
            weighed_LE = [
                [tokens * factor for tokens, factor in zip(row, boosts.get(path, [1.0] * number), strict=False)]
                for row, (path, number) in zip(load_LE, experts.items(), strict=True)
            ]
            again = place(experts, weighed_LE, previous, nodes, config, {}, spread)
            fields = {
                "boosts": dict(boosts),
                "as_weighed": all((found[path] == again[path]).all() for path in experts),
            }
            line = json.dumps({"event": "placed", "pid": os.getpid(), **fields})
            with options.events.open("a") as file:
                file.write(line + "\n")
            return found

        target.place_layers = place_and_report
        worker.main(options)
