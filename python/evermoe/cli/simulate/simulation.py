"""Simulates what the flags of `evermoe simulate` describe, and tells what came of it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from io import BytesIO
from typing import Any

import evermoe
from evermoe.cli.results import console, write_all
from evermoe.cli.simulate.outcome_table import show_outcomes
from evermoe.cli.simulate.scenario_flags import parse_scenario
from evermoe.simulate import SCHEMES, Sample, Scenario, keeps_owners, simulate_seeds

REPORT_SECONDS = 3.0
"""Between two lines about progress."""
NUMBERS = ("ettr", "goodput", "plt", "steps", "undone_steps", "interrupted_steps", "losses", "memory_bytes")
"""Of which the JSON has a mean and a confidence interval."""


def main(options: argparse.Namespace) -> int:
    """Simulates, and prints a table.

    Raises:
        ValueError: with the flag or field, what was expected and what came.
    """
    scenario = parse_scenario(options)
    if options.plot:
        import matplotlib  # noqa: F401  missing, it is told before any work
    out = console()
    fitting = [name for name in SCHEMES if scenario.options.dense == "replicated" or keeps_owners(name)]
    presets = tuple(dict.fromkeys(options.presets or fitting))
    samples = run(scenario, presets, options.seed, options.seeds)
    files: dict[str, tuple[str, bytes]] = {}
    if options.json:
        found = json.dumps(as_json(scenario, samples, options.seed)) + "\n"
        files["--json"] = (options.json, found.encode())
    if options.plot:
        files["--plot"] = (options.plot, _draw(samples))
    write_all(files)
    show_outcomes(out, scenario, samples)
    for path, _ in files.values():
        out.print(f"wrote {path}", soft_wrap=True, markup=False)
    return 0


def run(scenario: Scenario, presets: Sequence[Any], seed: int, seeds: int) -> list[Sample]:
    """All schemes; says on standard error every few seconds how far it is, on a terminal and in a file."""
    samples = []
    for number, name in enumerate(presets):
        reporter = Reporter(f"{name}, {number + 1} of {len(presets)}")
        samples.append(simulate_seeds(scenario, name, seed=seed, seeds=seeds, progress=reporter))
    return samples


class Reporter:
    """Writes a line every few seconds: what is simulated, how much of it is done, and how long the rest may take.

    Args:
        name: what is simulated.
        every: seconds between two lines.
    """

    def __init__(self, name: str, every: float = REPORT_SECONDS) -> None:
        self._name, self._every = name, every
        self._began = self._told = time.monotonic()

    def __call__(self, part: float) -> None:
        """Notes that this part of the work is done, 0 to 1."""
        now = time.monotonic()
        if now < self._told + self._every:
            return
        self._told = now
        took = now - self._began
        rest = f", about {took * (1 - part) / part:.0f} s left" if part > 0 else ""
        print(f"evermoe simulate: {self._name}: {part:.0%} after {took:.0f} s{rest}", file=sys.stderr, flush=True)


def _draw(samples: Sequence[Sample]) -> bytes:
    from evermoe.cli.simulate.plot import plot_outcomes

    picture = BytesIO()
    plot_outcomes(samples, picture)
    return picture.getvalue()


def as_json(scenario: Scenario, samples: Sequence[Sample], seed: int) -> dict[str, Any]:
    """Everything, JSON-able."""
    return {
        "evermoe": evermoe.__version__,
        "seed": seed,
        "constants": asdict(scenario.constants),
        "scenario": json.loads(scenario.to_json()),
        "presets": {sample.scheme: _sample_json(sample) for sample in samples},
    }


def _sample_json(sample: Sample) -> dict[str, Any]:
    intervals = {name: sample.interval(name) for name in NUMBERS}
    return {
        "means": {name: interval.mean for name, interval in intervals.items()},
        "half_intervals": {
            name: interval.half if len(sample.outcomes) > 1 else None for name, interval in intervals.items()
        },
        "seconds_by_cause": sample.seconds_by_cause(),
        "outcomes": [asdict(outcome) for outcome in sample.outcomes],
    }
