"""Picture of a comparison: steps over time of each candidate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw steps over seconds since the start of the processes, to a PNG or SVG file; kills are crosses.

    Args:
        found: by the candidate's title: `progress`, pairs of seconds and steps, and `kills`, seconds.
        path: path of the file.
    """
    figure = Figure(figsize=(9, 6), layout="constrained")
    axis = figure.subplots()
    for title, each in found.items():
        seconds, steps = zip(*each["progress"], strict=True) if each["progress"] else ((), ())
        (line,) = axis.step(seconds, steps, where="post", label=title)
        for kill in each["kills"]:
            done = max((step for at, step in each["progress"] if at <= kill), default=0)
            axis.plot([kill], [done], marker="x", color=line.get_color(), linestyle="")
    axis.set_xlabel("seconds since the processes were started; × is a kill")
    axis.set_ylabel("steps in the job's state")
    axis.set_ylim(bottom=0)
    axis.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
