"""Result and cost of a recovery, as this member saw it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from evermoe.events import Commit, Phase, Recovered
from evermoe.events.base_event import Listener
from evermoe.state.placement import LayerPlacements
from evermoe.state.stored import NO_COPIES, KeptCopies
from evermoe.state.version import step_of


@dataclass
class Outcome:
    """Result of a recovery on this member."""

    version: int = 0
    """Version of the state that all members now hold."""
    reached: int = 0
    """Steps that members had reported as committed, or that copies have: those of `version` unless some were undone."""
    trained: int = 0
    """Steps that the member which was furthest had taken, committed or not."""
    placement: LayerPlacements = field(default_factory=dict)
    equal_units: dict[str, int] = field(default_factory=dict)
    """Members of the running job that trained a unit at `version`, by unit, where all have equal bytes of it."""
    fetched_bytes: int = 0
    """Received from peers, read from this node's memory or from disk."""
    late_bytes: int = 0
    """Those of `fetched_bytes` that arrive while the next step computes."""
    far_bytes: int = 0
    """Those of `fetched_bytes` that came from other nodes."""
    fetched_units: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    """Units by where they came from: `peer`, `local memory`, `disk`."""
    tier: str = ""
    """The farthest of all members' sources; see `events.Recovered`."""
    digests_checked: int = 0
    """Digests of units compared with another copy's or with the bytes that arrived."""
    told: int = 0
    """Copies that count as held by the digests that their trainers have told: nobody has compared them."""
    digests_mismatched: int = 0
    lost_units: list[str] = field(default_factory=list)
    """Units of which no copy was left in memory, when the job went back to a checkpoint."""
    stale: dict[str, int] = field(default_factory=dict)
    """Experts that were taken at an older version than the others: what they had learnt since is lost."""
    lost_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens in what each of these had learnt since."""
    plt: float = 0.0
    """Portion of the run's tokens that is lost so far, averaged over layers; 0 where experts are never older."""
    mtl: float = 0.0
    """MoE token loss (MTL, Eq. 6 of MoEtion): the sum of what `plt` averages."""
    copies: KeptCopies = NO_COPIES
    """Copies that members have of the state that all now hold."""

    def count_fetched(self, by_source: Mapping[str, Collection[str]], sizes: Mapping[str, int]) -> None:
        """Counts the units that this member has fetched, by where they came from; `sizes` has the bytes of each."""
        self.fetched_units = sum(map(len, by_source.values()))
        self.fetched_bytes = sum(sizes[unit] for fetched in by_source.values() for unit in fetched)
        for source, fetched in by_source.items():
            self.sources[source] += len(fetched)

    @property
    def steps_undone(self) -> int:
        """Steps that members had taken, committed or not, and now compute again."""
        return max(0, self.trained - step_of(self.version))


class PhaseClock:
    """Seconds spent in each named phase, one after the other."""

    def __init__(self, emit: Listener) -> None:
        self.seconds: dict[str, float] = {}
        self._emit = emit
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
        self._emit(Phase(phase))

    def stop(self) -> None:
        """Ends the running phase."""
        if self._phase is not None:
            spent = time.perf_counter() - self._since
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + spent
            self._phase = None


class JobHistory:
    """Recoveries of a member, and the steps that it has taken."""

    def __init__(self, emit: Listener) -> None:
        self.reports: list[Recovered] = []
        self.committed = -1
        """Steps that no failure which the preset covers can undo; -1 before the first recovery."""
        self.before: int | None = None
        """Version before the recovery in progress; None if that was of no running job."""
        self.reason = ""
        """Cause of the latest recovery."""
        self.outcome = Outcome()
        """Its result on this member."""
        self.clock, self._started_at = PhaseClock(emit), 0.0
        self._emit = emit
        self._taken: dict[int, Commit] = {}
        """Report of each step, until it is committed."""

    def begin_recovery(self, reason: str) -> None:
        """Begin the report of a recovery: with the question to the Lighthouse."""
        self.reason, self.outcome = reason, Outcome()
        self.clock, self._started_at = PhaseClock(self._emit), time.time()

    def end_recovery(self, step: int, members: int, failure: str, *, is_arriving: bool) -> Recovered:
        """End the report of a recovery, and emit it.

        Args:
            step: steps taken in the state from which all members resume.
            members: members that train.
            failure: kind of the failure.
            is_arriving: whether copies of the state are still in flight; the next vote commits its steps then.
        """
        if is_arriving:
            self._taken = {taken: event for taken, event in self._taken.items() if taken < step}
        else:
            self._taken.clear()
            self.committed = step
        self.clock.stop()
        outcome = self.outcome
        report = Recovered(
            started_at=self._started_at,
            seconds=dict(self.clock.seconds),
            step=step,
            steps_lost=max(0, outcome.reached - step),
            members=members,
            reason=self.reason,
            fetched_bytes=outcome.fetched_bytes,
            fetched_units=outcome.fetched_units,
            late_bytes=outcome.late_bytes,
            sources=dict(outcome.sources),
            digests_checked=outcome.digests_checked,
            digests_mismatched=outcome.digests_mismatched,
            lost_units=list(outcome.lost_units),
            stale={unit: step_of(version) for unit, version in outcome.stale.items()},
            lost_tokens=dict(outcome.lost_tokens),
            plt=outcome.plt,
            failure="storage" if outcome.lost_units else failure,
            tier=outcome.tier,
            mtl=outcome.mtl,
            steps_undone=outcome.steps_undone,
        )
        self.reports.append(report)
        self._emit(report)
        return report

    def note_step(self, taken: Commit) -> None:
        """Keep the report of a step until it is committed."""
        self._taken[taken.step] = taken

    def commit(self, step: int) -> None:
        """Report a step that no failure covered by the preset can undo."""
        self.committed = step + 1
        self._emit(self._taken.pop(step))
