"""Flags of `evermoe plan --copies`: the model's bytes, the links and the memory."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from evermoe.planning import CopyNode
from evermoe.planning.schedule import Link

ALPHA = 10e-6
"""Latency of any transfer on either link, in seconds."""
MAX_BYTES = 1 << 60
"""Largest number of bytes of all copies together, so that the planners' sums stay within 64 bits."""
MAX_UNITS = 1 << 18
"""Largest number of experts of all layers."""
MAX_COPY_NODES = 1 << 17
"""Largest number of nodes of a job whose copies are forecast."""
MAX_TURNS = 1 << 10
"""Largest number of checkpoints of pec until every expert was saved."""


@dataclass(frozen=True)
class CopySetting:
    """The checked flags of the group `copies`."""

    expert_parameters: int = 7_000_000
    """Parameters of one expert."""
    dense_parameters: int = 500_000_000
    """Parameters outside experts."""
    dense: Literal["replicated", "sharded"] = "replicated"
    """Whether each node has all dense parameters, or one shard of as many as there are nodes."""
    state_bytes: int = 12
    """Bytes of the state per parameter."""
    gradient_bytes: int = 4
    """Bytes of the gradient per parameter, as sent."""
    step_seconds: float = 2.0
    network_gbps: float = 400.0
    """Gigabits per second that a node sends or receives."""
    network_idle: float = 0.5
    """Share of a step in which the network is idle."""
    host_link_gbps: float = 200.0
    """Gigabits per second between the devices and the host memory of a node."""
    host_gib: float = 512.0
    """Free host memory of a node for copies."""
    device_gib: float = 0.0
    """Free device memory of a node for copies."""
    mtbf_hours: float = 5000.0
    """Mean time between failures of one node."""
    replication: int = 2
    """Domains that should hold each unit, those that train it included."""
    budget: float = 0.01
    """Share of a step by which copies may prolong it."""
    persist_steps: int = 1000
    """Steps from one version in the store to the next."""
    experts_per_save: int | None = None
    """Experts of a layer that pec saves at a time; None for a session's default."""
    experts_per_snapshot: int | None = None
    """Experts of a layer in one snapshot of pec in its node's memory; None for a session's default."""
    snapshot_interval: int = 1
    """Steps between these snapshots."""
    remote_bytes_per_step: int | None = None
    """Bytes that moetion may send to peers in a step, all nodes together; None for the capacity of the links in one
    step."""
    no_replay: bool = False
    """The optimizer's steps cannot be repeated elsewhere."""

    @property
    def network(self) -> Link:
        """The link between nodes."""
        return Link(ALPHA, self.network_gbps * 1e9 / 8)

    @property
    def host_link(self) -> Link:
        """The link between the devices and the host memory of a node."""
        return Link(ALPHA, self.host_link_gbps * 1e9 / 8)

    @property
    def host_bytes(self) -> int:
        """Free host memory of a node for copies, in bytes."""
        return int(self.host_gib * (1 << 30))

    def copy_nodes(self, nodes: int, domain_size: int) -> list[CopyNode]:
        """Return equal nodes; the host link counts as always idle."""
        failure = min(1.0, self.step_seconds / (self.mtbf_hours * 3600))
        device, idle = int(self.device_gib * (1 << 30)), self.network_idle * self.step_seconds
        memory = self.host_bytes, device
        return [CopyNode(failure, node // domain_size, *memory, idle, self.step_seconds) for node in range(nodes)]


HELP = {
    "expert_parameters": ("PARAMETERS", "parameters of one expert"),
    "dense_parameters": ("PARAMETERS", "parameters outside experts"),
    "dense": (None, "whether each node holds all dense parameters, or one shard of them as with ZeRO-3 or FSDP"),
    "state_bytes": (
        "BYTES",
        "bytes of the state per parameter: 12 for fp32 weights and two moments, 14 with a bf16 copy as well",
    ),
    "gradient_bytes": ("BYTES", "bytes of the gradient per parameter as sent: 4, or 2 in bf16"),
    "step_seconds": ("SECONDS", "duration of a step"),
    "network_gbps": ("GBPS", "bandwidth of a node's network in gigabits per second"),
    "network_idle": ("SHARE", "share of a step in which the network is idle, 0 to 1, from a profile"),
    "host_link_gbps": ("GBPS", "bandwidth between a node's devices and its host memory in gigabits per second"),
    "host_gib": ("GIB", "free host memory of a node for copies"),
    "device_gib": ("GIB", "free device memory of a node for copies"),
    "mtbf_hours": ("HOURS", "mean time between failures of one node"),
    "replication": ("COPIES", "domains that should hold each unit, those that train it included"),
    "budget": ("SHARE", "share of a step by which copies may prolong it, 0 to 1"),
    "persist_steps": ("STEPS", "steps from one version in the store to the next"),
    "experts_per_save": ("EXPERTS", "experts of each layer that pec saves to the store at a time (default: a quarter)"),
    "experts_per_snapshot": (
        "EXPERTS",
        "experts of each layer that pec copies to own memory at a time (default: half)",
    ),
    "snapshot_interval": ("STEPS", "steps between two such snapshots of pec"),
    "remote_bytes_per_step": (
        "BYTES",
        "bytes that moetion may send to peers in a step, all nodes together (default: the capacity of --network-gbps "
        "in "
        "--step-seconds)",
    ),
    "no_replay": (None, "the optimizer's steps cannot be repeated on other nodes, so copies need the state"),
}
"""Name of each flag's value, and its help."""
INTEGERS = {"expert_parameters", "dense_parameters"}
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
    "replication": (1, 64),
    "budget": (0, 1),
    "persist_steps": (2, 1e6),
    "experts_per_save": (1, 1 << 24),
    "experts_per_snapshot": (1, 1 << 24),
    "snapshot_interval": (1, 1e6),
    "remote_bytes_per_step": (0, MAX_BYTES),
}


def add_copy_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the group `copies`; a flag that is not given is None, to notice one without `--copies`."""
    group = parser.add_argument_group("copies, with --copies")
    group.add_argument(
        "--copies",
        action="store_true",
        help="show how each unit would be protected, the cost, and the same for the other presets",
    )
    for field in fields(CopySetting):
        metavar, text = HELP[field.name]
        given: dict[str, Any] = {"type": type(field.default), "metavar": metavar}
        if field.name == "no_replay":
            given = {"action": "store_true"}
        elif field.name == "dense":
            given = {"choices": ("replicated", "sharded")}
        elif field.name in INTEGERS:
            given["type"] = float
        elif field.default is None:
            given["type"] = int
        shown = f" ({field.default:.0e})".replace("e+0", "e") if field.name in INTEGERS else f" ({field.default})"
        text += shown if field.default not in (None, False) else ""
        group.add_argument(_flag(field.name), default=None, help=text, **given)


def parse_setting(options: argparse.Namespace, layers: int, experts: int) -> CopySetting | None:
    """Return the setting; None without `--copies`.

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
    given |= {name: int(given[name]) for name in INTEGERS & given.keys()}
    setting = CopySetting(**given)
    if options.nodes > MAX_COPY_NODES:
        raise ValueError(f"--nodes: expected at most 2^17 with --copies, got {options.nodes}")
    if layers * experts > MAX_UNITS:
        raise ValueError(
            f"--copies: expected at most 2^18 experts, got {layers} × {experts}; plan fewer layers at a time"
        )
    _check_levels(setting, experts)
    parameters = layers * experts * setting.expert_parameters + setting.dense_parameters
    each = 2 * setting.state_bytes + 8 * setting.gradient_bytes
    if parameters * each * setting.replication > MAX_BYTES:
        raise ValueError(
            f"--expert-parameters: expected fewer than 2^60 bytes in all copies, got {parameters} parameters in all"
        )
    return setting


def _check_levels(setting: CopySetting, experts: int) -> None:
    saved, least = setting.experts_per_save, -(-experts // MAX_TURNS)
    if saved is not None and not least <= saved <= experts:
        raise ValueError(f"--experts-per-save: expected {least} to {experts}, the experts of a layer, got {saved}")
    kept, least = setting.experts_per_snapshot, max(least, saved or 1)
    if kept is not None and not least <= kept <= experts:
        raise ValueError(
            f"--experts-per-snapshot: expected {least} to {experts}, from --experts-per-save to the experts of a "
            f"layer, got {kept}"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
