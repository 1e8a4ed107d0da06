"""What `evermoe plan --copies` is told about the model's bytes, the links and the memory."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from evermoe.planning import CopyNode
from evermoe.planning.schedule import Link
from evermoe.planning.windows import Span, StepProfile, Windows, find_windows

ALPHA = 10e-6
"""Seconds that any transfer takes, on either link."""
MAX_WINDOWS = 128
"""In a synthetic step."""
OVERLAP = 1 + 1e-9
"""Factor by which a collective is prolonged, so that rounding leaves no gap behind it."""
MAX_BYTES = 1 << 60
"""Bytes of all copies together, at most: the planners' sums stay within 64 bits."""
MAX_UNITS = 1 << 18
"""Experts of all layers."""
MAX_TURNS = 1 << 10
"""Checkpoints of pec until all experts had their turn."""


@dataclass(frozen=True)
class CopySetting:
    """The flags of the group `copies`, checked."""

    expert_parameters: int = 7_000_000
    """Parameters of one expert."""
    dense_parameters: int = 500_000_000
    """Parameters outside of experts."""
    dense: Literal["replicated", "sharded"] = "replicated"
    """Whether each node has all of the latter, or one part of as many as there are nodes."""
    state_bytes: int = 12
    """Bytes of a parameter's state."""
    gradient_bytes: int = 4
    """Bytes of a parameter's gradient, as it is sent."""
    step_seconds: float = 2.0
    network_gbps: float = 400.0
    """Gigabits a second that a node sends or receives."""
    network_idle: float = 0.5
    """Share of a step."""
    host_link_gbps: float = 200.0
    """Gigabits a second between the devices and the host memory of a node."""
    host_gib: float = 512.0
    """Host memory of a node that is free for copies."""
    device_gib: float = 0.0
    """Device memory of a node that is free for copies."""
    mtbf_hours: float = 5000.0
    """Mean time between failures of one node."""
    copies_wanted: int = 2
    """Domains that are to hold each unit, those that train on it included."""
    budget: float = 0.01
    """Share of a step by which copies may delay it."""
    persist_steps: int = 1000
    """Steps from one version in the store to the next."""
    experts_per_save: int | None = None
    """Experts of a layer that pec saves to the store at a time; None for a session's default."""
    experts_per_snapshot: int | None = None
    """Experts of a layer of which pec makes snapshots at a time in their node's memory; None likewise."""
    snapshot_interval: int = 1
    """Steps between these snapshots."""
    remote_bytes_per_step: int | None = None
    """Bytes to peers that moetion may send in a step, of all nodes together; None for what their links
    take in the time of a step, as a session plans once it has measured them."""
    no_replay: bool = False
    """The optimizer's steps cannot be repeated elsewhere."""

    @property
    def network(self) -> Link:
        """Between nodes."""
        return Link(ALPHA, self.network_gbps * 1e9 / 8)

    @property
    def host_link(self) -> Link:
        """Between the devices and the host memory of a node."""
        return Link(ALPHA, self.host_link_gbps * 1e9 / 8)

    def copy_nodes(self, nodes: int, domain_size: int) -> list[CopyNode]:
        """The nodes, all alike; the host link is taken to be idle throughout."""
        failure = min(1.0, self.step_seconds / (self.mtbf_hours * 3600))
        host, device = (int(gib * (1 << 30)) for gib in (self.host_gib, self.device_gib))
        idle = self.network_idle * self.step_seconds
        return [CopyNode(failure, node // domain_size, host, device, idle, self.step_seconds) for node in range(nodes)]

    def windows(self, layers: int) -> Windows:
        """Windows of a synthetic step: compute and collectives in turn, as in each layer's forward and backward."""
        count = min(2 * layers, MAX_WINDOWS)
        whole = self.step_seconds / count
        idle = self.network_idle * whole
        spans = []
        for number in range(count):
            start = number * whole
            if idle > 0:
                spans.append(Span("compute", "forward", "compute", start, idle))
            if whole > idle:
                busy = (whole - idle) * OVERLAP
                spans.append(Span("all-to-all", "collective", "network", start + idle, busy))
        return find_windows([StepProfile(self.step_seconds, spans)], gamma=1.0)


HELP = {
    "expert_parameters": ("PARAMETERS", "of one expert"),
    "dense_parameters": ("PARAMETERS", "of all that is no expert"),
    "dense": (None, "whether each node holds all of it, or its shard of it as with ZeRO-3 or FSDP"),
    "state_bytes": (
        "BYTES",
        "of a parameter's state: 12 for fp32 weights and two moments, 14 with a bf16 copy that is kept too",
    ),
    "gradient_bytes": ("BYTES", "of a parameter's gradient as it is sent: 4, or 2 where bf16 has all of it"),
    "step_seconds": ("SECONDS", "that a step takes"),
    "network_gbps": ("GBPS", "gigabits a second of a node's network"),
    "network_idle": ("SHARE", "of a step that the network is idle, 0 to 1; a profile knows it"),
    "host_link_gbps": ("GBPS", "gigabits a second between a node's devices and its host memory"),
    "host_gib": ("GIB", "host memory of a node that is free for copies"),
    "device_gib": ("GIB", "device memory of a node that is free for copies"),
    "mtbf_hours": ("HOURS", "mean time between failures of one node"),
    "copies_wanted": ("COPIES", "domains that are to hold each unit, those that train on it included"),
    "budget": ("SHARE", "of a step by which copies may delay it, 0 to 1"),
    "persist_steps": ("STEPS", "from one version in the store to the next"),
    "experts_per_save": ("EXPERTS", "of each layer that pec saves to the store at a time; default: a quarter of them"),
    "experts_per_snapshot": ("EXPERTS", "of each layer that pec copies to own memory at a time; default: half of them"),
    "snapshot_interval": ("STEPS", "from one of these snapshots of pec to the next"),
    "remote_bytes_per_step": (
        "BYTES",
        "to peers that moetion may send in a step, all nodes together; default: what --network-gbps takes in "
        "--step-seconds, as a session plans once it has measured both",
    ),
    "no_replay": (None, "the optimizer's steps cannot be repeated elsewhere: copies need the state"),
}
"""For each flag what its value is called, and what it is."""
WHOLE = {"expert_parameters", "dense_parameters"}
"""Integers that may be written as 7e6."""
RANGES: dict[str, tuple[float, float]] = {
    "expert_parameters": (1, 1e15),
    "dense_parameters": (0, 1e15),
    "state_bytes": (1, 64),
    "gradient_bytes": (1, 64),
    "step_seconds": (1e-6, 1e6),
    "network_gbps": (1e-3, 1e6),
    "network_idle": (0, 1),
    "host_link_gbps": (1e-3, 1e6),
    "host_gib": (0, 1e9),
    "device_gib": (0, 1e9),
    "mtbf_hours": (1e-3, 1e12),
    "copies_wanted": (1, 64),
    "budget": (0, 1),
    "persist_steps": (2, 1e6),
    "experts_per_save": (1, 1 << 24),
    "experts_per_snapshot": (1, 1 << 24),
    "snapshot_interval": (1, 1e6),
    "remote_bytes_per_step": (0, MAX_BYTES),
}


def add_copy_arguments(parser: argparse.ArgumentParser) -> None:
    """The group `copies`; a flag that is not given is None, so that one without `--copies` is noticed."""
    group = parser.add_argument_group("copies, with --copies")
    group.add_argument(
        "--copies",
        action="store_true",
        help="how each expert and the rest would be protected, what that costs, and what other systems' presets would",
    )
    for field in fields(CopySetting):
        metavar, text = HELP[field.name]
        given: dict[str, Any] = {"type": type(field.default), "metavar": metavar}
        if field.name == "no_replay":
            given = {"action": "store_true"}
        elif field.name == "dense":
            given = {"choices": ("replicated", "sharded")}
        elif field.name in WHOLE:
            given["type"] = float
        elif field.default is None:
            given["type"] = int
        shown = f" ({field.default:.0e})".replace("e+0", "e") if field.name in WHOLE else f" ({field.default})"
        text += shown if field.default not in (None, False) else ""
        group.add_argument(_flag(field.name), default=None, help=text, **given)


def parse_setting(options: argparse.Namespace, layers: int, experts: int) -> CopySetting | None:
    """The setting; None without `--copies`.

    Raises:
        ValueError: with the flag, what was expected and what came.
    """
    given = {field.name: getattr(options, field.name) for field in fields(CopySetting)}
    given = {name: value for name, value in given.items() if value is not None}
    if not options.copies:
        if given:
            raise ValueError(f"{_flag(next(iter(given)))}: expected --copies with it, which is missing")
        return None
    for name, (least, most) in RANGES.items():
        value = given.get(name)
        if value is not None and not (math.isfinite(value) and least <= value <= most):
            raise ValueError(f"{_flag(name)}: expected {least:g} to {most:g}, got {value}")
    given |= {name: int(given[name]) for name in WHOLE & given.keys()}
    setting = CopySetting(**given)
    if layers * experts > MAX_UNITS:
        raise ValueError(
            f"--copies: expected at most 2^18 experts, got {layers} × {experts}; plan fewer layers at a time"
        )
    _check_levels(setting, experts)
    parameters = layers * experts * setting.expert_parameters + setting.dense_parameters
    each = 2 * setting.state_bytes + 8 * setting.gradient_bytes
    if parameters * each * setting.copies_wanted > MAX_BYTES:
        raise ValueError(
            f"--expert-parameters: expected fewer than 2^60 bytes in all copies, got {parameters} parameters in all"
        )
    return setting


def _check_levels(setting: CopySetting, experts: int) -> None:
    saved, least = setting.experts_per_save, -(-experts // MAX_TURNS)
    if saved is not None and not least <= saved <= experts:
        raise ValueError(f"--experts-per-save: expected {least} to {experts}, all of a layer, got {saved}")
    kept, least = setting.experts_per_snapshot, max(least, saved or 1)
    if kept is not None and not least <= kept <= experts:
        raise ValueError(
            f"--experts-per-snapshot: expected {least} to {experts}, --experts-per-save to all of a layer, got {kept}"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
