"""A comparison on real processes beside a simulation of the same failures: do ways to survive rank alike?

    evermoe compare --trace p3-trace.csv --speedup 60 --trace-start 1920 ... --json real.json
    python benches/bench_spot.py real.json [more.json ...] [--json PATH]

Constants, and a step of four and of three workers, come from a real session of the same model in which a worker is
killed (`measure_session`), and two that save after every step and never (`measure_persisting`). The simulated job has
the seconds of the schedule in `real.json`. Several files are runs of the same comparison: medians count, and the
spread is the most less the least, over the median. Goodput is that of steps that count, over that of the best. Ranks
go from 1 for the most; ways share one that differ by less than 15 %, or than the median way's runs do where that is
more. evermoe's presets, DS (`restart`) and DS(FT) (`restart-groups`) are simulated; torchft and
NVIDIA's extension are not.
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
"""Names of the simulation for those of the comparison; presets have the same."""
NOT_SIMULATED = ("torchft", "nvrx")
SAME = 0.15
"""Ways of which one has at most so much less goodput than another share a rank."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("real", nargs="+", help="what evermoe compare --json has written, of each run")
    parser.add_argument("--json", help="where to write the figures")
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
    columns = {"way": "s", "runs": "5d", "tokens/s": "9.0f", "spread": "7.0%", "of best": "8.0%", "rank": "5d"}
    columns |= {
        "simulated": "10.0f",
        "of its best": "11.0%",
        "its rank": "9d",
        "steps lost": "11.0f",
        "simulated lost": "15d",
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
                "of its best": predicted[name] / max(predicted.values()),
                "its rank": its_ranks[name],
                "steps lost": statistics.median(row["lost_steps"] for row in real[name]),
                "simulated lost": simulated[name].undone_steps,
            }
        )
    print(f"Ways share a rank below {same:.0%}; a save takes {1e3 * scenario.constants.persist_seconds:.0f} ms.")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table.rows, indent=2) + "\n")


def first_step(constants):
    """Seconds of the simulation before the first step, from which the schedule and the real run count."""
    return constants.start_seconds + constants.rebuild_seconds


def scenario_of(options, schedule):
    """The same job and failures for the simulator, with this machine's constants."""
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
    """Each way's rank; it shares that of the best way that it is hardly below."""
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
