"""What a recovery did and cost, as this member saw it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from evermoe.comm.courier import Listener
from evermoe.placement import LayerPlacements
from evermoe.state.version import step_of


@dataclass
class Outcome:
    """What a recovery did, on this member."""

    version: int = 0
    """Version of the state that all members now hold."""
    newest: int = 0
    """The newest version that was whole, or where none was, of any unit: `version` unless something was lost."""
    placement: LayerPlacements = field(default_factory=dict)
    fetched_bytes: int = 0
    """Received from peers, read from this node's memory or from disk."""
    fetched_units: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    """Units by where they came from: `peer`, `local memory`, `disk`."""
    digests_checked: int = 0
    """Digests of units compared with another copy's or with the bytes that arrived."""
    digests_mismatched: int = 0
    lost_units: list[str] = field(default_factory=list)
    """Units of which no copy was left in memory, when the job went back to a checkpoint."""
    stale: dict[str, int] = field(default_factory=dict)
    """Experts that were taken at an older version than the others: what they had learnt since is lost."""


@dataclass
class RecoveryReport:
    """One recovery as this member saw it. Times are seconds, `started_at` is on the wall clock."""

    started_at: float
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: agree, rebuild, fetch, verify."""
    step: int = 0
    """The step from which all resume."""
    steps_lost: int = 0
    """Steps that had to be undone: 0 unless the newest copies were damaged or the job went back to a checkpoint."""
    members: int = 0
    lost_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens in the updates that were lost, by expert that was rolled back to an older copy than the rest."""
    plt: float = 0.0
    """Portion of lost tokens of the run so far, averaged over layers."""
    reason: str = ""
    outcome: Outcome = field(default_factory=Outcome)

    def fields(self) -> dict[str, Any]:
        """What the event `recovered` tells: JSON-able."""
        outcome = self.outcome
        return {
            "started_at": self.started_at,
            "seconds": dict(self.seconds),
            "step": self.step,
            "steps_lost": self.steps_lost,
            "members": self.members,
            "reason": self.reason,
            "fetched_bytes": outcome.fetched_bytes,
            "fetched_units": outcome.fetched_units,
            "sources": dict(outcome.sources),
            "digests_checked": outcome.digests_checked,
            "digests_mismatched": outcome.digests_mismatched,
            "lost_units": list(outcome.lost_units),
            "stale": {unit: step_of(version) for unit, version in outcome.stale.items()},
            "lost_tokens": dict(self.lost_tokens),
            "plt": self.plt,
        }


class PhaseClock:
    """Seconds spent in each named phase, one after the other."""

    def __init__(self, seconds: dict[str, float], emit: Listener) -> None:
        self._seconds, self._emit = seconds, emit
        self._phase: str | None = None
        self._since = 0.0

    @property
    def phase(self) -> str | None:
        """Name of the running phase."""
        return self._phase

    def enter(self, phase: str) -> None:
        """Ends the running phase and begins this one."""
        self.stop()
        self._phase, self._since = phase, time.perf_counter()
        self._emit("phase", {"phase": phase})

    def stop(self) -> None:
        """Ends the running phase."""
        if self._phase is not None:
            spent = time.perf_counter() - self._since
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + spent
            self._phase = None
