"""Real runs of the demo with a schedule of kills, compared with the simulator's predictions.

    python benches/bench_simulate.py [--presets auto gemini ...] [--rounds 5] [--json PATH]

Constants come from runs of each preset in which other workers die at other steps (`evermoe measure` makes such a run of
`auto`): the time of each phase of a recovery, and of a step of four, three and two workers, which share the processors.
Each round has one run of both kinds, in alternating order, as the speed of a machine changes over time. The result is
the median of the rounds' errors. The goal is a total time within 10 %; each recovery, from the kill until the repeated
step is taken, within 25 %; and the same lost steps and remaining members.
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
from evermoe.demo.summary import episodes
from evermoe.planning.presets import PRESET_NAMES
from evermoe.simulate import Constants, Failure, Scenario, simulate
from evermoe.simulate.scenario import SimulatedOptions

WORKERS, STEPS = 4, 40
KILLS = ((1, 12), (3, 26))
"""Worker and step of each kill. The last leaves two workers."""
MEASURED = ["--workers", str(WORKERS), "--steps", "36", "--kill", "2@12", "--kill", "0@24"]
COMMON = ["--no-join", "--no-baseline", "--hidden", "64", "--intermediate", "128"]
TOTAL, RECOVERY = 0.10, 0.25
"""Errors that the goal allows."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=PRESET_NAMES, default=list(PRESET_NAMES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    columns = {"preset": "s", "real s": "8.2f", "predicted s": "12.2f", "error": "7.1%"}
    columns |= {"recoveries s": "s", "predicted": "s", "worst": "7.1%", "same events": "s", "goal met": "s"}
    table = Table(f"{WORKERS} workers, {STEPS} steps, kills {KILLS}", columns)
    for preset in arguments.presets:
        table.add(**compare(preset, arguments.rounds))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table.rows, indent=2) + "\n")


def compare(preset, rounds):
    """Alternate runs for the constants with real runs, and predict the latter. Return medians over the rounds."""
    console, rows = Console(quiet=True), []
    for number in range(rounds):
        pair = {}
        for kind in ("measured", "real") if number % 2 == 0 else ("real", "measured"):
            pair[kind] = {"measured": measure, "real": run}[kind](["--preset", preset, *COMMON], console)
        rows.append((predict(preset, *pair["measured"]), pair["real"]))
    is_same = all(predicted["events"] == real["events"] for predicted, real in rows)
    if not is_same:
        return {
            "preset": preset,
            "same events": f"no: {[(p['events'], r['events']) for p, r in rows]}",
            "goal met": "no",
        }
    total_error = statistics.median(predicted["total"] / real["total"] - 1 for predicted, real in rows)
    pairs = [list(zip(p["recoveries"], r["recoveries"], strict=True)) for p, r in rows]
    errors = [statistics.median(one / other - 1 for one, other in each) for each in zip(*pairs, strict=True)]
    seconds = [[statistics.median(column) for column in zip(*each, strict=True)] for each in zip(*pairs, strict=True)]
    worst = max(map(abs, errors))
    return {
        "preset": preset,
        "real s": statistics.median(real["total"] for _, real in rows),
        "predicted s": statistics.median(predicted["total"] for predicted, _ in rows),
        "error": total_error,
        "recoveries s": " ".join(f"{real:.2f}" for _, real in seconds),
        "predicted": " ".join(f"{predicted:.2f}" for predicted, _ in seconds),
        "worst": worst,
        "same events": "yes",
        "goal met": "yes" if abs(total_error) <= TOTAL and worst <= RECOVERY else "no",
    }


def measure(flags, console):
    """Return constants, and the seconds of a step by the number of workers."""
    constants, details = measure_session(console, [*MEASURED, *flags])
    return details["step_seconds"], replace(Constants(), **(constants | {"start_seconds": 0.0}))


def run(flags, console):
    """Run the demo. Return its total seconds, those of each recovery, and the steps and members of the events."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    killed = [part for worker, step in KILLS for part in ("--kill", f"{worker}@{step}")]
    options = parser.parse_args([*flags, "--workers", str(WORKERS), "--steps", str(STEPS), *killed])
    kills = check(options)
    with tempfile.TemporaryDirectory() as folder:
        events = Run(options, Path(folder), console=console, title="real").run_workers(
            kills, None, options.steps, options.replication
        )
    begun = min(event["time"] for rows in events.values() for event in rows if event["event"] == "begin")
    taken = max(event["time"] for rows in events.values() for event in rows if event["event"] == "update")
    found = episodes(events)
    return {
        "total": taken - begun,
        "recoveries": [episode.total_seconds for episode in found],
        "events": [(episode.step, episode.members) for episode in found],
    }


def predict(preset, steps, constants):
    """Simulate the same run, given the seconds of a step by the number of workers. Return what `run` returns."""
    step_seconds = steps[WORKERS]
    scaling = scaling_of(steps, WORKERS - len(KILLS), WORKERS)
    scenario = Scenario(
        demo_workload(COMMON, step_seconds, scaling),
        nodes=WORKERS,
        steps=STEPS,
        failures=(Failure.in_steps([(step, [worker]) for worker, step in KILLS]),),
        constants=constants,
        options=SimulatedOptions(rejoin_timeout=5.0),
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
