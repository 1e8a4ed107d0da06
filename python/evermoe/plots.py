"""Pictures: the demo's loss, throughput, members and expert load over time; a plan's survival and imbalance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import IO, Any

import numpy as np
from matplotlib.figure import Figure

from evermoe.demo.summary import Event, commits, episodes
from evermoe.plan.compare import Comparison

RED, BLUE, GREY = "#c0392b", "#2c6fbb", "#7f8c8d"
GREEN, PALE = "#27874f", "#cfe8d5"
TRACE_STEPS = 3
"""Of a trace, the last steps that are drawn."""
TRACKS = ("compute", "network", "windows", "copies")
COLOURS = {"forward": "#7fb0e0", "backward": BLUE, "optimizer": "#1b3f66"}


def plot_run(events: Mapping[int, Sequence[Event]], tokens_per_step: int, path: Path) -> None:
    """Draws one run of the demo to a PNG. Kills are red lines, the shaded part lasts until the next committed step."""
    rows = list(commits(events).values())
    start = min(event["time"] for all_rows in events.values() for event in all_rows if event["event"] == "begin")
    times = np.array([event["time"] - start for event in rows])
    figure = Figure(figsize=(9, 10), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True)
    axes[0].plot(times, [event["loss"] for event in rows], color=BLUE)
    axes[0].set_ylabel("loss")
    axes[1].step(times[1:], tokens_per_step / np.diff(times), where="pre", color=BLUE)
    axes[1].set_ylabel("tokens/s")
    axes[1].set_ylim(bottom=0)
    axes[2].step(times, [event["members"] for event in rows], where="post", color=BLUE)
    axes[2].set_ylabel("members")
    axes[2].set_ylim(bottom=0)
    _plot_load(axes[3], times, rows)
    for axis in axes:
        _mark(axis, events, start)
    axes[-1].set_xlabel("seconds")
    axes[0].set_title("evermoe demo: one run, its failures and joins")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")


def _plot_load(axis: Any, times: np.ndarray, rows: Sequence[Event]) -> None:
    load_SE = np.array([event["load"] for event in rows], dtype=float)
    share = load_SE / load_SE.sum(1, keepdims=True)
    axis.stackplot(times, share.T, linewidth=0, labels=[f"{e}" for e in range(share.shape[1])])
    axis.set_ylabel("share of tokens per\nexpert, first MoE layer")
    axis.set_ylim(0, 1)


def _mark(axis: Any, events: Mapping[int, Sequence[Event]], start: float) -> None:
    for episode in episodes(events):
        since = episode.started - start
        axis.axvspan(since, since + episode.total_seconds, color=RED, alpha=0.15, linewidth=0)
        axis.axvline(since, color=RED, linewidth=1.2)
        if axis.get_ylabel() == "members":
            names = ", ".join(str(worker) for worker in episode.killed)
            axis.annotate(f"kill {names}", (since, 0.2), color=RED, rotation=90, ha="right")
    for rows in events.values():
        joins = [event for event in rows if event["event"] == "joining"]
        for event in joins:
            axis.axvline(event["time"] - start, color=GREY, linewidth=1.2, linestyle="--")
            if axis.get_ylabel() == "members":
                axis.annotate("join", (event["time"] - start, 0.2), color=GREY, rotation=90, ha="right")


def plot_plan(comparison: Comparison, file: IO[bytes]) -> None:
    """Draws what `evermoe plan` compared to a PNG: survival by number of losses, imbalance by policy."""
    results, unit = comparison.results, comparison.cluster.unit
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for result, style in zip(results, cycle(("o-", "s--", "^:", "x-.", "d-")), strict=False):
        survival = [100 * survival.probability for survival in result.survival]
        left.plot(comparison.cluster.failures, survival, style, label=result.policy, alpha=0.8)
    left.set_xticks(comparison.cluster.failures)
    left.set_xlabel(f"{unit}s lost at once")
    left.set_ylabel("whole model survives, %")
    left.set_ylim(-3, 103)
    left.legend()
    places = np.arange(len(results))
    right.bar(places - 0.2, [max(result.even) for result in results], 0.4, color=GREY, label="even split")
    right.bar(places + 0.2, [max(result.balanced) for result in results], 0.4, color=BLUE, label="balanced split")
    right.axhline(1, color=RED, linewidth=1)
    right.set_xticks(places, [result.policy for result in results])
    right.set_ylabel("busiest node ÷ mean, worst layer")
    right.legend()
    figure.savefig(file, dpi=110, format="png")


def plot_trace(trace: Mapping[str, Any], path: Path) -> None:
    """Draws the last steps of a trace to a PNG or SVG: of each rank compute, network, its windows, and copies.

    Args:
        trace: what `evermoe trace` writes; with optimizers in it, or else all of it is drawn.
        path: its suffix says which.

    Raises:
        ValueError: the trace has no events, or the file cannot be written.
    """
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    if not events:
        raise ValueError("the trace has no events to draw")
    begin, end = _last_steps(events)
    ranks = sorted({event["pid"] for event in events})
    figure = Figure(figsize=(11, 0.7 + 1.25 * len(ranks)), layout="constrained")
    for axis, rank in zip(figure.subplots(len(ranks), 1, sharex=True, squeeze=False)[:, 0], ranks, strict=True):
        shown = [e for e in events if e["pid"] == rank and e["ts"] + e["dur"] > begin and e["ts"] < end]
        for event in sorted(shown, key=lambda each: -each["dur"]):
            row, colour = _place(event)
            if row is not None:
                start, width = (event["ts"] - begin) / 1e3, max(event["dur"], (end - begin) / 1500) / 1e3
                axis.broken_barh([(start, width)], (-row - 0.4, 0.8), color=colour, linewidth=0)
        axis.set_yticks([-row for row in range(len(TRACKS))], TRACKS)
        axis.set_ylabel(f"rank {rank}")
        axis.set_xlim(0, (end - begin) / 1e3)
    axis.set_xlabel("milliseconds; copies that training waited for are red")
    try:
        figure.savefig(path, dpi=100)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written; {error}") from None


def _last_steps(events: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    first = min(event["pid"] for event in events)
    updates = sorted(e["ts"] + e["dur"] for e in events if e["cat"] == "optimizer" and e["pid"] == first)
    if len(updates) > TRACE_STEPS:
        return updates[-1 - TRACE_STEPS], updates[-1]
    return min(event["ts"] for event in events), max(event["ts"] + event["dur"] for event in events)


def _place(event: Mapping[str, Any]) -> tuple[int | None, str]:
    """Row and colour of an event; no row if it is not drawn."""
    kind, track = event["cat"], event["tid"] // 1000
    if kind == "window":
        return (2 if track == 4 else None), PALE
    if kind == "copy":
        return 3, RED if event["args"]["window"] is None else GREEN
    if track == 1:
        return 1, GREY
    return (0 if track == 0 else None), COLOURS.get(kind, BLUE)
