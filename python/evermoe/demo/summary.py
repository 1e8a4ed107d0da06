"""The verdict on a run, from the workers' events. Pure: event lists in, plain numbers out.

An *episode* lasts from a kill to the next step that all survivors have applied; kills in between belong to it. Its
phases are detect, agree, rebuild, fetch, verify and repeat (of the interrupted step), each the longest of any
survivor.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]
PHASES = ("detect", "agree", "rebuild", "fetch", "verify", "repeat")


@dataclass
class Episode:
    """One failure and its recovery: from the kill until the repeated step is applied, after all have voted on it.

    The `commit` of that step may come one vote later, when its copies are complete.
    """

    killed: list[int]
    step: int
    started: float
    seconds: dict[str, float] = field(default_factory=dict)
    total_seconds: float = 0.0
    fetched_bytes: int = 0
    fetched_units: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    members: int = 0


def commits(events: Mapping[int, Sequence[Event]]) -> dict[int, Event]:
    """Return for each step the earliest commit event of any worker."""
    first: dict[int, Event] = {}
    for rows in events.values():
        for event in rows:
            if event["event"] == "commit":
                known = first.get(event["step"])
                if known is None or event["time"] < known["time"]:
                    first[event["step"]] = event
    return dict(sorted(first.items()))


def lost_steps(events: Mapping[int, Sequence[Event]], steps: int) -> int:
    """Count steps of 0 … steps−1 that no worker committed, plus steps that a worker committed again."""
    lost = len(set(range(steps)) - set(commits(events)))
    for rows in events.values():
        numbers = [event["step"] for event in rows if event["event"] == "commit"]
        lost += len(numbers) - len(set(numbers))
    return lost


def episodes(events: Mapping[int, Sequence[Event]]) -> list[Episode]:
    """Return the failures in order of time."""
    kills = sorted(
        (event["time"], worker, event["step"])
        for worker, rows in events.items()
        for event in rows
        if event["event"] == "killed"
    )
    dead = {worker for _, worker, _ in kills}
    found: list[Episode] = []
    for when, worker, step in kills:
        if found and when < found[-1].started + found[-1].total_seconds:
            found[-1].killed.append(worker)
            continue
        episode = Episode([worker], step, when)
        _measure(episode, {w: rows for w, rows in events.items() if w not in dead})
        found.append(episode)
    return found


def _measure(episode: Episode, survivors: Mapping[int, Sequence[Event]]) -> None:
    for rows in survivors.values():
        if not any(event["event"] == "begin" and event["time"] <= episode.started for event in rows):
            continue  # joined after this failure
        phase, since = "detect", episode.started
        spent: dict[str, float] = {}
        for event in rows:
            if event["time"] <= episode.started:
                continue
            name = event["event"]
            following = {"connection_lost": "agree", "phase": event.get("phase"), "recovered": "repeat"}.get(name)
            if name == "phase" and phase == "repeat":
                continue  # members were asked for while the step was not committed yet
            if following is not None:
                spent[phase] = spent.get(phase, 0.0) + event["time"] - since
                phase, since = str(following), event["time"]
            if name == "recovered":
                episode.fetched_bytes += event["fetched_bytes"]
                episode.fetched_units += event["fetched_units"]
                episode.members = event["members"]
                for source, count in event["sources"].items():
                    episode.sources[source] = episode.sources.get(source, 0) + count
            if name in ("update", "skipped") and phase == "repeat":
                spent[phase] = spent.get(phase, 0.0) + event["time"] - since
                episode.total_seconds = max(episode.total_seconds, event["time"] - episode.started)
                break
        for key, value in spent.items():
            episode.seconds[key] = max(episode.seconds.get(key, 0.0), value)


def step_seconds(events: Mapping[int, Sequence[Event]]) -> list[float]:
    """Return the seconds of each step before the first change of members, without the first three (warm-up)."""
    rows = list(commits(events).values())
    first = rows[0]["members"] if rows else 0
    kills = [event["time"] for all_rows in events.values() for event in all_rows if event["event"] == "killed"]
    end = min(kills, default=float("inf"))
    times = [event["time"] for event in rows if event["members"] == first and event["time"] <= end]
    return [after - before for before, after in zip(times[3:], times[4:], strict=False)]


def copy_seconds(events: Mapping[int, Sequence[Event]]) -> list[float]:
    """Return the seconds for which the training thread waited for the copies of each step, over all workers."""
    spent = []
    for rows in events.values():
        started = None
        for event in rows:
            if event["event"] == "send":
                started = event["time"]
            elif event["event"] == "vote" and started is not None:
                spent.append(event["time"] - started)
                started = None
    return spent


def messages(events: Mapping[int, Sequence[Event]]) -> dict[str, int]:
    """Count messages of snapshots by when they began, over all workers: see `evermoe.events.ChunkSent`."""
    return Counter(event["when"] for rows in events.values() for event in rows if event["event"] == "chunk_sent")


def in_windows(messages: Mapping[str, int]) -> float | None:
    """Return the share sent in idle windows; None if none were sent. Messages of recoveries do not count.

    >>> in_windows({"window": 9, "vote": 1, "recovery": 20})
    0.9
    """
    counted = sum(count for when, count in messages.items() if when != "recovery")
    return messages.get("window", 0) / counted if counted else None


def routed(events: Mapping[int, Sequence[Event]]) -> dict[int, dict[str, list[int]]]:
    """Return for each committed step the tokens of each expert by layer, as counted by the routers of all workers."""
    found: dict[int, dict[str, list[int]]] = {}
    for step, commit in commits(events).items():
        for rows in events.values():
            for event in rows:
                if event["event"] == "routed" and (event["step"], event["generation"]) == (step, commit["generation"]):
                    for layer, counts in event["counts"].items():
                        known = found.setdefault(step, {}).setdefault(layer, [0] * len(counts))
                        found[step][layer] = [a + b for a, b in zip(known, counts, strict=True)]
    return found


def count_lost(counts: Mapping[int, Mapping[str, Sequence[int]]], recoveries: Sequence[Event]) -> list[dict[str, int]]:
    """Return by recovery the tokens of each expert in the steps that it discarded, and no earlier one had, from
    `routed`."""
    gone: dict[str, int] = {}
    found = []
    for event in recoveries:
        lost = {}
        for unit, since in event["stale"].items():
            layer, expert = unit.rsplit(".experts.", 1)
            steps = range(max(since, gone.get(unit, 0)), event["step"])
            lost[unit] = sum(counts[step][layer][int(expert)] for step in steps if step in counts)
            gone[unit] = event["step"]
        found.append(lost)
    return found


def portion_lost(counts: Mapping[int, Mapping[str, Sequence[int]]], recoveries: Sequence[Event]) -> float:
    """Return the PLT of all these recoveries: tokens lost over tokens routed until the last one, averaged over
    layers."""
    if not recoveries:
        return 0.0
    until = recoveries[-1]["step"]
    seen: dict[str, int] = {}
    for step, layers in counts.items():
        for layer, tokens_E in layers.items() if step < until else ():
            seen[layer] = seen.get(layer, 0) + sum(tokens_E)
    lost = dict.fromkeys(seen, 0)
    for each in count_lost(counts, recoveries):
        for unit, tokens in each.items():
            lost[unit.rsplit(".experts.", 1)[0]] += tokens
    return statistics.fmean(lost[layer] / seen[layer] for layer in seen)


def _rolled_back(recovery: Event) -> dict[str, int]:
    """Return the number of experts that went back in a recovery, and by how many steps."""
    ages = [recovery["step"] - step for step in recovery["stale"].values()]
    return {"step": recovery["step"], "experts": len(ages), "fewest_steps": min(ages), "most_steps": max(ages)}


def _compared(done: Mapping[int, Event], without: Mapping[int, Event], edge: int) -> dict[str, Any]:
    """Return the losses of a run without failures, their noise, and the largest difference of any step."""
    last = [event["loss"] for event in without.values()][-edge:]
    return {
        "loss_without_failures": statistics.fmean(last) if last else None,
        "loss_noise": 3 * statistics.stdev(last) if len(last) > 1 else None,
        "loss_difference": max(
            (abs(done[at]["loss"] - without[at]["loss"]) for at in done if at in without), default=None
        ),
    }


def _lost_tokens(events: Mapping[int, Sequence[Event]]) -> dict[str, Any]:
    """Return the tokens that a partial preset has lost, as the session and as the routers count them."""
    counts = routed(events)
    recoveries = {}
    for rows in events.values():
        for event in rows:
            if event["event"] == "recovered" and event["stale"]:
                recoveries[event["step"], tuple(sorted(event["stale"].items()))] = event
    found = sorted(recoveries.values(), key=lambda event: (event["step"], event["time"]))
    return {
        "lost_tokens": sum(sum(event["lost_tokens"].values()) for event in found),
        "rolled_back": [_rolled_back(event) for event in found],
        "plt": found[-1]["plt"] if found else 0.0,
        "plt_counted": portion_lost(counts, found),
        "counts_agree": [event["lost_tokens"] for event in found] == count_lost(counts, found),
    }


def summarise(
    events: Mapping[int, Sequence[Event]],
    baseline: Mapping[int, Sequence[Event]] | None,
    steps: int,
    *,
    is_partial: bool = False,
) -> dict[str, Any]:
    """Return the report of the demo, JSON-able; `ok` and `problems` are its verdict.

    `is_partial`: the preset may lose tokens; the workers then count what the routers choose.
    """
    done = commits(events)
    losses = [event["loss"] for event in done.values()]
    recoveries = [event for rows in events.values() for event in rows if event["event"] == "recovered"]
    verified = [event for rows in events.values() for event in rows if event["event"] == "verified"]
    edge = max(1, min(5, len(losses) // 4))
    seconds = step_seconds(events)
    result: dict[str, Any] = {
        "steps": steps,
        "steps_committed": len(done),
        "steps_lost": lost_steps(events, steps) + max((event["steps_lost"] for event in recoveries), default=0),
        "loss_first": statistics.fmean(losses[:edge]) if losses else None,
        "loss_last": statistics.fmean(losses[-edge:]) if losses else None,
        "digests_checked": sum(event["digests_checked"] for event in [*recoveries, *verified]),
        "digests_mismatched": sum(event["digests_mismatched"] for event in [*recoveries, *verified]),
        "verified_at_end": bool(verified),
        "fetched_bytes": sum(event["fetched_bytes"] for event in recoveries),
        "episodes": [vars(episode) for episode in episodes(events)],
        "step_seconds": statistics.median(seconds) if seconds else None,
        "copy_seconds": statistics.median(copy_seconds(events) or [0.0]),
        "messages": messages(events),
        "lost_tokens": 0,
    }
    result["messages_in_windows"] = in_windows(result["messages"])
    if is_partial:
        result |= _lost_tokens(events)
    result |= _compared(done, commits(baseline) if baseline else {}, edge)
    result["problems"] = _problems(result)
    result["ok"] = not result["problems"]
    return result


def _problems(result: Mapping[str, Any]) -> list[str]:
    problems = []
    if result["steps_lost"]:
        problems.append(f"{result['steps_lost']} steps were lost or committed twice")
    if result["digests_mismatched"]:
        problems.append(f"{result['digests_mismatched']} digests did not match")
    if not result["verified_at_end"]:
        problems.append("no worker verified the copies at the end")
    differ = abs(result.get("plt_counted", 0.0) - result.get("plt", 0.0)) > 1e-12
    if differ or not result.get("counts_agree", True):
        problems.append(f"the session reports PLT {result['plt']}, the routers have counted {result['plt_counted']}")
    first, last = result["loss_first"], result["loss_last"]
    noise = result.get("loss_noise")
    if noise is not None and last is not None and last > result["loss_without_failures"] + noise:
        problems.append(
            f"the loss {last:.3f} is above that of a run without failures by more than its noise {noise:.3f}"
        )
    if first is None or not last < first:
        problems.append(f"the loss did not fall: {first} → {last}")
    for episode in result["episodes"]:
        if not episode["total_seconds"]:
            problems.append(f"no survivor applied a step after the kill of worker {episode['killed']}")
    return problems
