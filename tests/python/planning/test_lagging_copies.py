"""Plans under which the loss of a node costs updates, which a session logs as a warning."""

from __future__ import annotations

import pytest

from evermoe.copies.protection_inputs import may_lose_updates
from evermoe.planning.protection import ProtectionPlan, RankInfo, UnitProtection

THREE = [RankInfo(node, 0) for node in "abc"]


@pytest.mark.parametrize(
    ("unit", "active", "replication", "expected"),
    [
        (UnitProtection("e", "active", 0), (0, 1), 2, False),
        (UnitProtection("e", "active", 0), (0, 1), 3, True),
        (UnitProtection("e", "replayed", 0, (1,)), (0,), 2, False),
        (UnitProtection("e", "snapshot", 0, (1,)), (0,), 2, False),
        (UnitProtection("e", "snapshot", 0, (1,), period=4), (0,), 2, True),
        (UnitProtection("e", "snapshot", 0, period=4, own=(0, 1)), (0, 1), 2, False),
        (UnitProtection("e", "active", 0), (0,), 2, True),
        (UnitProtection("e", "active", 0), (0,), 0, False),
    ],
)
def test_copies_that_lag_or_are_missing_are_found(unit, active, replication, expected):
    assert may_lose_updates(ProtectionPlan([unit], ""), {"e": active}, THREE, replication) is expected


def test_one_node_alone_promises_nothing():
    plan = ProtectionPlan([UnitProtection("e", "active", 0)], "")
    assert not may_lose_updates(plan, {"e": (0, 1)}, [RankInfo("a", 0)] * 2, 2)
