"""Computed figures as a page of Markdown, and as JSON."""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from benches.papers.figure import PAPERS, Figure, How, Outcome, Row, reasons, shown

Computed = Mapping[str, tuple[Figure, list[Row]]]
"""Figures with their rows, by ID."""

FAULTS = Path(__file__).parents[1] / "results" / "2026-11-30_faults_2-cores.md"
"""Results of a campaign of faults, which the page repeats: it takes an hour."""
HEAD = """# Evidence

Numbers that the five [papers](papers.md) state, next to evermoe's numbers for the same quantities, with the reason for
each difference.

    {command}

wrote this page, on {machine}. Times and trainings are of this machine; other numbers are the same on all machines.

- **paper**: the number in the text of our copy, and its place. ≥ means "more than", ≤ "less than" or "no more than".
  "Up to" counts as a value. After "=" stand the stated numbers of which we take the quotient. The cell is empty if our
  copy states no number. Numbers that are only in a picture are not read off. Numbers that we derive from a theorem or
  an algorithm are not in this column.
- **ours**: computed when the command runs.
- **how**: *exact*, a closed form or an enumeration of a setting that the paper states; *planner*, evermoe's planners
  with assumptions where the paper leaves something open; *simulation*, a job with many failures in simulated time, as
  [`evermoe simulate`](guides/simulate.md) runs it, with assumptions where the paper states nothing; *real run*, a small
  training or a measured time; *arithmetic*, sums, products and quotients of the paper's own numbers, which test whether
  these agree with each other, and nothing of evermoe; *not computed*, with the reason.
- **difference**: relative to the paper's number, or to the bound that is exceeded. *holds*: the number is within the
  paper's bound or range. *fitted*: something that the paper leaves open was chosen so that this number results.

Not on this page are drawings of mechanisms, and most seconds of other systems on the papers' machines. Simulations
compare ways to survive and shares of time, not samples a second.

## Summary

Every row of the papers' tables is counted once. A fitted number confirms nothing. *Bound holds* counts bounds and
ranges, which many values would meet. *Arithmetic* says something about the paper, and nothing about evermoe.

| paper | rows | not stated | not computed | fitted | bound holds | within 1 % | within 10 % | further |
|---|---|---|---|---|---|---|---|---|
{by_paper}

The same rows by the way in which they were computed:

| how | rows | not stated | not computed | fitted | bound holds | within 1 % | within 10 % | further |
|---|---|---|---|---|---|---|---|---|
{by_how}

#{faults}"""


def difference(row: Row) -> str:
    """Format the difference of a row: a percentage, "fitted", "holds" for a bound, or empty if a number is missing.

    >>> from benches.papers.figure import stated
    >>> difference(Row(quantity="", unit="", paper=stated("4", 100), ours=91.0, how="exact", why=""))
    '-9.0 %'
    """
    words = {"not stated": "", "not computed": "", "fitted": "fitted", "bound holds": "holds"}
    if row.outcome in words:
        return words[row.outcome]
    if row.difference is None:
        return "not zero"
    percent = round(100 * row.difference, 1)
    return f"{percent:+.1f} %" if percent else "0 %"


def our_number(row: Row) -> str:
    """Format evermoe's number with its unit; empty if it is not computed."""
    return "" if row.ours is None else f"{shown(row.ours)} {row.unit}".rstrip()


def markdown(computed: Computed, command: str) -> str:
    """Return the page: the command, a summary, the results of a campaign of faults, and a section for each figure.

    Args:
        computed: figures with their rows, in order.
        command: the command that writes the page.
    """
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    rows = [(figure.id.partition("-")[0], row) for figure, found in computed.values() for row in found]
    by_paper = _summary(PAPERS, rows) + _summary(["all"], [("all", row) for _, row in rows])
    by_how = _summary(get_args(How), [(row.how, row) for _, row in rows])
    tables = {"by_paper": "\n".join(by_paper), "by_how": "\n".join(by_how)}
    parts = [HEAD.format(command=command, machine=machine, faults=FAULTS.read_text(encoding="utf-8"), **tables)]
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
    paper = f"{row.paper.with_unit(row.unit)}<br>({row.paper.place})" if row.paper else ""
    cells = [row.quantity, paper, our_number(row), row.how, difference(row), why]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _summary(names: Iterable[str], rows: Sequence[tuple[str, Row]]) -> list[str]:
    """Return a line of the summary for each name that has rows: their number, and how many have each outcome."""
    lines = []
    for name in names:
        of = Counter(row.outcome for own, row in rows if own == name)
        cells = [name, of.total(), *(of[outcome] for outcome in get_args(Outcome))]
        lines += ["| " + " | ".join(map(str, cells)) + " |"] if of else []
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
    found = asdict(row) | {"difference": row.difference, "outcome": row.outcome}
    if row.paper is not None:
        bounds = {
            name: None if math.isinf(value) else value
            for name, value in (("low", row.paper.low), ("high", row.paper.high))
        }
        found["paper"] = bounds | {"place": row.paper.place, "terms": row.paper.terms}
    return found
