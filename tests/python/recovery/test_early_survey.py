"""Digests that are computed before the survey, of a state that may be written meanwhile."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import evermoe
from evermoe.errors import CorruptCopy
from evermoe.recovery.early_survey import EarlySurvey
from evermoe.recovery.survey import Standing, Survey
from evermoe.state.training_state import TrainingState
from evermoe.state.version import version_of

NOW = version_of(1, 9)


@pytest.fixture
def state():
    model = nn.ModuleDict({"moe": evermoe.MoE(4, 6, 3), "head": nn.Linear(4, 2)})
    return TrainingState(model, evermoe.optim.AdamW(model.parameters()))


def survey(state, known):
    options = {"trains": True, "checkpoints": None, "can_begin": False, "known": known}
    return Survey(state, [], Standing(NOW, True), **options).inventory.holdings


def test_a_survey_is_the_same_with_what_was_found_before(state):
    agreed, early_ones, caught_up = threading.Event(), [], threading.Event()

    def catch_up():
        early_ones.append(not agreed.is_set())
        caught_up.set()
        return ()

    early = EarlySurvey(state, catch_up)
    early.begin()
    agreed.set()
    early.agreed(begins=True)
    found = early.take()
    assert caught_up.is_set(), "replicas took their steps"
    assert early_ones == [False], "it is not known before who needs them"
    assert found.keys() == set(state.held())
    assert survey(state, found) == survey(state, {})
    assert survey(state, {"head": 7})[0].digest == survey(state, {})[0].digest, "what is unknown is computed"
    assert {each.digest for each in survey(state, {"head": 7}) if each.unit == "head"} == {7}


def test_what_was_found_counts_once_and_not_after_the_state_was_written(state):
    early = EarlySurvey(state, lambda: ())
    assert early.take() == {}, "it was not begun"
    early.begin()
    assert early.take()
    assert early.take() == {}
    early.begin()
    early.drop()
    with torch.no_grad():
        state.dense[0].add_(1)
    assert early.take() == {}


def test_the_state_is_not_read_any_more_once_it_was_dropped(state):
    reading, goes_on, later, over = (threading.Event() for _ in range(4))

    def catch_up():
        reading.set()
        assert goes_on.wait(30)
        yield
        later.set()
        yield

    early = EarlySurvey(state, catch_up)
    early.agreed(begins=True)
    assert reading.wait(30)

    def write():
        early.drop()
        over.set()

    threading.Thread(target=write, daemon=True).start()
    assert not over.wait(0.05), "it waits for what is read"
    goes_on.set()
    assert over.wait(30)
    assert not later.is_set(), "what is void is not looked for any further"


def test_an_error_leaves_all_to_the_survey(state):
    def damaged():
        raise CorruptCopy("a bit has flipped")

    early = EarlySurvey(state, damaged)
    early.begin()
    early.agreed(begins=False)
    assert early.take().keys() == set(state.held())
    early.agreed(begins=False)
    assert early.take() == {}, "it was not begun"
