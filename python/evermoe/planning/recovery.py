"""What to do after a failure."""

from __future__ import annotations

from collections.abc import Sequence

from evermoe import _native
from evermoe._native import RecoveryPlan
from evermoe.planning._arguments import count, names


def recovery_plan(
    units: Sequence[tuple[str, int]],
    holdings: Sequence[Sequence[tuple[str, int, int, str]]],
    needs: Sequence[Sequence[str]],
) -> RecoveryPlan:
    """The version to continue from after a failure, and who sends what to whom.

    The target is the newest version at which every unit has a holder; version 0, the state before the first
    step, counts only if nobody has a later one. Where holders differ, the digest that most ranks have is
    right; who was outvoted is listed in `conflicts`, sends nothing, and fetches what it needs. A rank takes a
    unit from its running model, else from its own snapshot (`source == destination`), else from the holder
    with the fewest bytes to send.

        >>> full = [("w", 5, 7, "active"), ("x", 5, 8, "active")]
        >>> plan = recovery_plan([("w", 64), ("x", 64)], [full, []], [["w"], ["x"]])
        >>> plan.version, plan.transfers
        (5, [('x', 0, 1, 'active')])

    Args:
        units: (name, bytes) of every unit of the model.
        holdings: for each rank, (unit, version, digest, "active" or "snapshot") of all that it has.
        needs: for each rank, the units that it is to run.
    """
    sized = [(name, count("units", size)) for name, size in units]
    held = [
        [(name, count("holdings", version), count("holdings", digest), kind) for name, version, digest, kind in rank]
        for rank in holdings
    ]
    return _native.recovery_plan(sized, held, [names("needs", rank) for rank in needs])
