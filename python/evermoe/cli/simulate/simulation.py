"""Simulation of what the flags of `evermoe simulate` describe, and its results."""

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
"""Seconds between two lines about progress."""
NUMBERS = (
    "ettr",
    "goodput",
    "plt",
    "steps",
    "undone_steps",
    "interrupted_steps",
    "losses",
    "memory_bytes",
    "missing_copy_bytes",
)
"""Numbers for which the JSON has a mean and a confidence interval."""


def main(options: argparse.Namespace) -> int:
    """Simulate, and print a table.

    Raises:
        ValueError: with the flag or field, what was expected and what came.
    """
    scenario = parse_scenario(options)
    if options.plot:
        import matplotlib  # noqa: F401  a missing package is reported before any work
    out = console()
    fitting = [name for name in SCHEMES if not scenario.options.shard_optimizer or keeps_owners(name)]
    presets = tuple(dict.fromkeys(options.presets or fitting))
    samples = simulate_presets(scenario, presets, options.seed, options.seeds)
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


def simulate_presets(scenario: Scenario, presets: Sequence[Any], seed: int, seeds: int) -> list[Sample]:
    """Simulate each preset in turn; progress goes to standard error, on a terminal and in a file."""
    reporter = Reporter(presets)
    samples = []
    for name in presets:
        samples.append(simulate_seeds(scenario, name, seed=seed, seeds=seeds, progress=reporter))
        reporter.end_preset()
    return samples


class Reporter:
    """Writes a line at the start, and one every few seconds: the current preset, its progress and the time left."""

    def __init__(self, presets: Sequence[str], interval: float = REPORT_SECONDS) -> None:
        self._presets, self._interval = presets, interval
        self._done = 0
        self._began = self._last_line = time.monotonic()
        self._write(f"simulating {', '.join(presets)}")

    def __call__(self, part: float) -> None:
        """Report that this part of the current preset, 0 to 1, is simulated."""
        now = time.monotonic()
        if now < self._last_line + self._interval:
            return
        self._last_line = now
        took, part_of_all = now - self._began, (self._done + part) / len(self._presets)
        rest = f", about {took * (1 - part_of_all) / part_of_all:.0f} s left" if part_of_all > 0 else ""
        place = f"{self._presets[self._done]}, {self._done + 1} of {len(self._presets)}"
        self._write(f"{place}: {part:.0%} after {took:.0f} s in all{rest}")

    def end_preset(self) -> None:
        """Note that the current preset is done; the next one begins."""
        self._done += 1

    def _write(self, text: str) -> None:
        print(f"evermoe simulate: {text}", file=sys.stderr, flush=True)


def _draw(samples: Sequence[Sample]) -> bytes:
    from evermoe.cli.simulate.plot import plot_outcomes

    picture = BytesIO()
    plot_outcomes(samples, picture)
    return picture.getvalue()


def as_json(scenario: Scenario, samples: Sequence[Sample], seed: int) -> dict[str, Any]:
    """Return everything, JSON-able."""
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
