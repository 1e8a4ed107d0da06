"""A picture of one run of the demo: loss, throughput, members and expert load over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from evermoe.demo.summary import Event, commits, episodes
from evermoe.plotting import BLUE, GREY, RED


def plot_run(events: Mapping[int, Sequence[Event]], tokens_per_step: int, path: Path) -> None:
    """Draws one run of the demo to a PNG. Kills are red lines, the shaded part lasts until the next step is taken."""
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
