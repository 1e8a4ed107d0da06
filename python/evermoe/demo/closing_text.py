"""The text with which the demo ends: what the failures cost, and what to run next."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from evermoe.demo.flags import copied_at_a_time
from evermoe.demo.summary import PHASES
from evermoe.options import count
from evermoe.planning.presets import PRESETS

WHEN_SENT = {
    "idle": "before windows were known",
    "background": "during compute, as planned",
    "vote": "while training waited for them",
    "recovery": "in recoveries or at the end, while training waited anyway",
}
"""By `ChunkSent.when`, for people."""
PHASE_WORK = {
    "detect": "notice the closed connection",
    "agree": "ask the Lighthouse who is left",
    "rebuild": "connect the new group",
    "fetch": "copy the experts that moved",
    "verify": "check digests, plan new copies",
    "repeat": "repeat the interrupted step",
}

NEXT = """
Next: train with a script of your own (docs/tutorial/first-run.md has a complete one), or try other failures:
  evermoe run --workers {workers} train.py
  evermoe demo --kill 2@20 --kill 3@21     the second worker dies during the recovery from the first
  evermoe demo --preset gemini             another way to keep copies; docs/guides/choose-a-preset.md compares them
  evermoe demo --help"""


def headline(result: Mapping[str, Any]) -> str:
    """Return the outcome of a run in one line, for the title of its picture."""
    kills = sum(len(episode["killed"]) for episode in result["episodes"])
    parts = [f"{result['steps']} steps", count(kills, "kill"), f"{count(result['steps_lost'], 'step')} lost"]
    if result["lost_tokens"]:
        parts.append(f"{result['plt']:.2%} of tokens lost")
    elif result["loss_difference"] is not None:
        parts.append(f"loss within {result['loss_difference']:.0e} of a run without failures")
    return "evermoe demo: " + ", ".join(parts)


def print_report(console: Console, result: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Print the summary of a run, the verdict, and the next commands."""
    for episode in result["episodes"]:
        workers, seconds = " and ".join(map(str, episode["killed"])), episode["total_seconds"]
        console.print(
            f"\n[bold]worker {workers} killed in step {episode['step']}; step applied {seconds:.2f} s later[/]"
        )
        console.print(_phases(episode))
    console.print()
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(no_wrap=True)
    facts.add_column()
    for name, text in _facts(result, options):
        facts.add_row(name, text)
    console.print(facts)
    if result["ok"]:
        console.print(f"[bold green]passed:[/] {_verdict(result)}")
    for problem in result["problems"]:
        console.print(f"[bold red]failed:[/] {problem}")
    if result["ok"]:
        console.print(NEXT.format(workers=options.workers), soft_wrap=True, markup=False)


def _phases(episode: Mapping[str, Any]) -> Table:
    """Return a table of the phases of one recovery."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for phase in PHASES:
        table.add_row(phase, f"{episode['seconds'].get(phase, 0.0):.3f} s", f"[dim]{PHASE_WORK[phase]}[/]")
    return table


def _facts(result: Mapping[str, Any], options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the rows of the summary: a name and a text."""
    is_partial = PRESETS[options.preset].may_lose_tokens
    yield "steps lost", f"{result['steps_lost']} of {result['steps']}"
    if is_partial:
        for number, line in enumerate(_lost_tokens(result, options)):
            yield "" if number else "tokens lost", line
    yield "loss", f"{result['loss_first']:.3f} → {result['loss_last']:.3f}; {_compared(result, is_partial=is_partial)}"
    yield "digests", f"{result['digests_checked']:,} checked, {result['digests_mismatched']} mismatched"
    yield "fetched", f"{result['fetched_bytes'] / 1e6:.1f} MB in all recoveries and joins"
    if result["step_seconds"] and options.replication:
        copying, step = result["copy_seconds"], result["step_seconds"]
        yield "copies", f"training waited {copying * 1000:.1f} ms for them in a step of {step * 1000:.0f} ms (medians)"
    if result["messages_in_windows"] is not None:
        yield "", _messages(result["messages"], result["messages_in_windows"])
    yield "picture", options.plot
    if options.trace:
        yield "trace", f"{options.trace}, for https://ui.perfetto.dev"


def _compared(result: Mapping[str, Any], *, is_partial: bool) -> str:
    """Return how the loss compares with that of the run without failures."""
    without = result["loss_without_failures"]
    if without is None:
        return "not compared with a run without failures (--no-baseline)"
    if is_partial:
        return f"a run without failures: {without:.3f} ± {result['loss_noise']:.3f}"
    apart = result["loss_difference"]
    if apart == 0:
        return "equal in every step to that of a run without failures"
    return (
        f"a run without failures: {without:.3f}. The two differ by {apart:.1e} at most in any step, as another number "
        "of workers sums in another order"
    )


def _lost_tokens(result: Mapping[str, Any], options: argparse.Namespace) -> Iterator[str]:
    """Yield what a preset that may lose tokens has lost, and why."""
    yield f"{result['lost_tokens']:,} in all, PLT {result['plt']:.3%}"
    for back in result["rolled_back"]:
        fewest, most = back["fewest_steps"], back["most_steps"]
        ages = str(most) if fewest == most else f"{fewest} to {most}"
        went = f"{count(back['experts'], 'expert')} went back by {ages} {'step' if most == 1 else 'steps'}"
        yield f"step {back['step']}: {went}, as only dead workers had newer ones"
    if result["rolled_back"]:
        yield copied_at_a_time(options)
    else:
        yield "each expert was trained by a worker that is left, or its newest state had been copied"


def _messages(messages: Mapping[str, int], share: float) -> str:
    """Return when the messages of snapshots were sent, in words."""
    rest = [f"{messages[when]} {words}" for when, words in WHEN_SENT.items() if messages.get(when)]
    return f"{messages.get('window', 0)} messages in idle windows, {share:.1%}" + "".join(f"; {each}" for each in rest)


def _verdict(result: Mapping[str, Any]) -> str:
    verdict = "no step lost, every digest matched, the loss fell"
    if result["lost_tokens"]:
        verdict += f"; PLT {result['plt']:.2%}, as counted by the routers themselves"
    return verdict
