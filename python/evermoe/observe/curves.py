"""Curves of a member, from the events of its session."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from evermoe.events import (
    Commit,
    CorruptionFound,
    CoverageChanged,
    Damaged,
    Event,
    Measured,
    Recovered,
    SampleSkipped,
    SickNode,
    Skipped,
    SlowLoader,
    SlowMember,
)


class Curves:
    """Points that each event adds to the curves of a member. The table of curves is in `TensorBoard`."""

    def __init__(self) -> None:
        self._notes: dict[type[Event], Callable[[Any], dict[str, float]]] = {
            Commit: _note_commit,
            Measured: self._note_measured,
            CoverageChanged: _note_covered,
            Recovered: self._note_recovered,
            Skipped: lambda event: self._count("skipped"),
            Damaged: lambda event: self._count("damaged"),
            CorruptionFound: lambda event: self._count("corruption"),
            SampleSkipped: lambda event: self._count("skipped_samples"),
            SlowLoader: lambda event: self._count("slow_loader"),
            SickNode: lambda event: self._count("sick_node"),
            SlowMember: lambda event: self._count("slow_member"),
        }
        self._step = 0
        """Number of steps taken."""
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        """Held while they change, as events come from several threads."""

    def points(self, event: Event) -> tuple[int, dict[str, float]]:
        """Return the number of steps taken, and the new values by curve; no values for an event without curves."""
        note = self._notes.get(type(event))
        if note is None:
            return 0, {}
        with self._lock:
            values = note(event)
            return event.step + 1 if isinstance(event, Commit) else self._step, values

    def _count(self, name: str) -> dict[str, float]:
        self._counts[name] = self._counts.get(name, 0) + 1
        return {name: self._counts[name]}

    def _note_measured(self, event: Measured) -> dict[str, float]:
        self._step = event.step + 1
        found = {
            "step/seconds": event.seconds,
            "step/data_seconds": event.data_seconds,
            "step/own_seconds": event.own_seconds,
            "step/tokens_per_second": event.tokens / event.seconds if event.seconds else 0.0,
            "load/imbalance": event.imbalance,
            "load/expert_imbalance": event.expert_imbalance,
            "copies/plt_at_risk": event.plt_at_risk,
            "copies/starvation": event.starvation,
        }
        found |= {f"copies/lag/{kind}": steps for kind, steps in event.lag.items()}
        found |= {f"copies/sent_bytes/{kind}": nbytes for kind, nbytes in event.sent_bytes.items()}
        return {name: value for name, value in found.items() if value is not None}

    def _note_recovered(self, event: Recovered) -> dict[str, float]:
        self._step = event.step
        found: dict[str, float] = {f"recovery/{phase}": seconds for phase, seconds in event.seconds.items()}
        return found | {
            "recovery/total": sum(event.seconds.values()),
            "recovery/steps_lost": event.steps_lost,
            "recovery/tokens_lost": sum(event.lost_tokens.values()),
            "recovery/fetched_bytes": event.fetched_bytes,
        }


def _note_commit(event: Commit) -> dict[str, float]:
    found = {"loss": event.loss, "grad_norm": event.grad_norm, "members": event.members}
    progress = {"samples": event.samples, "tokens": event.tokens, "epoch": event.epoch}
    return found | {f"progress/{name}": value for name, value in progress.items() if value and not math.isnan(value)}


def _note_covered(event: CoverageChanged) -> dict[str, float]:
    return {
        "survives/one_node": event.survives_one,
        "survives/two_nodes": event.survives_two,
        "survives/fatal_losses": len(event.fatal),
    }
