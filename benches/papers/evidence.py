"""Computed figures as a page of Markdown, and as JSON."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benches.papers.figure import PAPERS, Figure, Row, reasons, shown

Computed = Mapping[str, tuple[Figure, list[Row]]]
"""Figures with their rows, by ID."""

HEAD = """# Evidence

What the five [papers](papers.md) state, and what evermoe computes of the same: figure by figure, with the reason for
each difference.

    {command}

wrote this page, on {machine}; times and trainings are of this machine, everything else is the same everywhere.

- **paper**: the number in the text of our copy, and where it stands. ≥ and ≤ are its "more than" and "up to". Without a
  number in it the cell is empty; numbers that are only in a picture are not read off.
- **ours**: computed when the command runs.
- **how**: *exact*, a closed form or an enumeration of what the paper states; *planner*, evermoe's planners with
  something taken that the paper leaves open; *simulation*, a job with many failures in simulated time, as [`evermoe
  simulate`](guides/simulate.md) does, where what the paper leaves open is assumed; *real run*, a small training or a
  measured time; *arithmetic*, the paper's own numbers put together, to see whether they agree, with nothing of evermoe
  in it.
- **difference**: relative to the paper's number, or to the bound that is passed; *fitted* where something that the
  paper leaves open was chosen so that its number comes out.

Left out are drawings of how something works, and numbers that need runs of other systems on the paper's machines:
seconds of the other systems' checkpoints and recoveries, and losses of the papers' models. Simulated are ratios between
ways to survive and shares of time, not samples a second.

Rows with a number of the paper, without those that are arithmetic or fitted:

| paper | rows | within 1 % | within 10 % | further |
|---|---|---|---|---|
{summary}
"""


def difference(row: Row) -> str:
    """Format the difference of a row; empty without a number of the paper, and "fitted" for a fitted one.

    >>> from benches.papers.figure import stated
    >>> difference(Row(quantity="", unit="", paper=stated("4", 100), ours=91.0, how="exact", why=""))
    '-9.0 %'
    """
    if row.paper is None or row.is_fitted:
        return "fitted" if row.is_fitted else ""
    if row.difference is None:
        return "not zero"
    percent = round(100 * row.difference, 1)
    return f"{percent:+.1f} %" if percent else "0 %"


def with_unit(text: str, unit: str) -> str:
    """Format a number with its unit."""
    return f"{text} {unit}".rstrip()


def markdown(computed: Computed, command: str) -> str:
    """Return the page: the command, a summary, and a section for each figure.

    Args:
        computed: figures with their rows, in order.
        command: the command that writes the page.
    """
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    parts = [HEAD.format(command=command, machine=machine, summary="\n".join(_summary(computed)))]
    for name, title in PAPERS.items():
        figures = [found for found in computed.values() if found[0].id.startswith(f"{name}-")]
        if figures:
            parts.append(f"## {title}\n")
            parts += [section(figure, rows) for figure, rows in figures]
    return "\n".join(parts)


def section(figure: Figure, rows: Sequence[Row]) -> str:
    """Return a figure's heading, note and table.

    Args:
        figure: the figure.
        rows: its computed rows.
    """
    lines = [f"### {figure.id}", "", f"{figure.title}."]
    if figure.is_error:
        lines[-1] += " **Counter-example**: the rows show a case in which this does not hold."
    if figure.note:
        lines[-1] += f" {figure.note}"
    if rows:
        lines += ["", "| quantity | paper | ours | how | difference | why |", "|---|---|---|---|---|---|"]
        lines += [_line(row, why) for row, why in zip(rows, reasons(rows), strict=True)]
    return "\n".join(lines) + "\n"


def _line(row: Row, why: str) -> str:
    paper = f"{with_unit(str(row.paper), row.unit)}<br>({row.paper.place})" if row.paper else ""
    cells = [row.quantity, paper, with_unit(shown(row.ours), row.unit), row.how, difference(row), why]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _summary(computed: Computed) -> list[str]:
    lines = []
    for name in PAPERS:
        rows = [row for figure, rows in computed.values() if figure.id.startswith(f"{name}-") for row in rows]
        counted = [row for row in rows if row.paper and row.how != "arithmetic" and not row.is_fitted]
        of = [math.inf if row.difference is None else abs(row.difference) for row in counted]
        near, close = sum(part <= 0.01 for part in of), sum(part <= 0.1 for part in of)
        if of:
            lines.append(f"| {name} | {len(of)} | {near} | {close - near} | {len(of) - close} |")
    return lines


def as_json(computed: Computed) -> list[dict[str, Any]]:
    """Return all numbers, JSON-able; a bound that the paper does not state is None.

    Args:
        computed: figures with their rows.
    """
    return [
        {
            "id": figure.id,
            "title": figure.title,
            "note": figure.note,
            "is_error": figure.is_error,
            "rows": [_row_json(row) for row in rows],
        }
        for figure, rows in computed.values()
    ]


def _row_json(row: Row) -> dict[str, Any]:
    found = asdict(row) | {"difference": row.difference}
    if row.paper is not None:
        bounds = {
            name: None if math.isinf(value) else value
            for name, value in (("low", row.paper.low), ("high", row.paper.high))
        }
        found["paper"] = bounds | {"place": row.paper.place}
    return found
