"""Copies of lost units that memory has and this run cannot use, as another preset wrote them, or another mesh.

The unit of a session, for example, has the tokens of each expert with the presets that may lose tokens, and lacks them
with the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.copies.snapshot.store import SnapshotUnit
from evermoe.recovery.survey import fits
from evermoe.state.stored import StoredUnit
from evermoe.state.training_state import TrainingState
from evermoe.state.version import step_of

MAX_SHOWN = 8
"""Units and steps that a message names."""
_WAY = (
    "To change the {0}, resume with it and checkpoints, end all workers by SIGTERM, which writes a checkpoint, and "
    "start with the new {0}"
)


def explain(state: TrainingState, stored: Sequence[tuple[StoredUnit, str]], group: Group, lost: Collection[str]) -> str:
    """Name the copies of lost units that no member can use, and say what to do; empty without any. Collective."""
    others = [found for found, _ in stored if state.catalog.is_divided_otherwise(found.unit)]
    told_steps = gather_json(group, sorted({step_of(found.version) for found in others}))
    if of_others := sorted({step for theirs in told_steps for step in theirs}):
        return (
            f"Memory has units of steps {_shown([*map(str, of_others)])} that another mesh has divided, or none. To "
            f"resume from memory, start with that. {_WAY.format('mesh')}"
        )
    mine = {
        (found.unit, found.version, found.preset)
        for found, kind in stored
        if found.unit in lost
        and isinstance(found, SnapshotUnit)
        and not fits(found, kind, state.catalog.by_name[found.unit])
    }
    told = {tuple(each) for theirs in gather_json(group, sorted(mine)) for each in theirs}
    if not told:
        return ""
    units = _shown(sorted({unit for unit, _, _ in told}))
    steps = _shown([str(step) for step in sorted({step_of(version) for _, version, _ in told})])
    presets = " and ".join(sorted({repr(preset) for _, _, preset in told}))
    return (
        f"Memory has {units} of steps {steps} with other contents: preset {presets} wrote them, and this run has "
        "another preset or other options. No node needs to have failed. To resume from memory, start with that preset. "
        + _WAY.format("preset")
    )


def _shown(names: Sequence[str]) -> str:
    more = len(names) - MAX_SHOWN
    return ", ".join(names[:MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
