"""Arguments of a session from names on one level, as they reach a worker through its command line."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from evermoe import Checkpoints, Membership, Placement
from evermoe.presets import BY_NAME

GROUPS = {"membership": Membership, "placement": Placement, "checkpoints": Checkpoints}


def grouped(options: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the arguments of `evermoe.Session` from the names of flags: options of groups, and those of the preset."""
    left = {**options, **more}
    found: dict[str, Any] = {}
    for name, kind in GROUPS.items():
        names = {each.metadata.get("flag") or each.name: each.name for each in fields(kind)}
        given = {
            names[flag.replace("_", "-")]: left.pop(flag) for flag in list(left) if flag.replace("_", "-") in names
        }
        given |= {name: left.pop(name) for name in list(left) if name in names.values() and name not in GROUPS}
        if given:
            found[name] = kind(**given)
    preset = BY_NAME[left.pop("preset", "auto")]
    own = {each.name for each in fields(preset)}
    found["preset"] = preset(**{name: left.pop(name) for name in list(left) if name in own})
    return found | left


def frequent_copies(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with which a preset copies as often as it can: local snapshots in each step, gradients at once."""
    preset = BY_NAME[options.get("preset", "auto")]
    own = {each.name for each in fields(preset)}
    often = {"snapshot_interval": 1, "gradient_bucket_bytes": 1}
    return {name: value for name, value in often.items() if name in own and "copy_budget" in own}
