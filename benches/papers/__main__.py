"""`python -m benches.papers`: the papers' published numbers, compared with those that evermoe computes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benches.papers.evidence import Computed, as_json, difference, markdown, our_number
from benches.papers.figure import Figure, Row, reasons
from benches.papers.registry import FIGURES, find
from evermoe.cli.main import Parser, exit_code
from evermoe.cli.results import write_all

DESCRIPTION = """\
Compute the numbers of the five papers whose mechanisms evermoe implements, and compare them with the published ones:
how each was computed, by how much they differ, and why. Where a paper is wrong, a counter-example shows it.

  python -m benches.papers list
  python -m benches.papers gemini-f9 lazarus-theorem1
  python -m benches.papers all --slow --markdown docs/evidence.md"""
PIPE_COLUMNS = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, and return its exit code."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m benches.papers", description=DESCRIPTION, formatter_class=formatter)
    parser.add_argument(
        "names",
        nargs="*",
        default=["list"],
        metavar="ID",
        help="figures, such as gemini-f9; a paper: gemini, pec, lazarus, baft or moetion; all; or list, which is the "
        "default",
    )
    parser.add_argument(
        "--slow", action="store_true", help="with all, or a paper: include figures that train or measure (minutes)"
    )
    parser.add_argument("--json", metavar="PATH", help="write all numbers as JSON")
    parser.add_argument("--markdown", metavar="PATH", help="write a page of Markdown, with the command that wrote it")
    return exit_code(parser.prog, lambda: show(parser.parse_args(arguments)))


def show(options: argparse.Namespace) -> int:
    """Compute the requested figures, print them and write the files.

    Raises:
        ValueError: unknown ID; the message lists similar ones.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    if "list" in options.names:
        if options.names != ["list"] or options.json or options.markdown:
            raise ValueError("list: expected no other ID, no --json and no --markdown with it")
        console.print(_listed())
        return 0
    computed = compute(find(options.names, is_slow=options.slow))
    for figure, rows in computed.values():
        _show(console, figure, rows)
    files = {}
    if options.json:
        text = json.dumps(as_json(computed), indent=1, ensure_ascii=False) + "\n"
        files["--json"] = (options.json, text.encode())
    if options.markdown:
        files["--markdown"] = (options.markdown, markdown(computed, _command(options)).encode())
    write_all(files)
    for path, _ in files.values():
        console.print(f"wrote {path}", soft_wrap=True, markup=False)
    return 0


def compute(figures: Sequence[Figure]) -> Computed:
    """Compute the rows of figures, with a progress bar on a terminal.

    Args:
        figures: in the order in which they are shown.
    """
    found: dict[str, tuple[Figure, list[Row]]] = {}
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=len(figures))
        for figure in figures:
            progress.update(task, description=figure.id)
            found[figure.id] = figure, figure.rows()
            progress.advance(task)
    return found


def _command(options: argparse.Namespace) -> str:
    """Return the command line that corresponds to these options."""
    flags = ["--slow"] if options.slow else []
    flags += ["--json", options.json] if options.json else []
    return " ".join(["python -m benches.papers", *options.names, *flags, "--markdown", options.markdown])


def _listed() -> Table:
    table = Table("ID", "what", "", box=SIMPLE_HEAD, pad_edge=False)
    for figure in FIGURES.values():
        marks = [name for name, is_it in (("counter-example", figure.is_error), ("slow", figure.is_slow)) if is_it]
        if figure.rows is list:
            marks.append("no number in our copy")
        table.add_row(figure.id, figure.title, ", ".join(marks))
    return table


def _show(console: Console, figure: Figure, rows: Sequence[Row]) -> None:
    """Print one figure: its title, its note and its table."""
    error = " (counter-example)" if figure.is_error else ""
    console.print(f"[bold]{figure.id}[/]  {figure.title}{error}")
    if figure.note:
        console.print(figure.note, markup=False)
    if rows:
        console.print(_table(rows))
    console.print()


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("quantity", ratio=5)
    for name in ("paper", "ours"):
        table.add_column(name, justify="right", ratio=2)
    for name, ratio in (("how", 1), ("differs", 1), ("why", 7)):
        table.add_column(name, ratio=ratio, min_width=7)
    for row, why in zip(rows, reasons(rows), strict=True):
        paper = f"{row.paper.with_unit(row.unit)} ({row.paper.place})" if row.paper else "not stated"
        table.add_row(row.quantity, paper, our_number(row), row.how, difference(row), why.replace("[", r"\["))
    return table


if __name__ == "__main__":
    sys.exit(main())
