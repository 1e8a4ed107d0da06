"""Whether real and simulated runs rank methods of recovery the same way, under the same failures.

    python -m benches.compare --trace p3-trace.csv --speedup 60 --trace-start 1920 ... --json real.json
    python benches/bench_spot.py real.json [more.json ...] [--json PATH]

Constants, and the time of a step of four and of three workers, come from a real session of the same model in which a
worker is killed (`measure_session`), and from two sessions that save after every step and never (`measure_persisting`).
The simulated job lasts as long as the schedule in `real.json`. If several files are given, they are runs of the same
comparison: medians count, and the spread is the largest less the smallest, over the median.

Goodput is that of steps that count, relative to the best method. Ranks begin at 1 for the best. Methods share a rank if
they differ by less than 15 %, or by less than the runs of the median method do if that is more. evermoe's presets, DS
(`restart`) and DS(FT) (`restart-groups`) are simulated; torchft and NVIDIA's extension are not.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from common import Table, demo_workload, scaling_of
from evermoe.cli.measurements import measure_persisting, measure_session
from evermoe.simulate import Constants, Failure, Scenario, simulate
from evermoe.simulate.scenario import SimulatedOptions

SCHEMES = {"ds": "restart", "ds-ft": "restart-groups"}
"""Names of the simulation by those of the comparison. Names of presets are the same in both."""
NOT_SIMULATED = ("torchft", "nvrx")
SAME = 0.15
"""Methods share a rank if their goodput differs by at most this fraction."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("real", nargs="+", help="files written by python -m benches.compare --json, one per run")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    runs = [json.loads(Path(path).read_text()) for path in arguments.real]
    found = runs[0]
    options = argparse.Namespace(**found["options"])
    real = {
        name: [run["candidates"][name]["outcome"] for run in runs if name in run["candidates"]]
        for name in found["candidates"]
        if name not in NOT_SIMULATED
    }
    scenario = scenario_of(options, found["schedule"])
    simulated = {name: simulate(scenario, SCHEMES.get(name, name), seed=0) for name in real}
    each = {name: [row["tokens_per_second"] for row in rows] for name, rows in real.items()}
    goodput = {name: statistics.median(values) for name, values in each.items()}
    spread = {name: (max(values) - min(values)) / goodput[name] for name, values in each.items() if len(values) > 1}
    same = max(SAME, statistics.median(spread.values())) if spread else SAME
    begin = first_step(scenario.constants)
    predicted = {
        name: outcome.goodput_tokens_per_second * outcome.seconds / (outcome.seconds - begin)
        for name, outcome in simulated.items()
    }
    columns = {"method": "s", "runs": "5d", "tokens/s": "9.0f", "spread": "7.0%", "of best": "8.0%", "rank": "5d"}
    columns |= {
        "simulated": "10.0f",
        "simulated, of best": "18.0%",
        "simulated rank": "15d",
        "lost steps": "11.0f",
        "simulated lost steps": "21d",
    }
    table = Table(f"{options.steps} steps on {options.workers} workers, {len(found['schedule'])} changes", columns)
    ranks, its_ranks = ranks_of(goodput, same), ranks_of(predicted, same)
    for name in sorted(real, key=goodput.get, reverse=True):
        table.add(
            **{
                "way": name,
                "runs": len(real[name]),
                "tokens/s": goodput[name],
                "spread": spread.get(name),
                "of best": goodput[name] / max(goodput.values()),
                "rank": ranks[name],
                "simulated": predicted[name],
                "simulated, of best": predicted[name] / max(predicted.values()),
                "simulated rank": its_ranks[name],
                "lost steps": statistics.median(row["lost_steps"] for row in real[name]),
                "simulated lost steps": simulated[name].undone_steps,
            }
        )
    milliseconds = 1e3 * scenario.constants.persist_seconds
    print(f"Methods share a rank if they differ by less than {same:.0%}; a save takes {milliseconds:.0f} ms.")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table.rows, indent=2) + "\n")


def first_step(constants):
    """Return the simulated seconds before the first step, where the times of the schedule and the real run begin."""
    return constants.start_seconds + constants.rebuild_seconds


def scenario_of(options, schedule):
    """Return the same job and failures for the simulator, with this machine's constants."""
    sizes = ("layers", "hidden", "heads", "intermediate", "experts", "top_k", "sequence", "batch")
    model = [part for name in sizes for part in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    slots = options.expert_slots or options.experts // options.expert_parallel
    common = ["--workers", str(options.workers), "--expert-slots", str(slots), *model]
    session = ["--steps", "36", "--kill", "1@12", "--no-join", "--no-baseline"]
    constants, details = measure_session(Console(quiet=True), [*session, *common])
    constants |= measure_persisting(Console(quiet=True), common)
    steps, workers = details["step_seconds"], options.workers
    costs = replace(Constants(), **constants)
    begin = first_step(costs)
    events = [(0.0, True, list(range(workers)))]
    events += [(begin + change["seconds"], change["action"] == "join", [change["worker"]]) for change in schedule]
    return Scenario(
        demo_workload(model, steps[workers], scaling_of(steps, workers - 1, workers)),
        nodes=workers,
        spares=max(change["worker"] for change in schedule) + 1 - workers,
        days=(begin + options.limit) / 86_400,
        steps=options.steps,
        failures=(Failure.at_times(events),),
        constants=costs,
        options=SimulatedOptions(
            replication=options.replication,
            expert_slots=slots,
            checkpoint_interval=options.ft_checkpoint_interval,
        ),
        expert_parallel=options.expert_parallel,
        restart_interval=options.checkpoint_interval,
        join_seconds=0.0,
    )


def ranks_of(values, same):
    """Return the rank of each method. Methods that differ by less than `same` share that of the best of them."""
    ranks, leader = {}, None
    for number, name in enumerate(sorted(values, key=values.get, reverse=True), 1):
        if leader is None or values[name] < values[leader] * (1 - same):
            leader = name
            ranks[name] = number
        else:
            ranks[name] = ranks[leader]
    return ranks


if __name__ == "__main__":
    main()
