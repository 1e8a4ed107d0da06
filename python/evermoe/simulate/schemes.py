"""Schemes that can be simulated: the presets of a session, and common baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from evermoe.planning.presets import PRESET_NAMES, PRESETS, PresetName

BaselineName = Literal["restart", "restart-groups"]
BASELINES: tuple[BaselineName, ...] = get_args(BaselineName)
SchemeName = PresetName | BaselineName
SCHEMES: Mapping[SchemeName, str] = {
    **{name: PRESETS[name].summary for name in PRESET_NAMES},
    "restart": "all workers stop at a loss, restart and load the newest checkpoint (torchrun and DCP; DS in Lazarus)",
    "restart-groups": "groups of nodes that share the experts are dropped when they lose a node; the others continue "
    "(DS(FT) in Lazarus)",
}
"""Summary of each scheme in one line, by name."""


def keeps_owners(name: SchemeName) -> bool:
    """Return whether a scheme can keep units that one node alone trains, as owners do with `shard_optimizer=True`."""
    return name in BASELINES or PRESETS[name].protects_owners  # type: ignore[index]
