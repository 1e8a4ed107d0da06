"""Real runs of the demo with a kill schedule, against what a simulation predicts of them.

    python benches/bench_simulate.py [--presets auto gemini ...] [--rounds 3] [--json PATH]

Constants come from one run of each preset in which another worker dies at another step (`evermoe measure` makes such a
run of `auto`). The goal: the total time within 10 %; each recovery, from the kill to the next committed step, within
25 %; and the same steps that are lost, and members that go on.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from common import Table
from evermoe.cli.measurements import measure_session
from evermoe.demo.driver import Run
from evermoe.demo.flags import add_arguments, check
from evermoe.demo.model import ByteGPT
from evermoe.demo.summary import commits, episodes
from evermoe.planning import PRESET_NAMES
from evermoe.simulate import Constants, Failure, Scenario, Workload, simulate
from evermoe.simulate.scenario import SimulatedOptions

WORKERS, STEPS = 4, 40
KILLS = ((1, 12), (3, 26))
"""Worker and step; the last one dies while two are left over."""
MEASURED = ["--workers", str(WORKERS), "--steps", "24", "--kill", "2@12"]
COMMON = ["--no-join", "--baseline-steps", "0", "--hidden", "64", "--intermediate", "128"]
TOTAL, RECOVERY = 0.10, 0.25
"""Errors that are allowed."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=PRESET_NAMES, default=list(PRESET_NAMES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="where to write the figures")
    arguments = parser.parse_args()
    columns = {"preset": "s", "real s": "8.2f", "predicted s": "12.2f", "error": "7.1%"}
    columns |= {"recoveries s": "s", "predicted": "s", "worst": "7.1%", "same events": "s", "within": "s"}
    table = Table(f"{WORKERS} workers, {STEPS} steps, kills {KILLS}", columns)
    for preset in arguments.presets:
        for _ in range(arguments.rounds):
            table.add(**compare(preset))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table.rows, indent=2) + "\n")


def compare(preset):
    """One run for the constants, one real run, and its prediction."""
    flags = ["--preset", preset, *COMMON]
    console = Console(quiet=True)
    measured, details = measure_session(console, [*MEASURED, *flags])
    real = run([*flags, "--workers", str(WORKERS), "--steps", str(STEPS), *kill_flags()], console)
    constants = replace(Constants(), **(measured | {"start_seconds": 0.0}))
    predicted = predict(preset, details["step_seconds"], constants)
    total_error = predicted["total"] / real["total"] - 1
    pairs = list(zip(predicted["recoveries"], real["recoveries"], strict=False))
    worst = max((abs(one / other - 1) for one, other in pairs), default=1.0)
    is_same = predicted["events"] == real["events"]
    return {
        "preset": preset,
        "real s": real["total"],
        "predicted s": predicted["total"],
        "error": total_error,
        "recoveries s": " ".join(f"{each:.2f}" for each in real["recoveries"]),
        "predicted": " ".join(f"{each:.2f}" for each in predicted["recoveries"]),
        "worst": worst,
        "same events": "yes" if is_same else f"no: {predicted['events']} for {real['events']}",
        "within": "yes" if abs(total_error) <= TOTAL and worst <= RECOVERY and is_same else "no",
    }


def kill_flags():
    return [part for worker, step in KILLS for part in ("--kill", f"{worker}@{step}")]


def run(flags, console):
    """A real run: seconds from the first step to the last, of each recovery, and steps and members of the events."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(flags)
    kills = check(options)
    with tempfile.TemporaryDirectory() as folder:
        events = Run(options, Path(folder), console=console, title="real").go(
            kills, None, options.steps, options.copies
        )
    begun = min(event["time"] for rows in events.values() for event in rows if event["event"] == "begin")
    done = commits(events)
    found = episodes(events)
    return {
        "total": max(event["time"] for event in done.values()) - begun,
        "recoveries": [episode.total_seconds for episode in found],
        "events": [(episode.step, episode.members) for episode in found],
        "fetched": [episode.fetched_bytes for episode in found],
    }


def predict(preset, step_seconds, constants):
    """The same of a simulation."""
    scenario = Scenario(
        workload(step_seconds),
        nodes=WORKERS,
        steps=STEPS,
        failures=(Failure.in_steps([(step, [worker]) for worker, step in KILLS]),),
        constants=constants,
        options=SimulatedOptions(rejoin_limit=5.0),
    )
    outcome = simulate(scenario, preset, seed=0)
    first = next(each.seconds for each in outcome.happened if each.what == "resumed")
    lost = [each for each in outcome.happened if each.what == "lost"]
    resumed = [each for each in outcome.happened if each.what == "resumed"][1:]
    return {
        "total": outcome.seconds - first,
        "recoveries": [seconds + 1.5 * step_seconds for seconds in outcome.recovery_seconds],
        "events": [(one.step, other.members) for one, other in zip(lost, resumed, strict=True)],
    }


def workload(step_seconds):
    """The demo's model."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(COMMON)
    sizes = ("layers", "hidden", "heads", "intermediate", "experts", "top_k", "sequence")
    model = ByteGPT(**{name: getattr(options, name) for name in sizes})
    experts = sum(p.numel() for block in model.blocks for p in block.moe.parameters()) - sum(
        p.numel() for block in model.blocks for p in block.moe.router.parameters()
    )
    dense = sum(p.numel() for p in model.parameters()) - experts
    return Workload(
        name="demo",
        layers=options.layers,
        classes=options.layers,
        experts=options.experts,
        expert_parameters=experts // (options.layers * options.experts),
        dense_parameters=dense,
        step_seconds=step_seconds,
        tokens_per_step=options.batch * options.sequence,
        state_bytes=12,
        gradient_bytes=4,
        scaling=0.0,
        expert_share=0.0,
    )


if __name__ == "__main__":
    main()
