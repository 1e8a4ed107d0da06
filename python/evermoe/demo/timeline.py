"""Timeline of a run: the data that its picture draws. Pure: event lists in, plain numbers out.

Seconds count from the first step of any worker.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from evermoe.demo.summary import Event, commits, episodes

State = Literal["training", "recovering", "joining"]
WINDOW_STEPS = 3
"""Median steps that the sliding window of the throughput spans: enough to level out the noise of single steps."""


@dataclass(frozen=True)
class Span:
    """One stretch of a worker's lane."""

    state: State
    start: float
    end: float


@dataclass(frozen=True)
class Mark:
    """A moment that the picture labels."""

    kind: Literal["kill", "recovered", "join"]
    time: float
    label: str


@dataclass(frozen=True)
class Timeline:
    """One run over time."""

    times: list[float]
    """Time at which each committed step was applied.

    Not the time of its `commit`: a commit is reported after the vote on the next step. The last two steps of a run are
    therefore committed at the same moment, which a rate would show as a spike.
    """
    losses: list[float]
    losses_without_failures: list[float]
    """Loss of the same steps in the run without failures; shorter or empty where that took fewer steps."""
    rates: list[tuple[float, float]]
    """(time, tokens per second over the sliding window that ends at this time)."""
    lanes: dict[int, list[Span]]
    """Spans of each worker. A dead worker, or one that has not joined yet, has none."""
    deaths: dict[int, float]
    """Time of each worker's kill."""
    marks: list[Mark]
    outages: list[tuple[float, float]]
    """(kill, next applied step) of each failure."""

    @property
    def end(self) -> float:
        """Time of the last step."""
        return self.times[-1]

    def members(self, time: float) -> int:
        """Return the number of live members at a time: from a worker's first step to its end, recoveries included."""
        ranges = [(begin, lane[-1].end) for lane in self.lanes.values() if (begin := _first_step(lane)) is not None]
        return sum(begin <= time < end for begin, end in ranges)


def timeline(
    events: Mapping[int, Sequence[Event]], baseline: Mapping[int, Sequence[Event]] | None, tokens_per_step: int
) -> Timeline:
    """Build the timeline of a run."""
    zero = min(event["time"] for rows in events.values() for event in rows if event["event"] == "begin")
    committed = commits(events)
    times = [_applied(events, step) - zero for step in committed]
    deaths = {w: event["time"] - zero for w, rows in events.items() for event in rows if event["event"] == "killed"}
    lanes = {worker: list(_lane(rows, zero)) for worker, rows in events.items()}
    without = commits(baseline) if baseline else {}
    return Timeline(
        times=times,
        losses=[event["loss"] for event in committed.values()],
        losses_without_failures=[without[step]["loss"] for step in committed if step in without],
        rates=rates(times, tokens_per_step, _pauses(lanes)),
        lanes=lanes,
        deaths=deaths,
        marks=list(_marks(events, zero)),
        outages=[(each.started - zero, each.started + each.total_seconds - zero) for each in episodes(events)],
    )


def rates(times: Sequence[float], tokens: int, pauses: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (time, tokens per second), averaged over a sliding window that ends at this time.

    A step's tokens spread evenly over the time since the previous step. After a pause only the time since its end
    counts, as the attempt that the pause interrupted was discarded.

    Args:
        times: at which steps were applied, the first one first.
        tokens: of each step.
        pauses: (start, end) of recoveries and joins.
    """
    if len(times) < 2:
        return []
    durations = [after - before for before, after in pairwise(times)]
    window = WINDOW_STEPS * statistics.median(durations)
    knots = [(times[0], 0.0)]
    """(time, tokens done by then); the tokens grow linearly in between."""
    for before, after in pairwise(times):
        ends = [end for start, end in pauses if before <= end < after and start < after]
        if ends:
            knots.append((max(ends), knots[-1][1]))
        knots.append((after, knots[-1][1] + tokens))
    count = 8 * len(times)
    grid = [times[0] + (times[-1] - times[0]) * at / count for at in range(1, count + 1)]
    found = []
    for time in grid:
        since = max(times[0], time - window)
        found.append((time, (_interpolate(knots, time) - _interpolate(knots, since)) / (time - since)))
    return found


def _interpolate(knots: Sequence[tuple[float, float]], time: float) -> float:
    for (before, low), (after, high) in pairwise(knots):
        if time <= after:
            return low + (high - low) * (time - before) / (after - before) if after > before else high
    return knots[-1][1]


def _applied(events: Mapping[int, Sequence[Event]], step: int) -> float:
    """Return the time at which the first worker had applied a step, for the last time if it was repeated."""
    latest = {
        worker: event["time"]
        for worker, rows in events.items()
        for event in rows
        if event["event"] in ("update", "skipped") and event["step"] == step
    }
    return min(latest.values()) if latest else commits(events)[step]["time"]


def _lane(rows: Sequence[Event], zero: float) -> Iterator[Span]:
    """Yield the spans of one worker, from its first step, or its request to join, to its end."""
    state: State | None = None
    since = 0.0
    for event in rows:
        name, time = event["event"], event["time"] - zero
        following: State | None = state
        if name == "joining":
            following = "joining"
        elif name == "connection_lost":
            following = "recovering"
        elif name == "phase" and event["phase"] != "agree" and state == "training":
            following = "joining"  # all members meet, although none is lost
        elif name == "begin" or (name == "recovered" and state not in (None, "joining")):
            following = "training"
        if name == "killed" or following != state:
            if state is not None and time > since:
                yield Span(state, since, time)
            state, since = following, time
        if name == "killed":
            return
    last = max((event["time"] - zero for event in rows), default=0.0)
    if state is not None and last > since:
        yield Span(state, since, last)


def _first_step(lane: Sequence[Span]) -> float | None:
    return next((span.start for span in lane if span.state == "training"), None)


def _pauses(lanes: Mapping[int, Sequence[Span]]) -> list[tuple[float, float]]:
    """Return when workers that had trained did not; a newcomer's wait is none."""
    return [
        (span.start, span.end)
        for lane in lanes.values()
        for before, span in pairwise(lane)
        if span.state != "training" and before.state == "training"
    ]


def _marks(events: Mapping[int, Sequence[Event]], zero: float) -> Iterator[Mark]:
    for episode in episodes(events):
        names = " and ".join(map(str, episode.killed))
        yield Mark("kill", episode.started - zero, f"worker {names} killed")
        if episode.total_seconds:
            end = episode.started + episode.total_seconds
            yield Mark("recovered", end - zero, f"trains again after {episode.total_seconds:.1f} s")
    for worker, rows in events.items():
        for event in rows:
            if event["event"] == "joining":
                begin = min((each["time"] for each in rows if each["event"] == "begin"), default=event["time"])
                yield Mark("join", begin - zero, f"worker {worker} joins")
