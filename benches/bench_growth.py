"""Growth of a member's cost in a recovery with members and experts, and of the planners up to 10,000 nodes.

    python benches/bench_growth.py [--only recovery planners live] [--layers 24] [--members 16 32 ...]

- recovery: the work of one member between the agreement on the survivors and the first copy, after one node has died.
  It has the state of one process and the inventories of all members, in nodes of 8; no member is started. "KB" is what
  each member sends, and "MB" what each member receives from all. Columns are milliseconds of processor time.
- planners: placement, copies and migration of one layer, and their peak memory.
- live: runs of the demo by workers, experts and bytes of state, in which a worker is killed: a step of the same batch,
  and the phases of the recovery, in wall-clock milliseconds. All workers share this machine's processors. So, if the
  work of a phase does not grow with the workers, `w` workers take `w` times as long.

The exponent below each table is the slope of log(column) over log(size), from the larger two thirds of the sizes: 1
means that twice the size takes twice as long. Processor times are medians over three runs on one thread. `live` is one
run; no assertion depends on it.
"""

import argparse
import json
import math
import resource
import statistics
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from rich.console import Console
from torch import nn

import evermoe
from common import Table, demo_workload
from evermoe.cli.measurements import measure_session
from evermoe.config.placement import Placement
from evermoe.copies.protection_inputs import current_coverage, missing_bytes, planned_coverage, unit_infos
from evermoe.planning import allocate, migrate, place
from evermoe.planning.holders import copy_holders
from evermoe.planning.presets import PRESET_NAMES
from evermoe.planning.protection import RankInfo, plan_protection
from evermoe.planning.recovery import recovery_plan
from evermoe.recovery.survey import Holding, Inventory, Standing, usable
from evermoe.recovery.target import ExpertTarget
from evermoe.state.stored import KeptCopies
from evermoe.state.training_state import TrainingState
from evermoe.state.version import version_of

KINDS = ["recovery", "planners", "live"]
SESSION = ["--no-join", "--no-baseline", "--hang-timeout", "60"]
"""Flags for the demo."""
RANKS_OF_NODE, COPIES, RUNS = 8, 2, 3
DENSE_OF_LAYER = 4
NOW = version_of(1, 9)
PARTS = ("read", "usable", "version", "place", "needs", "plan", "protect", "covered", "covered now", "missing")


def model(layers, experts):
    """Return a MoE model with the units of a large one, but hardly any bytes: each unit is a single number."""
    blocks = [
        nn.ModuleDict(
            {"moe": evermoe.MoE(1, 1, experts)} | {f"dense{n}": nn.Linear(1, 1) for n in range(DENSE_OF_LAYER)}
        )
        for _ in range(layers)
    ]
    return nn.ModuleList(blocks)


class Job:
    """A job after the loss of one node, as one of its members sees it."""

    def __init__(self, members, layers, experts):
        built = model(layers, experts)
        self.state = TrainingState(built, evermoe.optim.AdamW(built.parameters()))
        everyone = members + RANKS_OF_NODE
        self.nodes = [f"n{rank // RANKS_OF_NODE:05}" for rank in range(everyone)]
        load_LE = np.random.default_rng(0).gamma(1.0, 100.0, (layers, experts)).tolist()
        newborn = [Inventory(Standing(0, False), [], [], True, load=load_LE) for _ in range(everyone)]
        before = self._target(self.nodes)
        placement = before.place(0, newborn)
        needs = [before.needs(placement, rank) for rank in range(everyone)]
        self.ranks = [RankInfo(node, 1 << 40, link=(5e-5, 1e9)) for node in self.nodes]
        plan = plan_protection("auto", self.infos(placement, everyone), self.ranks, replication=COPIES, budget=0.01)
        numbers = {unit.name: number for number, unit in enumerate(self.state.catalog.units)}
        holdings = [[Holding(unit, NOW, numbers[unit], "active") for unit in units] for units in needs]
        for each in plan.units:
            for holder in each.holders:
                holdings[holder].append(Holding(each.unit, NOW, numbers[each.unit], "replayed"))
        self.inventories = [Inventory(Standing(NOW, True), held, [], True) for held in holdings[:members]]
        self.inventories[0].load = load_LE
        self.nodes, self.ranks = self.nodes[:members], self.ranks[:members]
        self.target = self._target(self.nodes)

    def _target(self, nodes):
        group = SimpleNamespace(rank=1, size=len(nodes))  # rank 0 would log a warning
        return ExpertTarget(self.state, group, nodes, Placement(), None)

    def infos(self, placement, members):
        """Return all units and the ranks that train them."""
        active = {unit: tuple(range(members)) for unit in self.state.catalog.dense()}
        active |= {
            unit: tuple(np.flatnonzero(placement[path][:, expert]).tolist())
            for path, layer in self.state.layers.items()
            for expert, unit in enumerate(layer_units(self.state, path, layer))
        }
        self.active = active
        return unit_infos(self.state, active, [(100.0, True)] * len(self.state.catalog.units))


def layer_units(state, path, layer):
    """Return the names of the units of a layer's experts."""
    names = [unit.name for unit in state.catalog.units if unit.layer == path]
    assert len(names) == layer.num_experts
    return names


def recovery(job):
    """Return the seconds of one member by part, and the bytes that it sends and receives."""
    sizes, members = dict(job.state.catalog.sizes()), len(job.inventories)
    texts = [inventory.to_bytes() for inventory in job.inventories]
    nothing = [[] for _ in range(members)]
    found, seconds = {}, {}

    def part(name, function):
        start = time.process_time()
        found[name] = function()
        seconds[name] = (time.process_time() - start) * 1e3

    part("read", lambda: [Inventory.from_bytes(text) for text in texts])
    part("usable", lambda: usable(job.inventories, set()))
    part("version", lambda: recovery_plan(list(sizes.items()), found["usable"], nothing))
    part("place", lambda: job.target.place(NOW, job.inventories))
    part("needs", lambda: [job.target.needs(found["place"], rank) for rank in range(members)])
    part("plan", lambda: recovery_plan(list(sizes.items()), found["usable"], found["needs"]))
    infos = job.infos(found["place"], members)
    part("protect", lambda: plan_protection("auto", infos, job.ranks, replication=COPIES, budget=0.01))
    copies = KeptCopies([set(units) for units in found["needs"]], 0, {})
    part("covered", lambda: planned_coverage(found["protect"], job.active, job.ranks))
    part("covered now", lambda: current_coverage(found["protect"], job.active, job.ranks, copies))
    part("missing", lambda: missing_bytes(found["protect"], sizes, copies))
    assert found["plan"].version == NOW, "the loss of one node must not lose a step"
    assert not found["plan"].lost and not found["plan"].conflicts
    return seconds, statistics.mean(map(len, texts)), sum(map(len, texts))


def grow_recovery(title, layers, settings):
    """Print a table over members or experts."""
    columns = {
        "members": "8d",
        "experts": "8d",
        "KB": "8.1f",
        "MB": "8.2f",
        **dict.fromkeys(PARTS, "8.1f"),
        "ms": "9.1f",
    }
    table = Table(title, columns)
    for members, experts in settings:
        job = Job(members, layers, experts)
        runs = [recovery(job) for _ in range(RUNS)]
        parts = {name: statistics.median(seconds[name] for seconds, *_ in runs) for name in PARTS}
        _, mine, told = runs[0]
        row = {"members": members, "experts": experts, "KB": mine / 1e3, "MB": told / 1e6}
        table.add(**row, **parts, ms=sum(parts.values()))
    return table


def grow_planners(nodes_list, experts):
    """Print the milliseconds of the planners for one layer, and the peak memory of the process."""
    columns = {"nodes": "8d", "experts": "8d", "allocate": "9.2f", "place": "9.2f", "again": "9.2f", "migrate": "9.2f"}
    table = Table("One layer: milliseconds", columns | {"copies": "9.2f", "GiB": "7.2f"})
    load_E = np.random.default_rng(0).gamma(1.0, 100.0, experts)
    for nodes in nodes_list:
        slots = max(2, math.ceil(2 * experts / nodes))
        rows = [planners(load_E, nodes, slots) for _ in range(RUNS)]
        row = {name: statistics.median(each[name] for each in rows) for name in rows[0]}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
        table.add(nodes=nodes, experts=experts, GiB=peak, **row)
    return table


def planners(load_E, nodes, slots):
    """Return the milliseconds of each planner for one layer."""
    drifted_E = load_E * np.exp(0.05 * np.random.default_rng(1).standard_normal(len(load_E)))
    names = [f"n{node:05}" for node in range(nodes)]
    ms, found = {}, {}

    def part(name, function):
        start = time.process_time()
        found[name] = function()
        ms[name] = (time.process_time() - start) * 1e3

    part("allocate", lambda: allocate(load_E, nodes, slots, 2))
    part("place", lambda: place(found["allocate"], nodes, slots, load=load_E).matrix)
    before_NE = found["place"]
    replicas_E = allocate(drifted_E, nodes, slots, 2, before_NE.sum(0))
    part("again", lambda: place(replicas_E, nodes, slots, "balanced", drifted_E, before_NE).matrix)
    part("migrate", lambda: migrate(before_NE, found["again"], np.ones(len(load_E), np.int64)))
    part("copies", lambda: copy_holders(names, 2))
    return ms


def grow_live(workers_list, experts_list, widths, session):
    """Recover real sessions with these flags. Print the milliseconds of each phase, and of a step before the kill."""
    phases = ("detect", "agree", "rebuild", "fetch", "verify", "repeat")
    columns = {"workers": "8d", "experts": "8d", "MB": "8.1f"} | dict.fromkeys(("step", *phases), "9.1f")
    settings = {
        "workers": [(workers, 8, 32) for workers in workers_list],
        "experts": [(4, experts, 32) for experts in experts_list],
        "MB": [(3, 16, width) for width in widths],
    }
    found = {}
    for size, cases in settings.items():
        if not cases:
            continue
        table = Table(f"Live sessions: milliseconds, by {size}", columns)
        for case in cases:
            table.add(**live(*case, phases, session))
        slopes = exponents(table, size, ["step", *phases])
        found[f"live by {size}"] = {"rows": table.rows, "exponents": slopes}
    return found


def live(workers, experts, width, phases, session):
    """Run the demo, in which a worker is killed half-way."""
    model = ["--experts", str(experts), "--hidden", str(width), "--intermediate", str(width), "--layers", "2"]
    _, details = measure_session(Console(quiet=True), ["--workers", str(workers), *session, *SESSION, *model])
    (seconds,) = details["phases"]
    row = {phase: 1e3 * seconds.get(phase, 0.0) for phase in phases}
    sizes = demo_workload(model, 1.0, 0.0)
    state = sizes.parameters * sizes.state_bytes / 1e6
    return row | {"workers": workers, "experts": experts, "MB": state, "step": 1e3 * details["step_seconds"][workers]}


def session_flags(arguments):
    """Return the flags of the demo, except its sizes."""
    flags = ["--preset", arguments.preset, "--replication", str(arguments.replication), "--batch", str(arguments.batch)]
    flags += ["--expert-slots", str(arguments.expert_slots)] if arguments.expert_slots else []
    return [*flags, "--steps", str(arguments.steps), "--kill", f"1@{arguments.steps // 2}"]


def exponents(table, size, columns):
    """Print and return the slopes of the columns over a size, from the larger two thirds of the sizes."""
    rows = table.rows[-max(2, 2 * len(table.rows) // 3) :]
    x = np.log([row[size] for row in rows])
    slopes = {name: float(np.polyfit(x, np.log([max(row[name], 1e-3) for row in rows]), 1)[0]) for name in columns}
    print(f"exponents over {size}: " + ", ".join(f"{name} {slope:.2f}" for name, slope in slopes.items()) + "\n")
    return slopes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--members", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument(
        "--experts", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024], help="experts of each layer"
    )
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[32, 100, 320, 1000, 3200, 10_000], help="nodes, for planners"
    )
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4, 8, 16, 32], help="workers, for live")
    parser.add_argument(
        "--live-experts", type=int, nargs="*", default=[16, 64, 256, 1024], help="experts, for live with 4 workers"
    )
    widths = [64, 128, 256, 512, 1024]
    parser.add_argument(
        "--widths", type=int, nargs="*", default=widths, help="widths of the model, for live with 3 workers"
    )
    parser.add_argument("--steps", type=int, default=24, help="steps, for live; a worker dies half-way (%(default)s)")
    parser.add_argument("--preset", choices=PRESET_NAMES, default="auto", help="preset, for live (%(default)s)")
    parser.add_argument(
        "--expert-slots",
        type=int,
        default=0,
        help="expert slots per worker and layer, for live (0: the demo's default)",
    )
    parser.add_argument("--replication", type=int, default=2, help="nodes that hold each unit, for live (%(default)s)")
    parser.add_argument("--batch", type=int, default=24, help="samples per step, for live (%(default)s)")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    columns = ["KB", "MB", *PARTS, "ms"]
    if "recovery" in arguments.only:
        for size, settings in (
            ("members", [(members, 64) for members in arguments.members]),
            ("experts", [(32, experts) for experts in arguments.experts]),
        ):
            table = grow_recovery(
                f"A recovery of {arguments.layers} layers: milliseconds, by {size}", arguments.layers, settings
            )
            found[size] = {"rows": table.rows, "exponents": exponents(table, size, columns)}
    if "planners" in arguments.only:
        table = grow_planners(arguments.nodes, 256)
        slopes = exponents(table, "nodes", ["allocate", "place", "again", "migrate", "copies"])
        found["nodes"] = {"rows": table.rows, "exponents": slopes}
    if "live" in arguments.only:
        found |= grow_live(arguments.workers, arguments.live_experts, arguments.widths, session_flags(arguments))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
