"""`evermoe report`: one HTML page about a run, from the event files of its members."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path

from evermoe.cli.run_events import Member, RunEvents, read_run
from evermoe.cli.svg_chart import Mark, chart
from evermoe.events import Checkpoint, Commit, Event, Joined, MemberLost, Recovered

COLORS = {"agree": "#f4a6a6", "rebuild": "#f7cf8d", "fetch": "#a9d3f5", "verify": "#b8e0b0"}
"""Colours of the phases of a recovery on the time axis."""
LOST, JOINED, SAVED = "#c00000", "#008000", "#6a3d9a"
HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 14px sans-serif; max-width: 1000px; margin: 2em auto; color: #222 }}
svg {{ width: 100%; background: #fafafa }} svg text {{ font-size: 11px; fill: #555 }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ border-bottom: 1px solid #ddd; padding: 3px 8px; text-align: left; vertical-align: top }}
td {{ overflow-wrap: anywhere }}
</style></head><body>
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evermoe report`."""
    parser.description = "Write one HTML page about a run: loss and step time, recoveries, losses, slow members."
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="files that JsonLines writes, or folders with files *.jsonl"
    )
    parser.add_argument("--out", metavar="PATH", default="report.html", help="where to write the page (%(default)s)")


def main(options: argparse.Namespace) -> int:
    """Run `evermoe report`."""
    run = read_run(options.sources)
    Path(options.out).write_text(page(run), encoding="utf-8")
    print(f"{options.out}: {len(run.members)} members, {len(run.events)} events")
    return 0


def page(run: RunEvents) -> str:
    """Return the page. It has no scripts and loads nothing; all text of the run is escaped."""
    start, end = min(each.first for each in run.members), max(each.last for each in run.members)
    job = next((each.joined.job for each in run.members if each.joined), "run")
    marks = [mark for at, _, event in run.events for mark in _marks(at - start, event)]
    commits = [(at - start, event) for at, _, event in run.events if isinstance(event, Commit)]
    seconds = {each.name: [(at - start, event.seconds) for at, event in each.measured] for each in run.members}
    others = [(at, member, event) for at, member, event in run.events if not isinstance(event, Commit)]
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(start))
    facts = [f"began {began}", f"{end - start:.1f} s", f"{len(run.members)} processes"]
    if commits:
        last = max((event for _, event in commits), key=lambda event: (event.step, event.generation))
        facts += [f"{last.step + 1:,} steps committed", f"loss {last.loss:.4g}"]
    legend = "".join(f'<span style="background:{color}"> {phase} </span> ' for phase, color in COLORS.items())
    return "".join(
        [
            HEAD.format(title=escape(f"evermoe: {job}")),
            f"<h1>{escape(job)}</h1><p>{escape(' · '.join(facts))}</p>",
            "<h2>Loss</h2>",
            chart("Loss of committed steps", {"loss": [(at, event.loss) for at, event in commits]}, marks, end - start),
            "<h2>Seconds of a step</h2>",
            chart("Seconds of each step, by member", seconds, marks, end - start),
            f"<p>Recoveries: {legend}; lines: a member is lost (red) or joins (green), a checkpoint (purple).</p>",
            "<h2>Members</h2>",
            _table(
                ("member", "node", "rank", "role", "from", "to", "steps", "s/step", "batches", "recoveries"),
                (_row(each, start) for each in run.members),
            ),
            "<h2>Events</h2>",
            _table(
                ("at", "event", "from", "details"),
                ((f"{at - start:.2f} s", event.name, name, _details(event)) for at, name, event in others),
            ),
            "</body></html>\n",
        ]
    )


def _marks(at: float, event: Event) -> Iterable[Mark]:
    if isinstance(event, Recovered):
        begin = at - sum(event.seconds.values())
        for phase, seconds in event.seconds.items():
            color = COLORS.get(phase, "#cccccc")
            yield Mark(begin, begin + seconds, color, f"{phase}: {seconds:.3g} s. {event.reason}")
            begin += seconds
    elif isinstance(event, MemberLost):
        yield Mark(at, at, LOST, f"{event.member} was lost: {event.kind}")
    elif isinstance(event, Joined):
        yield Mark(at, at, JOINED, f"{event.member} has joined")
    elif isinstance(event, Checkpoint):
        yield Mark(at, at, SAVED, f"checkpoint after {event.step} steps")


def _row(member: Member, start: float) -> tuple[str, ...]:
    joined, seconds = member.joined, sum(event.seconds for _, event in member.measured)
    waited = sum(event.data_seconds for _, event in member.measured)
    return (
        member.name,
        joined.node if joined else "",
        str(joined.rank) if joined else "",
        joined.role if joined else "",
        f"{member.first - start:.1f} s",
        f"{member.last - start:.1f} s",
        f"{len(member.measured):,}",
        f"{seconds / len(member.measured):.3g}" if member.measured else "",
        f"{waited / seconds:.0%}" if seconds else "",
        str(member.recoveries),
    )


def _details(event: Event) -> str:
    return ", ".join(f"{name}: {value}" for name, value in event.fields().items() if value not in ("", None, [], {}))


def _table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
