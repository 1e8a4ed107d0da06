"""Units that a member has but does not train: retained, as copies, or with optimizer state on its way."""

from __future__ import annotations

import threading
from typing import NamedTuple

import pytest
import torch

from evermoe._native import digest
from evermoe.comm.task import Task
from evermoe.errors import PeerLost
from evermoe.state.late import LateState
from evermoe.state.stored import AwaitedUnit, KeptCopies, RetainedUnits
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


class Copy(NamedTuple):
    """A copy of a unit, complete or not."""

    unit: str
    version: int
    digest: int
    data: torch.Tensor


def test_a_copy_that_is_not_what_its_trainer_has_is_not_begun_with():
    data = torch.arange(8, dtype=torch.uint8)
    own = {
        "right": AwaitedUnit(Copy("right", 1, 0, data), digest(data.numpy())),
        "wrong": AwaitedUnit(Copy("wrong", 1, 0, data), digest(data.numpy()) + 1),
        "short": Copy("short", 1, 0, data[:4]),
        "complete": Copy("complete", 1, 0, data),
    }
    copies = KeptCopies([list(own)], 0, own)
    out = torch.zeros(8, dtype=torch.uint8)
    assert [unit for unit in (*own, "nowhere") if copies.read(unit, out)] == ["right", "complete"]
    assert torch.equal(out, data)


def late_task():
    """Optimizer state on its way, and how often it was begun."""
    retained, begun = RetainedUnits(), []
    late = LateState(lambda unit: [], retained, lambda: [])
    late.begin(["x"], Task(lambda: begun.append(1)), lambda task: None)
    return late, begun


def test_late_state_is_sent_once_whoever_starts_it():
    late, begun = late_task()
    assert not begun, "it would be in the way of what all wait for"
    threads = [threading.Thread(target=late.start) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    late.missing.clear()
    late.end()
    assert begun == [1]
    assert not late.is_under_way


def test_late_state_that_nobody_has_begun_to_send_is_lost_with_the_members():
    late, begun = late_task()
    late.end()
    late.start()
    assert not begun
    with pytest.raises(PeerLost, match="x has not arrived"):
        late.wait(["x"])
