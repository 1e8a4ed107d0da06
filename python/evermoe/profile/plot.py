"""Picture of a trace: compute, network, windows and copies of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from evermoe.profile.plotting import BLUE, GREEN, GREY, PALE, RED

TRACE_STEPS = 3
"""Number of last steps of a trace that are drawn."""
TRACKS = ("compute", "network", "windows", "copies")
COLOURS = {"forward": "#7fb0e0", "backward": BLUE, "optimizer": "#1b3f66"}


def plot_trace(trace: Mapping[str, Any], path: Path) -> None:
    """Draw the last steps of a trace to a PNG or SVG: compute, network, windows and copies of each rank.

    Args:
        trace: a trace of `evermoe trace`; without optimizers in it, all of it is drawn.
        path: path of the file; its suffix selects the format.

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
    """Return row and colour of an event; no row if it is not drawn."""
    kind, track = event["cat"], event["tid"] // 1000
    if kind == "window":
        return (2 if track == 4 else None), PALE
    if kind == "copy":
        return 3, RED if event["args"]["window"] is None else GREEN
    if track == 1:
        return 1, GREY
    return (0 if track == 0 else None), COLOURS.get(kind, BLUE)
