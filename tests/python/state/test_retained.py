"""What a member retains of the units that a recovery moves elsewhere."""

from __future__ import annotations

import torch

from evermoe.state.stored import RetainedUnits
from evermoe.state.version import version_of


def retained_at(version):
    retained = RetainedUnits()
    retained.begin(version, set())
    retained.add("x", 7, [torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)])
    return retained


def listed(retained, version):
    return [(each.unit, each.version, each.digest, each.data.tolist()) for each in retained.stored(version)]


def test_units_are_offered_until_they_are_released():
    version = version_of(2, 5)
    retained = retained_at(version)
    assert listed(retained, version) == [("x", version, 7, [1, 2])] == listed(retained, version)
    retained.release()
    assert listed(retained, version) == []


def test_a_state_that_got_a_new_version_without_a_step_takes_them_along():
    retained = retained_at(version_of(2, 5))
    assert [version for _, version, *_ in listed(retained, version_of(4, 5))] == [version_of(4, 5)]
    assert [version for _, version, *_ in listed(retained, version_of(4, 6))] == [version_of(2, 5)]


def test_a_second_recovery_to_the_same_state_keeps_what_the_first_has_moved():
    retained = retained_at(version_of(2, 5))
    retained.begin(version_of(4, 5), {("x", 7), ("y", 8)})
    retained.add("y", 8, [torch.tensor([3], dtype=torch.uint8)])
    assert [unit for unit, *_ in listed(retained, version_of(4, 5))] == ["x", "y"]


def test_a_recovery_to_another_state_drops_them():
    """Also to one after as many steps, of another line of history: its bytes differ."""
    for version in (version_of(3, 4), version_of(3, 5)):
        retained = retained_at(version_of(2, 5))
        retained.begin(version, {("x", 6)})
        assert listed(retained, version) == []
