"""Costs of failures on a machine: seconds and rates, measured or assumed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

FORMAT = 1
"""Version of the file's layout."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Seconds and rates of a node. The defaults are assumptions with a source; `evermoe measure` writes measured
    values.

    Raises:
        ValueError: a number that is negative or not finite, or a rate of 0.
    """

    detect_seconds: float = 15.0
    """Seconds from a loss until the others notice it: 10 to 20 until NCCL's kernels time out (Lazarus, section 6.3)."""
    agree_seconds: float = 0.5
    """Seconds until all agree on the members: the Lighthouse names a new set within some heartbeats."""
    rebuild_seconds: float = 10.0
    """Seconds until members are connected: 5 to 15 for NCCL's groups (Lazarus, section 6.3)."""
    rebuild_seconds_per_node: float = 0.0
    """Additional seconds until they are connected, per node."""
    survey_seconds: float = 0.1
    """Seconds until all know what survives and what each fetches: plans take less than 0.1 (Lazarus, section 6.3)."""
    digest_bytes_per_second: float = 10e9
    """Rate of digests of a process; a node has one process per device. xxHash3 is limited by the memory of one core."""
    capture_bytes_per_second: float = 20e9
    """Rate of copies into a node's own host memory: assumed. PCIe 4.0 x16 has 31.5 GB/s (BAFT, section 5.2)."""
    store_write_bytes_per_second: float = 1e9
    """Rate of a node's writes to the shared store."""
    store_read_bytes_per_second: float = 1e9
    """Rate of a node's reads from it: assumed. Gemini's store has 20 Gbit/s for all nodes (its experiment setup)."""
    store_bytes_per_second: float | None = None
    """Rate of the store for all nodes together; None if the nodes' own rates are the limit."""
    persist_seconds: float = 0.0
    """Seconds by which each save to the store prolongs concurrent steps: 0 if GPUs train and processors are idle."""
    start_seconds: float = 60.0
    """Seconds from the start of a process until it can participate: Python, CUDA and the model."""
    network_latency_seconds: float = 50e-6
    """Latency of any transfer between nodes, in seconds."""
    network_bytes_per_second: float = 12.5e9
    """Rate of a node's network: 100 Gbit/s, as a server of Lazarus has for two nodes (section 6.1)."""
    source: str = field(default="assumed: the defaults of evermoe", compare=False)
    """Source of the numbers, for people."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "source" or (each.name == "store_bytes_per_second" and value is None):
                continue
            least = "above 0" if each.name.endswith("bytes_per_second") else "0 or more"
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (value == 0 and least == "above 0"):
                raise ValueError(f"{each.name}: expected a finite number, {least}, got {value!r}")


def write_constants(constants: Constants, path: str | Path, details: dict[str, Any] | None = None) -> None:
    """Write a JSON file of constants, with details of their measurements for people; its folder is created."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    data = {"evermoe_constants": FORMAT, **asdict(constants), "details": details or {}}
    target.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_constants(path: str | Path) -> Constants:
    """Read a file of constants.

    Raises:
        ValueError: the file has no constants or wrong ones; the message names the field.
        OSError: the file cannot be read.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, as evermoe measure writes it: {error}") from None
    if not isinstance(data, dict) or data.pop("evermoe_constants", None) != FORMAT:
        raise ValueError(f'{path}: expected an object with "evermoe_constants": {FORMAT}, as evermoe measure writes it')
    data.pop("details", None)
    known = {each.name for each in fields(Constants)}
    if unknown := sorted(set(data) - known):
        raise ValueError(f"{path}: expected fields of evermoe.simulate.Constants, got {unknown[0]!r}")
    try:
        return Constants(**data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
