"""Picture of one run of the demo: loss, throughput and a lane per worker on one time axis."""

from __future__ import annotations

from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from evermoe.demo.timeline import WINDOW_STEPS, Timeline
from evermoe.options import count
from evermoe.profile.plotting import BLUE, GREEN, GREY, ORANGE, RED

COLOURS = {"training": GREEN, "recovering": ORANGE, "joining": BLUE}
"""Colour of each state of a worker."""
MARKS = {"kill": (RED, "-"), "recovered": (GREEN, ":"), "join": (BLUE, "--")}
"""Colour and style of a mark's line, by its kind."""
BLANK = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
"""Box behind a text that lines cross."""
WITHOUT = "the same steps of a run without failures"
MEANINGS = {"training": "trains", "recovering": "recovers", "joining": "new worker joins: all workers meet"}


def plot_run(run: Timeline, path: Path, title: str) -> None:
    """Draw one run of the demo to a PNG."""
    lanes = 0.28 * len(run.lanes) + 0.5
    figure = Figure(figsize=(9.5, 4.9 + lanes), layout="constrained")
    loss, throughput, workers = figure.subplots(3, 1, sharex=True, height_ratios=[2.3, 1.5, lanes])
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    _plot_loss(loss, run)
    _plot_throughput(throughput, run)
    _plot_lanes(workers, run)
    for axis in (loss, throughput, workers):
        axis.spines[["top", "right"]].set_visible(False)
        for start, end in run.outages:
            axis.axvspan(start, end, color=RED, alpha=0.1, linewidth=0, zorder=0)
        for mark in run.marks:
            colour, style = MARKS[mark.kind]
            axis.axvline(mark.time, color=colour, linestyle=style, linewidth=1.1, zorder=1)
    _label_marks(loss, run)
    workers.set_xlabel("seconds since the first step")
    workers.set_xlim(0, run.end * 1.005)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")


def _plot_loss(axis: Any, run: Timeline) -> None:
    without = run.losses_without_failures
    if without:
        axis.plot(run.times[: len(without)], without, color=GREY, linewidth=5, alpha=0.45, label=WITHOUT)
    axis.plot(run.times, run.losses, color=BLUE, linewidth=1.6, label="this run")
    axis.set_ylabel("loss")
    axis.legend(edgecolor="none", framealpha=1.0, loc="upper right")


def _plot_throughput(axis: Any, run: Timeline) -> None:
    if run.rates:
        times, rates = zip(*run.rates, strict=True)
        axis.plot(times, rates, color=BLUE, linewidth=1.6)
        axis.fill_between(times, rates, color=BLUE, alpha=0.12, linewidth=0)
    axis.set_ylabel(f"tokens/s, mean\nof {WINDOW_STEPS} steps")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:,.0f}")


def _plot_lanes(axis: Any, run: Timeline) -> None:
    for worker, lane in run.lanes.items():
        for span in lane:
            axis.barh(
                worker, span.end - span.start, left=span.start, height=0.62, color=COLOURS[span.state], linewidth=0
            )
        if worker in run.deaths:
            at = run.deaths[worker]
            axis.plot([at, run.end], [worker, worker], color=GREY, linewidth=0.8, linestyle=":")
            axis.plot(at, worker, marker="X", color=RED, markersize=9, markeredgecolor="white", zorder=3, clip_on=False)
            axis.annotate(
                "dead",
                (run.end, worker),
                (-4, 0),
                textcoords="offset points",
                color=RED,
                va="center",
                ha="right",
                bbox=BLANK,
            )
    axis.set_yticks(list(run.lanes), [f"worker {worker}" for worker in run.lanes])
    axis.set_ylim(max(run.lanes) + 0.5, -1.1)
    axis.tick_params(axis="y", length=0)
    _label_members(axis, run)
    shown = {span.state for lane in run.lanes.values() for span in lane}
    patches: list[Any] = [Patch(color=COLOURS[each], label=MEANINGS[each]) for each in COLOURS if each in shown]
    if run.deaths:
        cross: dict[str, Any] = {"marker": "X", "markersize": 9, "markeredgecolor": "white"}
        patches.append(Line2D([], [], color=RED, linestyle="", label="SIGKILL, memory of its node removed", **cross))
    axis.figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False)


def _label_members(axis: Any, run: Timeline) -> None:
    """Write the number of members above the lanes, for each period between two changes."""
    ends = sorted({end for lane in run.lanes.values() for span in lane for end in (span.start, span.end)} | {run.end})
    stretches = [((start + end) / 2, start, end) for start, end in pairwise(ends)]
    for members, group in groupby(stretches, key=lambda each: run.members(each[0])):
        parts = list(group)
        start, end = parts[0][1], parts[-1][2]
        if end - start > 0.08 * run.end:
            axis.text((start + end) / 2, -0.8, count(members, "member"), ha="center", va="center", bbox=BLANK)


def _label_marks(axis: Any, run: Timeline) -> None:
    """Label each mark once, above the top panel; labels of near marks stack."""
    level, last = 0, float("-inf")
    for mark in sorted(run.marks, key=lambda each: each.time):
        level = level + 1 if mark.time - last < 0.2 * run.end else 0
        last = mark.time
        axis.annotate(
            mark.label,
            (mark.time, 1.0),
            (3, 3 + 13 * level),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color=MARKS[mark.kind][0],
            annotation_clip=False,
        )
