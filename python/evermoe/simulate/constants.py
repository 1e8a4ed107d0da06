"""What failures cost on a machine: seconds and rates, measured or assumed."""

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
    """Seconds and rates of a node. The defaults are assumptions with a source; `evermoe measure` writes what is so.

    Raises:
        ValueError: a number that is negative or not finite, or a rate of 0.
    """

    detect_seconds: float = 15.0
    """From a loss until the others know of it: 10 to 20 s until NCCL's kernels time out (Lazarus, section 6.3)."""
    agree_seconds: float = 0.5
    """Until all agree who goes on: the Lighthouse names a new set within some heartbeats."""
    rebuild_seconds: float = 10.0
    """Until they are connected: 5 to 15 s for NCCL's groups (Lazarus, section 6.3)."""
    rebuild_seconds_per_node: float = 0.0
    """The same, for each of them."""
    survey_seconds: float = 0.1
    """Until all know what survives and what each fetches: plans take less than 100 ms (Lazarus, section 6.3)."""
    digest_bytes_per_second: float = 10e9
    """Digests of a process, of which a node has one for each device: xxHash3 is limited by the memory of one core."""
    capture_bytes_per_second: float = 20e9
    """State into a node's own host memory: PCIe 4.0 with 16 lanes has 25 GB/s on paper (Gemini, section 7.1)."""
    store_write_bytes_per_second: float = 1e9
    """A node's writes to the store that all share."""
    store_read_bytes_per_second: float = 1e9
    """A node's reads from it. BLOOM's store took 20 Gbit/s for all nodes (Gemini, section 2.2)."""
    store_bytes_per_second: float | None = None
    """The store's for all nodes together; None where their own rates are the limit."""
    persist_seconds: float = 0.0
    """What each save to the store takes from the steps beside it: nothing where GPUs train and processors are left."""
    start_seconds: float = 60.0
    """From the start of a process until it can take part: Python, CUDA and the model."""
    network_latency_seconds: float = 50e-6
    """Of any transfer between nodes."""
    network_bytes_per_second: float = 12.5e9
    """A node's network: 100 Gbit/s (the clusters of Lazarus and PEC)."""
    source: str = field(default="assumed: the defaults of evermoe", compare=False)
    """Where the numbers are from, for people."""

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
    """Writes a file of constants.

    Args:
        constants: to write.
        path: of the JSON file; its folder is made.
        details: what was measured, for people.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    data = {"evermoe_constants": FORMAT, **asdict(constants), "details": details or {}}
    target.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_constants(path: str | Path) -> Constants:
    """Reads a file of constants.

    Raises:
        ValueError: it is none, with the field, what was expected and what came.
        OSError: it cannot be read.
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
