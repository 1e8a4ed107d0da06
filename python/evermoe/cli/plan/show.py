"""Report of `evermoe plan` as text."""

from __future__ import annotations

import math
import textwrap

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evermoe.cli.plan.advice import advise, best, percent, survived, worst
from evermoe.cli.plan.compare import Comparison, Result

MAX_COLUMNS = 4
"""Largest count of numbers of failures in the table, which fits in 100 columns; the chart shows all."""
BAR = 40
"""Characters of a bar of 100 %."""


def show(console: Console, source: str, comparison: Comparison) -> None:
    """Print load, replicas, table, chart and advice."""
    for name, text in _facts(source, comparison):
        print_wrapped(console, f"{name:10}", text)
    console.print(_table(comparison))
    print_wrapped(console, "", _legend(comparison))
    console.print()
    _show_chart(console, comparison)
    for number, sentence in enumerate(advise(comparison)):
        print_wrapped(console, " " * 10 if number else "advice    ", sentence)


def print_wrapped(console: Console, head: str, text: str) -> None:
    """Print a text next to its heading, wrapped to the width."""
    lines = textwrap.fill(
        text, console.width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )
    console.print(Text(lines), soft_wrap=True)


def _facts(source: str, comparison: Comparison) -> list[tuple[str, str]]:
    cluster, load, replicas_LE = comparison.cluster, comparison.load, comparison.replicas
    layers, experts = replicas_LE.shape
    domains = "" if cluster.domain_size == 1 else f" in {len(cluster.domains)} domains of {cluster.domain_size}"
    needed = cluster.slots_for(experts, cluster.min_replicas)
    lowered = f"lowered to {replicas_LE.min()}; {needed} slots per node would be enough"
    held = [f"{(replicas_LE == count).sum():,} × {count}" for count in (1, 2, 3)]
    return [
        (
            "cluster",
            f"{cluster.nodes} nodes{domains} × {cluster.slots} slots = {cluster.nodes * cluster.slots} for {experts} "
            f"experts; min_replicas {cluster.min_replicas}: {'fits' if needed <= cluster.slots else lowered}",
        ),
        (
            "load",
            f"{source}, {layers} layer{'s' * (layers > 1)}; hottest expert {percent(load.hottest_share)} of its "
            f"layer's tokens (expert {load.hottest_expert} of layer {load.hottest_layer}; mean over layers "
            f"{percent(load.mean_share)}), top 2 together {percent(load.top2_share)}",
        ),
        (
            "replicas",
            f"min {replicas_LE.min()}, median {np.median(replicas_LE):g}, max {replicas_LE.max()}; experts × replicas: "
            f"{', '.join(held)}, {(replicas_LE > 3).sum():,} × 4 or more",
        ),
    ]


def _table(comparison: Comparison) -> Table:
    cluster = comparison.cluster
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("\npolicy", no_wrap=True)
    names = ["even\nmean", "even\nworst", "balanced\nworst", f"fewest\n{cluster.unit}s"]
    names += [f"survives\n{failures} lost" for failures in cluster.failures[:MAX_COLUMNS]]
    for name in (*names, "plan, ms\na layer"):
        table.add_column(name, justify="right", no_wrap=True)
    chosen, _ = best(comparison)
    for result in comparison.results:
        table.add_row(
            result.policy,
            f"{np.mean(result.even):.2f}",
            f"{max(result.even):.2f}",
            f"{worst(result):.2f}",
            str(result.distinct),
            *[survived(survival) for survival in result.survival[:MAX_COLUMNS]],
            f"{result.seconds * 1000:.2f}",
            style="bold" if result is chosen else None,
        )
    return table


def _legend(comparison: Comparison) -> str:
    unit = comparison.cluster.unit
    return (
        "even, balanced: load of the busiest node over the mean, if the replicas of an expert share its tokens evenly, "
        f"or in the best proportions; mean over layers, worst layer. fewest: least {unit}s that hold any expert. "
        f"survives: probability that every expert of all layers survives that number of failed {unit}s; exact unless ±."
    )


def _show_chart(console: Console, comparison: Comparison) -> None:
    full, empty = ("#", ".") if console.options.ascii_only else ("█", "·")
    width = max(len(result.policy) for result in comparison.results)
    for index, failures in enumerate(comparison.cluster.failures):
        unit = comparison.cluster.unit + "s" * (failures > 1)
        console.print(f"[bold]survival when {failures} {unit} fail{'s' * (failures == 1)}[/]")
        for result in comparison.results:
            console.print(Text(f"  {result.policy:{width}} {_bar(result, index, full, empty)}"))
    console.print()


def _bar(result: Result, index: int, full: str, empty: str) -> str:
    survival = result.survival[index]
    length = math.floor(survival.probability * BAR)  # a full bar means that nothing can be lost
    return full * length + empty * (BAR - length) + f" {survived(survival)}"
