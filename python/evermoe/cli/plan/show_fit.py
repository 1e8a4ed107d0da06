"""The report of `evermoe plan --model` as text."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from evermoe.cli.plan.fit import MAX_NODES, FitReport
from evermoe.cli.plan.show import print_wrapped
from evermoe.cli.plan.show_copies import size
from evermoe.options import count
from evermoe.planning.footprint import Use
from evermoe.planning.models import ModelShape

PARTS = {
    "parameters": "parameters",
    "masters": "masters",
    "moments": "moments",
    "gradients": "gradients",
    "working": "working memory",
    "network": "NCCL's buffers",
    "fetched": "units that move",
    "replicas": "replicas of others",
    "log": "logged gradients",
    "messages": "messages",
    "buffers": "buffers",
    "libraries": "libraries",
    "snapshots": "shared memory",
}
"""Name of each part in the table."""
ON_GPU = ("parameters", "masters", "moments", "gradients", "working", "network")
"""Parts in device memory, where the device is a GPU."""
NAMES = {"start": "at the start", "step": "in training", "recovery": "in a recovery"}


def show_fit(console: Console, report: FitReport) -> None:
    """Print the facts, the verdict and the table."""
    for name, text in _facts(report):
        print_wrapped(console, f"{name:10}", text)
    console.print(_table(report))
    print_wrapped(console, "", _legend(report))


def _facts(report: FitReport) -> list[tuple[str, str]]:
    setting, shape, options = report.setting, report.setting.shape, report.setting.options
    each = options.unit_bytes + options.weight_bytes
    copies = "no copies" if not options.replication else f"preset {options.preset} with {options.replication} copies"
    slots = "a session's own slots" if options.expert_slots is None else f"{options.expert_slots} slots"
    sharding = "optimizer state sharded" if options.shard_optimizer else "optimizer state replicated"
    facts = [
        (
            "model",
            f"{setting.name}: {shape.parameters / 1e9:.4g} billion parameters, {shape.layers} × {shape.experts} "
            f"experts of {shape.expert_parameters / 1e6:.4g} million, {shape.dense_parameters / 1e6:.4g} million "
            f"others; {options.weights}, {each} bytes each with gradient, master and moments ({shape.source})",
        ),
        *_trained(shape),
        (
            "workers",
            f"{count(setting.nodes, 'node')} × {options.workers_per_node}, {size(setting.memory)} "
            f"each; {copies}, {sharding}, {slots}",
        ),
        ("fits", verdict(report)),
    ]
    if setting.is_on_gpu:
        host = max(_on_host(report.footprint.peak(phase, _on_host)[1]) for phase in report.peaks)
        facts.append(
            (
                "host",
                f"{size(host * options.workers_per_node)} of each node's host memory for copies and buffers of its "
                f"{count(options.workers_per_node, 'worker')}; --memory does not cover it: compare it with your nodes",
            )
        )
    return facts


def _trained(shape: ModelShape) -> list[tuple[str, str]]:
    if shape.trained_parameters == shape.parameters:
        return []
    trained, part = shape.trained_parameters, shape.trained_parameters / shape.parameters
    number = f"{trained / 1e9:.4g} billion" if trained >= 1e9 else f"{trained / 1e6:.4g} million"
    frozen = [f"the experts of {count(shape.frozen_layers, 'layer')}"] if shape.frozen_layers else []
    frozen += [f"{shape.frozen_dense_parameters / 1e6:.4g} million others"] if shape.frozen_dense_parameters else []
    return [
        (
            "trained",
            f"{number} parameters, {part:.3g} of all; frozen are {' and '.join(frozen)}, without gradients, masters "
            "and moments",
        )
    ]


def verdict(report: FitReport) -> str:
    """Return whether the model fits, and on how many nodes."""
    setting = report.setting
    peaks = ((setting.counted(use), phase) for phase, (_, use) in report.peaks.items())
    needed, phase = max(peaks)
    memory = "device memory" if setting.is_on_gpu else "memory, copies included,"
    found = f"{size(needed)} of {memory} {NAMES[phase]}, of {size(setting.memory)}"
    fewest = report.fewest_nodes
    if fewest is None:
        hint = "".join(f"; with {flags} it takes {count(nodes, 'node')}" for flags, nodes in report.ways)
        return f"no: {found}, and on no number of nodes up to {MAX_NODES}{hint}"
    if report.fits:
        return f"yes: {found}; it takes {count(fewest, 'node')} at least"
    return f"no: {found}; it takes {count(fewest, 'node')}"


def _table(report: FitReport) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("bytes of a worker", no_wrap=True)
    for phase in report.peaks:
        table.add_column(NAMES[phase], justify="right", no_wrap=True)
    uses = [use for _, use in report.peaks.values()]
    on_gpu = report.setting.is_on_gpu
    inside = [name for name in PARTS if (name in ON_GPU if on_gpu else name != "network")]
    for name in inside:
        _add(table, PARTS[name], [getattr(use, name) for use in uses])
    counted = [report.setting.counted(use) for use in uses]
    table.add_row("on its device" if on_gpu else "in all", *map(size, counted), style="bold", end_section=True)
    for name in PARTS if on_gpu else ():
        if name not in inside:
            _add(table, f"{PARTS[name]}, host", [getattr(use, name) for use in uses])
    if on_gpu:
        table.add_row("in the host's memory", *(size(_on_host(use)) for use in uses), style="bold")
    return table


def _add(table: Table, name: str, values: list[int]) -> None:
    if any(values):
        table.add_row(name, *(size(value) if value else "-" for value in values))


def _on_host(use: Use) -> int:
    return use.host + use.snapshots


def _legend(report: FitReport) -> str:
    faults = report.setting.options.faults
    moments = ", ".join(f"{NAMES[phase]}: {moment}" for phase, (moment, _) in report.peaks.items())
    lost = f" A recovery is from the loss of {faults} node." if "recovery" in report.peaks else ""
    return (
        f"Bytes of the largest worker, at its peak ({moments}), for an even load.{lost} Not included: activations, "
        "which depend on your script, and the context of a GPU."
    )
