"""`evermoe top`: show a running job as a table, refreshed continually."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from evermoe.observe.member_view import Members, MemberView
from evermoe.options import count

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

FAILURES = {
    "left": "a member left after a notice",
    "process": "a process was lost, its host answers",
    "hung": "a member hangs, or is stopped",
    "host": "a host was lost, or cut off",
    "storage": "units were lost with the memory of hosts",
}
"""Description for people, by `Recovered.failure`."""
MAX_LOSSES = 6
"""Largest number of fatal losses that are named."""
WIDE = 120
"""Width of a terminal, in characters, from which cells have padding."""
SILENT_SECONDS = 10.0
"""Seconds without a new line in a file after which the table shows that it is silent."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evermoe top`."""
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="where `evermoe run --metrics` serves metrics: PORT of this machine, HOST:PORT, or several workers, "
        "HOST:FIRST-LAST; or a file of JSON lines, as evermoe.observe.JsonLines writes them",
    )
    parser.add_argument(
        "--once", action="store_true", help="show one table and exit: code 0 if a member answers, 1 if none does"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON per refresh instead of tables")
    parser.add_argument(
        "--every", type=_seconds, default=2.0, metavar="SECONDS", help="seconds between two refreshes (%(default)s)"
    )


def main(options: argparse.Namespace) -> int:
    """Show the members until Ctrl-C, or once. Return the exit code.

    Raises:
        ValueError: a source cannot be parsed.
        ModuleNotFoundError: `rich` or `prometheus_client` is missing.
    """
    import prometheus_client  # noqa: F401  # said at once, not of each member

    members = Members(options.sources)
    if options.json:
        return _print_json(members, options)
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if options.once:
        views = members.look()
        console.print(render(views))
        return _exit_code(views)
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(render(members.look()), refresh=True)
                time.sleep(options.every)
    except KeyboardInterrupt:
        return 0


def _print_json(members: Members, options: argparse.Namespace) -> int:
    while True:
        views = members.look()
        print(json.dumps({"time": time.time(), "members": [_plain(view) for view in views]}), flush=True)
        if options.once:
            return _exit_code(views)
        time.sleep(options.every)


def _exit_code(views: Sequence[MemberView]) -> int:
    return 0 if _answering(views) else 1


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.05 to 3600 seconds, got {text!r}")
    return seconds


def _plain(view: MemberView) -> dict[str, Any]:
    """Replace NaN by None, as JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(view).items()
    }


# ---- tables


def render(views: Sequence[MemberView]) -> Group:
    """Render each job of these members: summary, a row for each member, survivable losses, last recovery."""
    from rich.console import Group

    jobs = {view.job for view in views if view.job} or {""}
    parts: list[RenderableType] = []
    for job in sorted(jobs):
        own = [view for view in views if view.job == job or (len(jobs) == 1 and not view.job)]
        parts += [_headline(job, own), _table(own), *_survival(own), *_recovery(own)]
    if len(jobs) > 1 and (strangers := [view for view in views if not view.job]):
        parts.append(_table(strangers))
    return Group(*parts)


def _answering(views: Sequence[MemberView]) -> list[MemberView]:
    return [view for view in views if not view.problem]


def _headline(job: str, views: Sequence[MemberView]) -> str:
    """Return the values that hold for all members, from the member with the most steps."""
    from rich.markup import escape

    answering = _answering(views)
    newest = max(answering, key=lambda view: (view.step or 0, view.tokens_per_second or 0), default=None)
    if newest is None:
        return f"[bold]{escape(job) or 'no job'}[/]: no member answers"
    parts = [
        f"[bold]{escape(job) or 'no job yet'}[/]",
        "" if newest.step is None else f"step {newest.step:,}",
        "" if newest.epoch is None else f"epoch {newest.epoch:.3g}",
        "" if newest.samples is None else f"{newest.samples:,} samples",
        "" if newest.tokens is None else f"{newest.tokens:,} tokens",
        "" if newest.loss is None else f"loss {newest.loss:.4g}",
        "" if newest.members is None else f"{count(newest.members, 'member')} training",
        "" if newest.generation is None else f"generation {newest.generation}",
        "" if newest.step_seconds is None else f"{_duration(newest.step_seconds)} a step",
        "" if newest.tokens_per_second is None else f"{newest.tokens_per_second:,.0f} tokens/s",
        "" if newest.imbalance is None else f"imbalance of members {newest.imbalance:.2f}",
        "" if newest.expert_imbalance is None else f"of experts {newest.expert_imbalance:.2f}",
        "" if newest.plt_at_risk is None else f"tokens at risk {newest.plt_at_risk:.2%}",
        "" if newest.checkpoint_step is None else f"checkpoint of step {newest.checkpoint_step:,}",
    ]
    return " · ".join(filter(None, parts))


def _table(views: Sequence[MemberView]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(padding=(0, int(shutil.get_terminal_size().columns >= WIDE)))
    numbers = "step", "s/step", "own s", "data"
    for name in ("rank", "member", "source", "role", "state", *numbers, "behind", "sent", "recoveries"):
        right = name in ("rank", *numbers, "recoveries")
        # Columns that identify a member do not wrap; on a narrow terminal the others do.
        own_line = name in ("rank", "member")
        table.add_column(name, justify="right" if right else "left", no_wrap=own_line, overflow="fold")
    for view in views:
        if view.problem:
            said = f"[red]no answer: {escape(view.problem)}[/]"
            table.add_row("", escape(_name(view)), escape(view.source), view.role, said)
            continue
        silent = view.seconds_since_event
        is_silent = silent is not None and silent > SILENT_SECONDS and view.state != "finished"
        table.add_row(
            _number(view.rank),
            escape(_name(view)),
            escape(view.source),
            view.role,
            f"[yellow]{view.state}, silent for {_duration(silent or 0)}[/]" if is_silent else _state(view),
            _number(view.step),
            "" if view.step_seconds is None else f"{view.step_seconds:.3g}",
            "" if view.own_seconds is None else f"{view.own_seconds:.3g}",
            "" if view.data_fraction is None else f"{view.data_fraction:.0%}",
            ", ".join(f"{kind} {steps}" for kind, steps in sorted(view.lag.items())),
            ", ".join(f"{kind} {_size(sent)}" for kind, sent in sorted(view.copied_bytes.items()) if sent),
            _number(view.recoveries),
        )
    return table


def _name(view: MemberView) -> str:
    """Return the member's ID, which begins with its node's name; before it has joined, the node's name."""
    return view.member or view.node


def _state(view: MemberView) -> str:
    if view.state == "training" and view.slow:
        return f"[yellow]slow: {view.slow}[/]"
    return view.state if view.state in ("training", "finished", "starting") else f"[yellow]recovers: {view.state}[/]"


def _survival(views: Sequence[MemberView]) -> list[str]:
    """Return the losses that the job would survive, from the member that reports the fewest."""
    from rich.markup import escape

    known = [view for view in _answering(views) if view.survives_one is not None]
    if not known:
        return []
    view = min(known, key=lambda view: (bool(view.is_covered), view.survives_one or 0))
    lines = [
        f"a node is lost: survived with probability {view.survives_one:.3g}; two at once: {view.survives_two:.3g}"
        + ("" if view.is_covered else "; [yellow]copies are missing and in progress[/]")
    ]
    if view.fatal:
        named = [f"{nodes} ({count(units, 'unit')})" for nodes, units in list(view.fatal.items())[:MAX_LOSSES]]
        more = len(view.fatal) - len(named)
        lines.append(f"not survived: the loss of {escape(', '.join(named))}" + (f", and {more} more" if more else ""))
    return lines


def _recovery(views: Sequence[MemberView]) -> list[str]:
    """Return the last recovery, as the member reports it that took longest."""
    from rich.markup import escape

    known = [view for view in _answering(views) if view.recovery_began is not None]
    if not known:
        return []
    latest = max(view.generation or 0 for view in known)
    view = max(
        (view for view in known if (view.generation or 0) == latest),
        key=lambda each: sum(each.recovery_seconds.values()),
    )
    ago = time.time() - (view.recovery_began or 0)
    phases = ", ".join(f"{phase} {_duration(seconds)}" for phase, seconds in view.recovery_seconds.items())
    total = _duration(sum(view.recovery_seconds.values()))
    failed = FAILURES.get(view.recovery_failure, "")
    source = f"units from {view.recovery_tier}" if view.recovery_tier else ""
    said = "; ".join(filter(None, (failed, source, escape(view.recovery_reason))))
    return [f"last recovery, {_duration(ago)} ago: {total} ({phases}); {said}"]


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _size(nbytes: int) -> str:
    value, units = float(nbytes), ("B", "kB", "MB", "GB", "TB", "PB")
    place = min(len(units) - 1, int(math.log10(value) // 3)) if value >= 1 else 0
    return f"{value / 1000**place:.3g} {units[place]}"
