"""Flags of `evermoe plan --copies`: the model's bytes, the links and the memory."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field, fields
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


def _flag_of(default: Any, text: str, metavar: str | None = None, least: float = 0, most: float = math.inf) -> Any:
    """Declare a field with a flag: its help, the name of its value, and the range of numbers."""
    return field(default=default, metadata={"help": text, "metavar": metavar, "range": (least, most)})


@dataclass(frozen=True)
class CopySetting:
    """The checked flags of the group `copies`."""

    expert_parameters: int = _flag_of(7_000_000, "parameters of one expert", "PARAMETERS", 1, 1e15)
    dense_parameters: int = _flag_of(500_000_000, "parameters outside experts", "PARAMETERS", 0, 1e15)
    dense: Literal["replicated", "sharded"] = _flag_of(
        "replicated", "whether each node holds all dense parameters, or one shard of them as with ZeRO-3 or FSDP"
    )
    state_bytes: int = _flag_of(
        12,
        "bytes of the state per parameter: 12 for fp32 weights and two moments, 14 with a bf16 copy as well",
        "BYTES",
        1,
        64,
    )
    gradient_bytes: int = _flag_of(4, "bytes of the gradient per parameter as sent: 4, or 2 in bf16", "BYTES", 1, 64)
    step_seconds: float = _flag_of(2.0, "duration of a step", "SECONDS", 1e-6, 1e6)
    network_gbps: float = _flag_of(400.0, "bandwidth of a node's network in gigabits per second", "GBPS", 1e-3, 1e6)
    network_idle: float = _flag_of(
        0.5, "share of a step in which the network is idle, 0 to 1, from a profile", "SHARE", 0, 1
    )
    host_link_gbps: float = _flag_of(
        200.0, "bandwidth between a node's devices and its host memory in gigabits per second", "GBPS", 1e-3, 1e6
    )
    host_gib: float = _flag_of(512.0, "free host memory of a node for copies", "GIB", 0, 1e9)
    device_gib: float = _flag_of(0.0, "free device memory of a node for copies", "GIB", 0, 1e9)
    mtbf_hours: float = _flag_of(5000.0, "mean time between failures of one node", "HOURS", 1e-3, 1e12)
    replication: int = _flag_of(2, "domains that should hold each unit, those that train it included", "COPIES", 1, 64)
    budget: float = _flag_of(0.01, "share of a step by which copies may prolong it, 0 to 1", "SHARE", 0, 1)
    persist_steps: int = _flag_of(1000, "steps from one version in the store to the next", "STEPS", 2, 1e6)
    experts_per_save: int | None = _flag_of(
        None, "experts of each layer that pec saves to the store at a time (default: a quarter)", "EXPERTS", 1, 1 << 24
    )
    experts_per_snapshot: int | None = _flag_of(
        None, "experts of each layer that pec copies to own memory at a time (default: half)", "EXPERTS", 1, 1 << 24
    )
    snapshot_interval: int = _flag_of(1, "steps between two such snapshots of pec", "STEPS", 1, 1e6)
    remote_bytes_per_step: int | None = _flag_of(
        None,
        "bytes that moetion may send to peers in a step, all nodes together (default: the capacity of --network-gbps "
        "in --step-seconds)",
        "BYTES",
        0,
        MAX_BYTES,
    )
    no_replay: bool = _flag_of(
        False, "the optimizer's steps cannot be repeated on other nodes, so copies need the state"
    )

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


INTEGERS = {"expert_parameters", "dense_parameters"}
"""Integers that may be written as 7e6."""


def add_copy_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the group `copies`; a flag that is not given is None, to notice one without `--copies`."""
    group = parser.add_argument_group("copies, with --copies")
    group.add_argument(
        "--copies",
        action="store_true",
        help="show how each unit would be protected, the cost, and the same for the other presets",
    )
    for each in fields(CopySetting):
        given: dict[str, Any] = {"type": type(each.default), "metavar": each.metadata["metavar"]}
        if each.name == "no_replay":
            given = {"action": "store_true"}
        elif each.name == "dense":
            given = {"choices": ("replicated", "sharded")}
        elif each.name in INTEGERS:
            given["type"] = float
        elif each.default is None:
            given["type"] = int
        shown = f" ({each.default:.0e})".replace("e+0", "e") if each.name in INTEGERS else f" ({each.default})"
        text = each.metadata["help"] + (shown if each.default not in (None, False) else "")
        group.add_argument(_flag(each.name), default=None, help=text, **given)


def parse_setting(options: argparse.Namespace, layers: int, experts: int) -> CopySetting | None:
    """Return the setting; None without `--copies`.

    Raises:
        ValueError: with the flag, what was expected and what came.
    """
    given = {each.name: getattr(options, each.name) for each in fields(CopySetting)}
    given = {name: value for name, value in given.items() if value is not None}
    if not options.copies:
        if given:
            raise ValueError(f"{_flag(next(iter(given)))}: expected --copies with it, which is missing")
        return None
    for each in fields(CopySetting):
        value, (least, most) = given.get(each.name), each.metadata["range"]
        if isinstance(value, int | float) and not (math.isfinite(value) and least <= value <= most):
            raise ValueError(f"{_flag(each.name)}: expected {least:g} to {most:g}, got {value}")
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
    bytes_each = 2 * setting.state_bytes + 8 * setting.gradient_bytes
    if parameters * bytes_each * setting.replication > MAX_BYTES:
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
