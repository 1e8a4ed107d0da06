"""Holdings that count in a recovery."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evermoe._native import digest
from evermoe.errors import CorruptCopy
from evermoe.recovery.survey import (
    Awaited,
    Holding,
    Inventory,
    Standing,
    Survey,
    newest_checkpoint,
    told_by_trainers,
    usable,
)
from evermoe.state.training_state import TrainingState
from evermoe.state.version import version_of


def inventory(*holdings, established=False, saw_progress=False, version=0, checkpoints=(), trains=True):
    standing = Standing(version, established, saw_progress)
    return Inventory(standing, list(holdings), list(checkpoints), trains)


ACTIVE = Holding("x", version_of(2, 5), 7, "active")
OLDER = Holding("x", version_of(2, 4), 6, "snapshot")


def test_inventory_travels_as_json():
    mine = inventory(ACTIVE, OLDER, established=True, checkpoints=[3])
    assert Inventory.from_bytes(mine.to_bytes()) == mine


def test_inventory_does_not_carry_the_load_which_is_needed_of_one_member():
    mine, bare = inventory(ACTIVE), inventory(ACTIVE)
    mine.load = [[1.0] * 1000]
    assert mine.to_bytes() == bare.to_bytes()


def sealed(text):
    """Return the report of a member with other rules."""
    data = text.encode()
    return digest(np.frombuffer(data, np.uint8)).to_bytes(8, "little") + data


def test_damaged_inventory_is_refused():
    data = inventory(ACTIVE, OLDER, checkpoints=[3]).to_bytes()
    for bit in range(0, 8 * len(data), 5):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCopy, match="does not match its checksum"):
            Inventory.from_bytes(bytes(damaged))
    for size in (0, 7, 8, len(data) - 1):
        with pytest.raises(CorruptCopy):
            Inventory.from_bytes(data[:size])


def test_inventory_of_another_shape_is_refused():
    text = inventory(ACTIVE, checkpoints=[3]).to_bytes()[8:].decode()
    assert Inventory.from_bytes(sealed(text)) == inventory(ACTIVE, checkpoints=[3])
    fields = json.loads(text)
    for wrong, problem in [
        ([*fields.values()], "expected an object"),
        (fields | {"standing": [*fields["standing"].values()]}, "standing is"),
        (fields | {"standing": fields["standing"] | {"lagging": "often"}}, "standing is"),
        (fields | {"holdings": [dict(zip("abcd", ACTIVE, strict=True))]}, "holdings is"),
        (fields | {"holdings": [["x", "5", 7, "active"]]}, "holdings is"),
        (fields | {"holdings": [["x", 1 << 64, 7, "active"]]}, "holdings is"),
        (fields | {"checkpoints": [float("nan")]}, "NaN, which is no number"),
        (fields | {"awaited": [["x", 5, 7]]}, "awaited is"),
        (fields | {"checkpoints": [True]}, "checkpoints is"),
        (fields | {"trains": 1}, "trains is"),
        (fields | {"extra": 1}, "expected an object"),
    ]:
        with pytest.raises(CorruptCopy, match=problem):
            Inventory.from_bytes(sealed(json.dumps(wrong)))
    with pytest.raises(CorruptCopy, match="twice"):
        Inventory.from_bytes(sealed(text[:-1] + ', "trains": true}'))
    with pytest.raises(CorruptCopy):
        Inventory.from_bytes(sealed("[" * 100_000))


def test_all_holdings_of_a_running_job_count_but_those_that_were_refused():
    inventories = [inventory(ACTIVE, OLDER, established=True), inventory(ACTIVE)]
    assert usable(inventories, set()) == [[ACTIVE, OLDER], [ACTIVE]]
    assert usable(inventories, {(0, ACTIVE)}) == [[OLDER], [ACTIVE]]


def test_new_job_begins_with_what_its_members_run():
    """Also if some of them got through a first recovery, and whatever an earlier start has left behind."""
    begun = Holding("x", version_of(1, 0), 7, "active")
    left = Holding("x", version_of(1, 0), 7, "snapshot")
    start = Holding("x", 0, 7, "active")
    assert usable([inventory(begun, left), inventory(start)], set()) == [[start], [start]]


def test_job_that_was_seen_to_run_does_not_start_again():
    start = Holding("x", 0, 7, "active")
    assert usable([inventory(start, saw_progress=True), inventory(ACTIVE)], set()) == [[], [ACTIVE]]


def awaiting(*awaited):
    found = inventory(established=True)
    found.awaited = [Awaited(*each) for each in awaited]
    return found


def test_awaited_state_has_the_digest_that_its_trainers_report():
    now, before = ACTIVE.version, OLDER.version
    keeper = awaiting(("x", now, "replayed"), ("y", now, "replayed"), ("x", before, "replayed"))
    assert Inventory.from_bytes(keeper.to_bytes()) == keeper
    trainer = inventory(ACTIVE, OLDER, established=True)
    told = told_by_trainers([keeper, trainer], now)
    assert told == {("x", now): 7}, "nobody trains y"
    assert told_by_trainers([keeper, inventory(ACTIVE)], now) == {}, "a newcomer's has no say"
    other = inventory(ACTIVE._replace(digest=8), established=True)
    assert told_by_trainers([keeper, trainer, other], now) is None, "they differ: copies decide"
    left = keeper.awaited[1:]
    assert keeper.expect(told) == 1
    assert (keeper.holdings, keeper.awaited) == ([Holding("x", now, 7, "replayed")], left)


@dataclass
class Replayed:
    """A copy that repeats steps when it is read."""

    unit: str
    version: int
    bytes_then: Tensor | None
    digest: None = None
    reads: int = 0

    @property
    def data(self):
        self.reads += 1
        return torch.empty(0, dtype=torch.uint8) if self.bytes_then is None else self.bytes_then


@pytest.fixture
def state():
    model = nn.Linear(4, 2)
    return TrainingState(model, torch.optim.SGD(model.parameters()), session=None)


def survey_of(state, *copies):
    standing = Standing(version_of(1, 9), True)
    stored = [(copy, "replayed") for copy in copies]
    return Survey(state, stored, standing, trains=False, checkpoints=None, can_begin=False)


def test_awaited_copies_are_read_once_they_are_needed_and_checked_then(state):
    (unit,) = state.held()
    data = torch.arange(state.catalog.by_name[unit].nbytes, dtype=torch.uint8)
    value, now = digest(data.numpy()), version_of(1, 9)
    right, wrong = Replayed(unit, now, data), Replayed(unit, now, data + 1)
    for copy, expected in ((right, data), (wrong, torch.empty(0, dtype=torch.uint8))):
        survey = survey_of(state, copy)
        assert survey.inventory.awaited == [Awaited(unit, now, "replayed")]
        survey.expect({(unit, now - 1): value})
        assert survey.inventory.awaited, "no trainer reports this version"
        survey.expect({(unit, now): value})
        assert not survey.inventory.awaited
        assert survey.inventory.holdings == [Holding(unit, now, value, "replayed")]
        assert copy.reads == 0
        assert torch.equal(survey.copies(now)[unit].data, expected)


def test_a_copy_is_lent_where_it_is_if_it_can_be(state):
    (unit,) = state.held()
    data = torch.arange(state.catalog.by_name[unit].nbytes, dtype=torch.uint8)
    value, now = digest(data.numpy()), version_of(1, 9)

    class Lent(Replayed):
        def lend(self):
            return self.bytes_then

    for copy, expected in ((Lent(unit, now, data), data), (Replayed(unit, now, data), None)):
        survey = survey_of(state, copy)
        survey.expect({(unit, now): value})
        assert survey.lend(Holding(unit, now, value, "replayed")) is expected
        assert survey.lend(Holding(unit, now, value, "active")) is None, "an update writes it"
        assert copy.reads == 0


def test_awaited_copies_are_made_where_they_may_be_needed(state):
    (unit,) = state.held()
    data = torch.arange(state.catalog.by_name[unit].nbytes, dtype=torch.uint8)
    now = version_of(1, 9)
    survey = survey_of(state, Replayed(unit, now, data), Replayed(unit, now - 1, None))
    survey.complete()
    assert survey.inventory.holdings == [Holding(unit, now, digest(data.numpy()), "replayed")]
    assert not survey.inventory.awaited


def test_newest_checkpoint_is_one_that_all_training_members_see():
    assert newest_checkpoint([inventory(checkpoints=[3, 6]), inventory(checkpoints=[3])]) == 3
    assert newest_checkpoint([inventory(checkpoints=[3]), inventory(trains=False)]) == 3
    assert newest_checkpoint([inventory(checkpoints=[3]), inventory()]) is None
