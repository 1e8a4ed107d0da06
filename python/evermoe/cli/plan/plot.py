"""Picture of a plan: survival and imbalance by policy."""

from __future__ import annotations

from itertools import cycle
from typing import IO

import numpy as np
from matplotlib.figure import Figure

from evermoe.cli.plan.compare import Comparison
from evermoe.profile.plotting import BLUE, GREY, RED


def plot_plan(comparison: Comparison, file: IO[bytes]) -> None:
    """Draw the results of `evermoe plan` to a PNG: survival by number of losses, imbalance by policy."""
    results, unit = comparison.results, comparison.cluster.unit
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for result, style in zip(results, cycle(("o-", "s--", "^:", "x-.", "d-")), strict=False):
        survival = [100 * survival.probability for survival in result.survival]
        left.plot(comparison.cluster.failures, survival, style, label=result.policy, alpha=0.8)
    left.set_xticks(comparison.cluster.failures)
    left.set_xlabel(f"{unit}s lost at once")
    left.set_ylabel("all experts survive, %")
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
