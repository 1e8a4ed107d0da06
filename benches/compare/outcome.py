"""Figures of a run from its workers' events. Pure: event lists in, plain numbers out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Results of a run."""

    steps: int
    """Steps in the job's final state."""
    seconds: float
    """Seconds from the begin of the first step to the last step."""
    startup_seconds: float
    """Seconds from the start of the processes to the begin of the first step."""
    step_seconds: float
    """Median seconds of a step, so that of one without a failure."""
    tokens_per_second: float
    """Goodput: tokens of the steps in the final state, over `seconds`."""
    lost_steps: int
    """Steps that were taken and had to be repeated."""
    lost_tokens: int
    """Tokens whose updates were lost, counted once for each MoE layer and expert. A repeated step counts all its
    tokens; other steps count those of the experts that went back."""
    plt: float
    """Portion of tokens lost for good, averaged over layers."""
    longest_stall: float
    """Longest time between two consecutive advances of the job, in seconds."""
    final_loss: float | None
    """Loss on the held-out text."""
    kills: int
    joins: int
    sent_bytes: int | None
    peak_memory_bytes: int


def in_order(events: Mapping[int, Sequence[Event]]) -> list[Event]:
    """Return all events by time, up to the first that reports that all steps are taken.

    Later events are not part of the run: a worker of torchft that joins then begins a new job.
    """
    rows = sorted((event for rows in events.values() for event in rows), key=lambda event: event["time"])
    end = next((number for number, event in enumerate(rows) if event["event"] == "final"), len(rows))
    return rows[: end + 1]


def progress(events: Mapping[int, Sequence[Event]]) -> list[tuple[float, int]]:
    """Return time and number of steps whenever the number of steps in the job's state changed.

    >>> a = [{"event": "taken", "step": 0, "time": 1.0}, {"event": "taken", "step": 1, "time": 2.0}]
    >>> b = [{"event": "resumed", "step": 1, "time": 3.0}, {"event": "taken", "step": 1, "time": 4.0}]
    >>> progress({0: a, 1: b})
    [(1.0, 1), (2.0, 2), (3.0, 1), (4.0, 2)]
    """
    found: list[tuple[float, int]] = []
    top = 0
    for event in in_order(events):
        if event["event"] == "taken" and event["step"] + 1 > top:
            top = event["step"] + 1
        elif event["event"] in ("resumed", "recovered") and event["step"] < top:
            top = event["step"]
        else:
            continue
        found.append((event["time"], top))
    return found


def lost_steps(events: Mapping[int, Sequence[Event]]) -> int:
    """Count the steps that were undone whenever the job resumed from an earlier one."""
    tops = [top for _, top in progress(events)]
    return sum(max(0, before - after) for before, after in zip(tops, tops[1:], strict=False))


def _advances(steps: Sequence[tuple[float, int]]) -> list[float]:
    """Return the times at which the job got further than ever before."""
    found, most = [], 0
    for time, step in steps:
        if step > most:
            most = step
            found.append(time)
    return found


def measure(
    events: Mapping[int, Sequence[Event]],
    *,
    began: float,
    tokens: int,
    assignments: int,
    sent_bytes: int | None,
    peak_memory_bytes: int,
) -> Outcome:
    """Compute the figures of a run.

    Args:
        events: events of each worker, and of the controller.
        began: start time of the first process.
        tokens: tokens of a step.
        assignments: assignments of a step's tokens to experts, over all MoE layers.
        sent_bytes: bytes sent over the network.
        peak_memory_bytes: peak memory of all processes together.
    """
    rows, steps = in_order(events), progress(events)
    first = next((event["time"] for event in rows if event["event"] == "begin"), began)
    done, end = steps[-1][::-1] if steps else (0, first)
    again = lost_steps(events)
    rolled_back = {
        (event["step"], unit): lost
        for event in rows
        if event["event"] == "recovered"
        for unit, lost in event.get("lost_tokens", {}).items()
    }
    times = [first, *_advances(steps)]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    return Outcome(
        steps=done,
        seconds=end - first,
        startup_seconds=first - began,
        step_seconds=statistics.median(gaps) if gaps else 0.0,
        tokens_per_second=done * tokens / (end - first) if end > first else 0.0,
        lost_steps=again,
        lost_tokens=again * assignments + sum(rolled_back.values()),
        plt=max((event.get("plt", 0.0) for event in rows if event["event"] == "recovered"), default=0.0),
        longest_stall=max(gaps, default=0.0),
        final_loss=next((event["loss"] for event in rows if event["event"] == "final"), None),
        kills=sum(event["event"] == "killed" for event in rows),
        joins=sum(event["event"] == "joining" for event in rows),
        sent_bytes=sent_bytes,
        peak_memory_bytes=peak_memory_bytes,
    )
