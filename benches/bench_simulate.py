"""Real runs of the demo with a kill schedule, against what a simulation predicts of them.

    python benches/bench_simulate.py [--presets auto gemini ...] [--rounds 3] [--json PATH]

Constants come from runs of each preset in which other workers die at other steps (`evermoe measure` makes such a run of
`auto`): what each phase of a recovery takes, and a step of four, three and two workers, which share the processors.
Of all that is measured the median over the rounds counts. The goal: the total time within 10 %; each recovery, from the
kill to the next committed step, within 25 %; and the same steps that are lost, and members that go on.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from common import Table, demo_workload, scaling_of
from evermoe.cli.measurements import measure_session
from evermoe.demo.driver import Run
from evermoe.demo.flags import add_arguments, check
from evermoe.demo.summary import commits, episodes
from evermoe.planning import PRESET_NAMES
from evermoe.simulate import Constants, Failure, Scenario, simulate
from evermoe.simulate.scenario import SimulatedOptions

WORKERS, STEPS = 4, 40
KILLS = ((1, 12), (3, 26))
"""Worker and step; the last one dies while two are left over."""
MEASURED = ["--workers", str(WORKERS), "--steps", "36", "--kill", "2@12", "--kill", "0@24"]
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
        table.add(**compare(preset, arguments.rounds))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table.rows, indent=2) + "\n")


def compare(preset, rounds):
    """In turn runs for the constants and real ones; the prediction of these."""
    flags = ["--preset", preset, *COMMON]
    console = Console(quiet=True)
    measured, steps, real = [], [], []
    for _ in range(rounds):
        constants, details = measure_session(console, [*MEASURED, *flags])
        measured.append(constants)
        steps.append(details["step_seconds"])
        real.append(run([*flags, "--workers", str(WORKERS), "--steps", str(STEPS), *kill_flags()], console))
    constants = replace(Constants(), **(median(measured) | {"start_seconds": 0.0}))
    predicted = predict(preset, median(steps), constants)
    total = statistics.median(each["total"] for each in real)
    total_error = predicted["total"] / total - 1
    is_same = all(predicted["events"] == each["events"] for each in real)
    recoveries = [statistics.median(row) for row in zip(*(each["recoveries"] for each in real), strict=False)]
    is_paired = len(predicted["recoveries"]) == len(recoveries)
    pairs = zip(predicted["recoveries"], recoveries, strict=True) if is_paired else []
    worst = max((abs(one / other - 1) for one, other in pairs), default=None)
    return {
        "preset": preset,
        "real s": total,
        "predicted s": predicted["total"],
        "error": total_error,
        "recoveries s": " ".join(f"{each:.2f}" for each in recoveries),
        "predicted": " ".join(f"{each:.2f}" for each in predicted["recoveries"]),
        "worst": worst,
        "same events": "yes" if is_same else f"no: {predicted['events']} for {real[0]['events']}",
        "within": "yes" if abs(total_error) <= TOTAL and is_paired and worst <= RECOVERY and is_same else "no",
    }


def median(rows):
    """The median of each field that all rows have."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0] if all(name in row for row in rows)}


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
    }


def predict(preset, steps, constants):
    """The same of a simulation, with the seconds of a step by the number of workers."""
    step_seconds = steps[WORKERS]
    scaling = scaling_of(steps, WORKERS - len(KILLS), WORKERS)
    scenario = Scenario(
        demo_workload(COMMON, step_seconds, scaling),
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
        "recoveries": [
            seconds + step_seconds * (WORKERS / one.members) ** scaling  # with the step that is taken again
            for seconds, one in zip(outcome.recovery_seconds, resumed, strict=True)
        ],
        "events": [(one.step, other.members) for one, other in zip(lost, resumed, strict=True)],
    }


if __name__ == "__main__":
    main()
