"""The output of `evermoe simulate`: a table with a row per preset, and a sentence on the best one's lost time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from evermoe.simulate import Sample, Scenario

WAITS = ("detect", "agree", "rebuild", "survey", "fetch", "verify", "protect")
"""Phases of a recovery, among the causes of lost time."""


def show_outcomes(console: Console, scenario: Scenario, samples: Sequence[Sample]) -> None:
    """Print the scenario, a table with a row for each preset, and the main causes of the best one's lost time."""
    workload = scenario.workload
    seeds = len(samples[0].outcomes)
    spares = f" and {scenario.spares} spare" if scenario.spares else ""
    console.print(
        f"{workload.name}: {workload.parameters / 1e9:.4g} billion parameters on {scenario.nodes:,} nodes{spares}, "
        f"{scenario.days:g} days × {seeds} {'seed' if seeds == 1 else 'seeds'}; costs {scenario.constants.source}",
        soft_wrap=True,
        markup=False,
    )
    console.print(_table(samples))
    if missing := missing_copies(scenario, samples):
        console.print(missing, soft_wrap=True, markup=False)
    best = max(samples, key=lambda sample: sample.interval("goodput").mean)
    console.print(_limits(best), soft_wrap=True, markup=False)


def _table(samples: Sequence[Sample]) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("\npreset", no_wrap=True)
    for name in (
        "\nETTR",
        "good-\nput",
        "steps\nrepeated",
        "tokens\nlost",
        "lost\nnodes",
        "mean re-\ncovery",
        "GB sent\na step",
        "GB of\na node",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    best = max(sample.interval("ettr").mean for sample in samples)
    for sample in samples:
        ettr = sample.interval("ettr")
        style = "bold" if ettr.mean == best else None
        table.add_row(sample.scheme, *_row(sample), style=style)
    return table


def _row(sample: Sample) -> list[str]:
    def mean(name: str) -> float:
        return sample.interval(name).mean

    recoveries = [seconds for each in sample.outcomes for seconds in each.recovery_seconds]
    steps = max(mean("steps"), 1.0)
    return [
        percent(mean("ettr"), sample.interval("ettr").half),
        f"{mean('goodput'):.1%}",
        f"{mean('undone_steps') + mean('interrupted_steps'):,.0f}",
        f"{mean('plt'):.2%}" if mean("plt") else "-",
        f"{mean('losses'):,.0f}",
        f"{statistics.fmean(recoveries):.1f} s" if recoveries else "-",
        f"{mean('copy_bytes') / steps / 1e9:.3g}" if mean("copy_bytes") else "-",
        f"{mean('memory_bytes') / 1e9:.3g}" if mean("memory_bytes") else "-",
    ]


def missing_copies(scenario: Scenario, samples: Sequence[Sample]) -> str:
    """Return a note on the presets whose copies do not fit into the nodes' host memory; empty if all fit."""
    most = {sample.scheme: max(outcome.missing_copy_bytes for outcome in sample.outcomes) for sample in samples}
    lacking = ", ".join(f"{scheme} lacks {gigabytes(missing)}" for scheme, missing in most.items() if missing)
    if not lacking:
        return ""
    return (
        f"Not all copies fit into the {gigabytes(scenario.host_bytes)} of host memory that each node has free "
        f"(host_bytes in the file of --cluster). Over all nodes {lacking}. State without a copy returns to a "
        "checkpoint if all nodes that train it fail."
    )


def gigabytes(nbytes: float) -> str:
    """Format a size in gigabytes, with at least two significant digits.

    >>> gigabytes(1.55e9), gigabytes(1.2345e12)
    ('1.6 GB', '1,234 GB')
    """
    return f"{nbytes / 1e9:,.0f} GB" if nbytes >= 9.95e9 else f"{nbytes / 1e9:.2g} GB"


def percent(part: float, half: float) -> str:
    """Format a fraction and half the width of its confidence interval as a percentage; infinity: no interval.

    >>> percent(0.9876, 0.0042), percent(0.9876, float("inf"))
    ('98.8±0.4%', '98.8%')
    """
    return f"{100 * part:.1f}±{100 * half:.1f}%" if math.isfinite(half) else f"{part:.1%}"


def _limits(sample: Sample) -> str:
    seconds = sample.seconds_by_cause()
    total = sum(seconds.values())
    lost = sorted(((spent, cause) for cause, spent in seconds.items() if cause != "train"), reverse=True)
    if not lost:
        return f"{sample.scheme} loses no time."
    parts = ", ".join(f"{cause} {spent / total:.2%}" for spent, cause in lost[:4])
    recoveries = sum(spent for spent, cause in lost if cause in WAITS)
    return (
        f"{sample.scheme} has the most goodput. Its lost time: {parts}; recoveries together {recoveries / total:.2%}."
    )
