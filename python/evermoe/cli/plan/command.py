"""Checks, files and exit code of `evermoe plan`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np

import evermoe
from evermoe.cli.plan.advice import advise, best
from evermoe.cli.plan.auto_plan import AutoReport, make_layout, plan_auto
from evermoe.cli.plan.compare import Cluster, Comparison, Result, compare
from evermoe.cli.plan.compare_presets import PresetRow, compare_presets
from evermoe.cli.plan.fit import fit_json, parse_fit, plan_fit, refuse_fit_flags
from evermoe.cli.plan.loads import Load, is_file, read_load
from evermoe.cli.plan.setting import parse_setting
from evermoe.cli.plan.show import show
from evermoe.cli.plan.show_copies import advise_copies, show_copies
from evermoe.cli.plan.show_fit import show_fit
from evermoe.cli.results import console, write_all
from evermoe.options import require
from evermoe.planning.placement import POLICIES

MAX_FAILURES = 64
"""Largest count of numbers of failures in one call: columns of the report, lines of the plot."""
MAX_NODES = 1 << 20


def main(options: argparse.Namespace) -> int:
    """Plan, write the files and print the report. Files are written completely or not at all.

    Raises:
        ValueError: with the flag, what was expected and what came.
    """
    if options.model is not None:
        return _fit(options)
    refuse_fit_flags(options)
    slots = "--expert-slots, the expert replicas of a layer that a node holds (or --model, for its memory)"
    require(
        {
            "--nodes, the machines that fail on their own": options.nodes,
            slots: options.expert_slots,
            "--experts, those of each layer (or --load with a file)": True
            if is_file(options.load)
            else options.experts,
        }
    )
    options.min_replicas = 2 if options.min_replicas is None else options.min_replicas
    cluster = parse_cluster(options)
    draw = _plotter(options)
    load_LE = read_load(options.load, options.layers, options.experts, options.seed)
    setting = parse_setting(options, *load_LE.shape)
    comparison = compare(load_LE, cluster, tuple(dict.fromkeys(options.policy or POLICIES)))
    copies: tuple[AutoReport, list[PresetRow]] | None = None
    if setting is not None:
        layout, placed = make_layout(load_LE, comparison, setting)
        auto = plan_auto(layout, placed.policy)
        copies = auto, compare_presets(layout)
    files: dict[str, bytes] = {}
    if draw is not None:
        files["--plot"] = draw(comparison)
    if options.json:
        found = as_json(options, load_LE, comparison) | ({"copies": copies_json(*copies)} if copies else {})
        files["--json"] = (json.dumps(found) + "\n").encode()
    write_all({flag: (getattr(options, flag[2:]), content) for flag, content in files.items()})
    out = console()
    show(out, options.load, comparison)
    if copies is not None:
        show_copies(out, *copies)
    for flag in files:
        out.print(f"wrote {getattr(options, flag[2:])}", soft_wrap=True, markup=False)
    return 0


def _fit(options: argparse.Namespace) -> int:
    """Answer `--model`."""
    report = plan_fit(parse_fit(options))
    if options.json:
        write_all({"--json": (options.json, (json.dumps(fit_json(report)) + "\n").encode())})
    out = console()
    show_fit(out, report)
    if options.json:
        out.print(f"wrote {options.json}", soft_wrap=True, markup=False)
    return 0


def parse_cluster(options: argparse.Namespace) -> Cluster:
    """Check the flags about machines and failures, and return them."""
    for name, most in (
        ("nodes", MAX_NODES),
        ("expert_slots", 1 << 24),
        ("min_replicas", 1 << 24),
        ("domain_size", MAX_NODES),
    ):
        value = getattr(options, name)
        if not 1 <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')}: expected 1 to {most}, got {value}")
    if options.domain_size > options.nodes:
        raise ValueError(
            f"--domain-size: expected at most {options.nodes}, the number of nodes, got {options.domain_size}"
        )
    domains = -(-options.nodes // options.domain_size)
    failures = tuple(range(1, min(3, domains) + 1)) if options.fail is None else parse_failures(options.fail, domains)
    return Cluster(options.nodes, options.expert_slots, options.min_replicas, options.domain_size, failures)


def parse_failures(text: str, most: int) -> tuple[int, ...]:
    """Return the numbers that `--fail` names.

        >>> parse_failures("1..3,6", most=8)
        (1, 2, 3, 6)

    Raises:
        ValueError: not of this form, below 1, above `most`, or more than 64 of them.
    """
    expected = f"--fail {text}: expected numbers from 1 to {most}, such as 2, or 1..4, or 1,3"
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?", part.strip())
        if match is None:
            raise ValueError(expected)
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= most:
            raise ValueError(expected)
        if last - first >= MAX_FAILURES:
            raise ValueError(f"--fail {text}: expected at most {MAX_FAILURES} numbers")
        found.update(range(first, last + 1))
    if len(found) > MAX_FAILURES:
        raise ValueError(f"--fail {text}: expected at most {MAX_FAILURES} numbers")
    return tuple(sorted(found))


def _plotter(options: argparse.Namespace) -> Callable[[Comparison], bytes] | None:
    """Return a function that draws a PNG in memory. The import comes first, so that missing matplotlib is reported
    early."""
    if not options.plot:
        return None
    from evermoe.cli.plan.plot import plot_plan

    def draw(comparison: Comparison) -> bytes:
        picture = BytesIO()
        plot_plan(comparison, picture)
        return picture.getvalue()

    return draw


# ---- JSON


def as_json(options: argparse.Namespace, load_LE: Load, comparison: Comparison) -> dict[str, Any]:
    """Return everything, JSON-able; `experts_of_nodes` lists for each layer and node its experts, one entry per
    replica."""
    cluster = comparison.cluster
    chosen, _ = best(comparison)
    return {
        "evermoe": evermoe.__version__,
        "nodes": cluster.nodes,
        "slots": cluster.slots,
        "layers": load_LE.shape[0],
        "experts": load_LE.shape[1],
        "min_replicas": cluster.min_replicas,
        "domain_size": cluster.domain_size,
        "failures": cluster.failures,
        "load_source": options.load,
        "seed": options.seed,
        "load": load_LE.tolist(),
        "load_summary": vars(comparison.load),
        "replicas": comparison.replicas.tolist(),
        "slots_for_min_replicas": cluster.slots_for(load_LE.shape[1], cluster.min_replicas),
        "heavy": comparison.heavy and vars(comparison.heavy),
        "policies": {result.policy: _result_json(result, cluster) for result in comparison.results},
        "recommended": chosen.policy,
        "advice": advise(comparison),
    }


def _result_json(result: Result, cluster: Cluster) -> dict[str, Any]:
    return {
        "imbalance_even": result.even,
        "imbalance_balanced": result.balanced,
        "distinct_domains": result.distinct,
        "survival": [
            {"failures": failures, **vars(survival)}
            for failures, survival in zip(cluster.failures, result.survival, strict=True)
        ],
        "seconds_per_layer": result.seconds,
        "experts_of_nodes": [
            [np.repeat(np.arange(len(row)), row).tolist() for row in matrix] for matrix in result.matrices
        ],
    }


def copies_json(auto: AutoReport, presets: list[PresetRow]) -> dict[str, Any]:
    """Return the result of `--copies`; the units are the experts, layer by layer, then the dense part."""
    plan = auto.plan
    return {
        "setting": vars(auto.layout.setting),
        "placement": auto.policy,
        "parameters": auto.layout.parameters,
        "kinds": [vars(row) for row in auto.kinds],
        "units": [
            {"name": auto.layout.unit_name(index)}
            | choice._asdict()
            | {"holders": [holder._asdict() for holder in choice.holders]}
            for index, choice in enumerate(plan.units)
        ],
        "nodes": [node._asdict() for node in plan.nodes],
        "delay_seconds": plan.delay_seconds,
        "lost_tokens": plan.lost_tokens,
        "survival": [
            {
                "failures": row.failures,
                "without_loss": vars(row.without_loss),
                "with_loss": vars(row.with_loss),
            }
            for row in auto.survival
        ],
        "summary": plan.summary,
        "examples": [vars(example) for example in auto.examples],
        "presets": [vars(row) for row in presets],
        "advice": advise_copies(auto, presets),
    }
