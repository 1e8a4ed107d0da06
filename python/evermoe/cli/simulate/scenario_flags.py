"""Flags of `evermoe simulate`, and the scenario that they describe."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from evermoe.options import checked, require
from evermoe.planning.models import MODELS, find_model
from evermoe.simulate import SCHEMES, Constants, Failure, Scenario, Workload, read_constants
from evermoe.simulate.scenario import DAY, SimulatedOptions

N = TypeVar("N", int, float)
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY}
MAX_SEEDS = 1000
CLUSTER_FIELDS = ("nodes", "spares", "devices", "nodes_per_rack", "host_bytes")
OPTIONS = [each.name for each in fields(SimulatedOptions) if each.name not in ("shard_optimizer", "replans")]
"""Options of a session that have no separate flag."""
DESCRIPTION = """\
Compare ways to survive on a cluster that fails: the presets of a session, and restarts from checkpoints. evermoe's
own planners and protocol decide, in simulated time. The duration of their decisions comes from a file of
evermoe measure, or from assumed constants. Nothing is started or trained.

  evermoe simulate --model mixtral-8x7b --nodes 64 --step-seconds 8 --mtbf 2h --days 7
  evermoe simulate --model gpt-l-moe --nodes 32 --step-seconds 0.5 --trace p3.csv --presets auto restart --plot p3.png
  evermoe simulate --model qwen3-30b-a3b --nodes 512 --step-seconds 10 --mtbf 10m --spares 8 --constants here.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `evermoe simulate`."""
    parser.description = DESCRIPTION
    _add_cluster(parser.add_argument_group("cluster"))
    _add_model(parser.add_argument_group("model and load"))
    _add_failures(parser.add_argument_group("failures"))
    runs = parser.add_argument_group("simulation")
    runs.add_argument(
        "--presets",
        nargs="+",
        choices=tuple(SCHEMES),
        metavar="NAME",
        help=f"presets to simulate: {', '.join(SCHEMES)} (default: all that support --shard-optimizer, if it is given)",
    )
    runs.add_argument("--days", type=float, default=1.0, help="simulated days (%(default)s)")
    runs.add_argument(
        "--seeds", type=int, default=3, help="runs of each preset, over which means are taken (%(default)s)"
    )
    runs.add_argument("--seed", type=int, default=0, help="seed of the first run (%(default)s)")
    runs.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"an option of the session: {', '.join(OPTIONS)}; repeatable",
    )
    runs.add_argument(
        "--shard-optimizer",
        action="store_true",
        help="keep the optimizer state of each dense module on one node (default: on every device)",
    )
    runs.add_argument(
        "--takes-over",
        action="store_true",
        help="newcomers take over the experts of lost nodes, and no others move; much faster to simulate on many nodes",
    )
    runs.add_argument(
        "--expert-parallel",
        type=int,
        metavar="NODES",
        help="nodes that share the experts, in restarts (2, or all if there are fewer)",
    )
    runs.add_argument(
        "--restart-interval",
        type=int,
        default=50,
        metavar="STEPS",
        help="steps between the checkpoints of restarts (%(default)s)",
    )
    results = parser.add_argument_group("results")
    results.add_argument("--plot", metavar="PATH", help="draw time by cause: a PNG file")
    results.add_argument("--json", metavar="PATH", help="write everything as JSON")


def _add_cluster(group: Any) -> None:
    group.add_argument(
        "--cluster", metavar="FILE", help=f"JSON with {', '.join(CLUSTER_FIELDS)}; flags take precedence"
    )
    group.add_argument("--nodes", type=int, help="machines that train; the devices of a machine fail together")
    group.add_argument("--spares", type=int, help="machines that stand by to replace lost ones (0)")
    group.add_argument(
        "--devices", type=int, metavar="DEVICES", help="devices of a node, each with its own process (1)"
    )
    group.add_argument("--nodes-per-rack", type=int, metavar="NODES", help="nodes that share a rack (0: no racks)")
    group.add_argument(
        "--constants", metavar="FILE", help="constants from evermoe measure (default: assumed constants)"
    )


def _add_model(group: Any) -> None:
    group.add_argument("--model", help=f"a JSON file, or one of {', '.join(MODELS)}")
    group.add_argument(
        "--step-seconds",
        type=float,
        metavar="SECONDS",
        help="duration of a step on all nodes, unless the file of --model has it",
    )
    group.add_argument("--tokens", type=int, help="tokens of a step, unless the file of --model has it (2^20)")
    group.add_argument(
        "--classes", type=int, help="number of classes of layers; layers of a class have the same load (1)"
    )
    group.add_argument(
        "--zipf", type=float, default=1.0, help="Zipf exponent of the experts' load; 0 is even (%(default)s)"
    )
    group.add_argument(
        "--drift",
        type=float,
        default=0.05,
        help="standard deviation of the change of the logarithm of an expert's load in 100 steps (%(default)s)",
    )
    group.add_argument(
        "--load-trace", metavar="FILE", help="JSON [[step, [tokens of each expert]], …] instead of a synthetic load"
    )


def _add_failures(group: Any) -> None:
    group.add_argument(
        "--mtbf", type=duration, metavar="TIME", help="mean time between two failures in the cluster, such as 10m"
    )
    group.add_argument(
        "--repair", type=repair, default=600.0, metavar="TIME", help="time until a lost node returns, or never (10m)"
    )
    group.add_argument(
        "--trace",
        nargs="+",
        metavar="FILE",
        help="arrivals and losses of nodes as recorded: Bamboo's CSV, or SkyPilot's JSON, one file per node",
    )
    group.add_argument("--rack-mtbf", type=duration, metavar="TIME", help="mean time between two failures of racks")
    group.add_argument(
        "--maintenance",
        metavar="EVERY,NODES,TIME",
        help="nodes are taken out with a notice: interval, number and duration, such as 1d,4,30m",
    )
    group.add_argument(
        "--stragglers",
        metavar="MTBF,FACTOR,TIME",
        help="nodes become slower for a while: mean interval, factor and duration, such as 2h,1.5,10m",
    )


def duration(text: str) -> float:
    """Return the seconds of a time such as 10m.

    >>> duration("90"), duration("10m"), duration("1.5h")
    (90.0, 600.0, 5400.0)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 10m, 1.5h or 2d, got {text!r}")
    return float(match[1]) * UNITS[match[2] or "s"]


def repair(text: str) -> float | None:
    """Return the seconds of a time, or None for never."""
    return None if text == "never" else duration(text)


def parse_scenario(options: argparse.Namespace) -> Scenario:
    """Return the scenario that the flags describe.

    Raises:
        ValueError: with the flag, what was expected and what came. OSError: a file cannot be read.
    """
    is_file = options.model is not None and _is_file(options.model)
    require(
        {
            "--model, a JSON file or a known model": options.model,
            "--step-seconds, those of a step on all nodes": True if is_file else options.step_seconds,
            "--nodes, the machines that train": True if options.cluster or options.trace else options.nodes,
        }
    )
    checked("--seeds", options.seeds, int, least=1, most=MAX_SEEDS)
    checked("--seed", options.seed, int, least=0)
    checked("--days", options.days, float, above=0)
    cluster = _cluster(options)
    failures = _failures(options, cluster)
    named = max((failure.most_nodes for failure in failures), default=0)
    cluster["nodes"] = checked("--nodes", cluster.get("nodes", named or None), int, least=1)
    if named > cluster["nodes"] + cluster.get("spares", 0):
        cluster["spares"] = named - cluster["nodes"]
    given = {name: getattr(options, name) for name in ("zipf", "drift", "expert_parallel", "restart_interval", "days")}
    return Scenario(
        workload=_workload(options),
        failures=failures,
        constants=read_constants(options.constants) if options.constants else Constants(),
        options=_session(options),
        load_trace=_load_trace(options.load_trace) if options.load_trace else (),
        **cluster,
        **given,
    )


def _cluster(options: argparse.Namespace) -> dict[str, int]:
    found: dict[str, int] = {}
    if options.cluster:
        data = _read_json(options.cluster, "--cluster")
        if not isinstance(data, dict) or (unknown := sorted(set(data) - set(CLUSTER_FIELDS))):
            what = unknown[0] if isinstance(data, dict) else type(data).__name__
            raise ValueError(
                f"--cluster {options.cluster}: expected an object with {', '.join(CLUSTER_FIELDS)}, got {what}"
            )
        found = {name: checked(f"--cluster: {name}", value, int, least=0) for name, value in data.items()}
    for name in ("nodes", "spares", "devices", "nodes_per_rack"):
        value = getattr(options, name)
        if value is not None:
            found[name] = checked(f"--{name.replace('_', '-')}", value, int, least=0)
    return found


def _read_json(path: str, flag: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{flag} {path}: expected JSON: {error}") from None


def _workload(options: argparse.Namespace) -> Workload:
    names = {"step_seconds": "step_seconds", "tokens": "tokens_per_step", "classes": "classes"}
    given = {field: getattr(options, flag) for flag, field in names.items() if getattr(options, flag) is not None}
    if _is_file(options.model):
        return Workload.read(options.model, **given)
    return Workload.preset(options.model, **given)


def _is_file(model: str) -> bool:
    return find_model(model) is None and Path(model).is_file()


def _failures(options: argparse.Namespace, cluster: dict[str, int]) -> tuple[Failure, ...]:
    found = []
    if options.mtbf is not None:
        found.append(Failure.poisson(mtbf_seconds=options.mtbf, repair_seconds=options.repair))
    if options.rack_mtbf is not None:
        nodes = checked("--nodes-per-rack, which --rack-mtbf needs", cluster.get("nodes_per_rack", 0), int, least=1)
        given = {"mtbf_seconds": options.rack_mtbf, "repair_seconds": options.repair}
        found.append(Failure.racks(nodes_per_rack=nodes, **given))
    if options.maintenance:
        every, nodes, seconds = _three("--maintenance", options.maintenance, int)
        found.append(Failure.maintenance(every_seconds=every, nodes=nodes, seconds=seconds))
    if options.stragglers:
        mtbf, factor, seconds = _three("--stragglers", options.stragglers, float)
        found.append(Failure.stragglers(mtbf_seconds=mtbf, factor=factor, seconds=seconds))
    if options.trace:
        found.append(Failure.trace(*options.trace))
    return tuple(found)


def _three(flag: str, text: str, kind: Callable[[str], N]) -> tuple[float, N, float]:
    """Parse a time, a number and a time."""
    try:
        first, number, last = text.split(",")
        return duration(first), kind(number), duration(last)
    except (argparse.ArgumentTypeError, ValueError):
        noun = "whole number" if kind is int else "number"
        raise ValueError(f"{flag}: expected a time, a {noun} and a time, such as 1d,4,30m, got {text!r}") from None


def _session(options: argparse.Namespace) -> SimulatedOptions:
    found: dict[str, Any] = {"shard_optimizer": options.shard_optimizer}
    for text in options.option:
        name, separator, value = text.partition("=")
        if not separator or name not in OPTIONS:
            raise ValueError(f"--option: expected NAME=VALUE with one of {', '.join(sorted(OPTIONS))}, got {text!r}")
        try:
            found[name] = json.loads(value.lower())
        except ValueError:
            raise ValueError(f"--option {name}: expected a number, true, false or null, got {value!r}") from None
    session = SimulatedOptions(**found)
    return replace(session, replans=False) if options.takes_over else session


def _load_trace(path: str) -> tuple[tuple[int, tuple[float, ...]], ...]:
    data = _read_json(path, "--load-trace")
    try:
        return tuple((int(step), tuple(map(float, tokens))) for step, tokens in data)
    except (TypeError, ValueError):
        raise ValueError(f"--load-trace {path}: expected [[step, [tokens of each expert]], …]") from None
