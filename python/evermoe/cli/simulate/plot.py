"""The picture that `evermoe simulate` draws: time by cause, and goodput, of each preset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import IO

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from evermoe.profile.plotting import BLUE, GREY
from evermoe.simulate import Sample


def plot_outcomes(samples: Sequence[Sample], file: IO[bytes]) -> None:
    """Draw a PNG with two bars for each preset: its time, divided by cause, and its goodput with its interval."""
    names = [sample.scheme for sample in samples]
    by_cause = [sample.seconds_by_cause() for sample in samples]
    causes = list(dict.fromkeys(cause for seconds in by_cause for cause in seconds))
    figure = Figure(figsize=(11, 1.5 + 0.5 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    places, starts = np.arange(len(names)), np.zeros(len(names))
    totals = np.array([sum(seconds.values()) for seconds in by_cause])
    for number, cause in enumerate(causes):
        parts = 100 * np.array([seconds.get(cause, 0.0) for seconds in by_cause]) / totals
        colour = BLUE if cause == "train" else colormaps["tab20"](number % 20)
        left.barh(places, parts, left=starts, color=colour, label=cause)
        starts += parts
    left.set_yticks(places, names)
    left.invert_yaxis()
    left.set_xlabel("time by cause, %")
    left.legend(ncols=5, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
    goodput = [sample.interval("goodput") for sample in samples]
    halves = [100 * each.half if math.isfinite(each.half) else 0.0 for each in goodput]
    right.barh(places, [100 * each.mean for each in goodput], xerr=halves, color=GREY)
    right.set_xlabel("goodput, % of no failures")
    figure.savefig(file, dpi=110, format="png")
