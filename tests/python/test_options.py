"""Options of all kinds: each wrong type, range or name is refused by the name that the user wrote."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import evermoe
from evermoe.options import checked, count


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "max_grad_norm": [-1, 0, math.nan, math.inf, "1", True],
        "members": [0, -1, 1.5, "2", 2**70],
        "copies": [-1, 1.5, "2", None, True],
        "copy_budget": [0, 1.5, math.nan],
        "hang_timeout": [0, -1, math.inf, math.nan, "30", 10**400],
        "quorum_timeout": [0.0, math.inf],
        "rejoin_timeout": [-1, math.nan],
        "join_interval": [0, 1.5],
        "seed": ["x", 1.5],
        "preset": ["none", None, ["auto"]],
        "role": ["none"],
        "placement": ["none", 3],
        "on_nonfinite": ["ignore", None],
        "checkpoint_dir": [5],
        "checkpoint_interval": [1, -1],
        "slots": [0],
        "min_replicas": [0],
        "placement_failures": [0, -1, 1.5, "1", True],
        "save_interval": [0],
        "replica_device": ["none", None],
        "profile_steps": [-1],
        "profile_interval": [21],
        "copy_buffer_bytes": [0],
        "remote_bytes_per_step": [-1],
        "lighthouse": [5],
    }.items(),
)
def test_wrong_options_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            evermoe.SessionConfig(**{name: value})


def test_message_says_what_was_expected_and_what_came():
    with pytest.raises(ValueError, match=r"^expected max_grad_norm to be a number or None, > 0, got -1$"):
        evermoe.SessionConfig(max_grad_norm=-1)
    with pytest.raises(ValueError, match=r"^expected copies to be a whole number, >= 0, got '2'$"):
        evermoe.SessionConfig(copies="2")
    with pytest.raises(ValueError, match=r"^expected on_nonfinite to be one of error, skip, got 'no'$"):
        evermoe.SessionConfig(on_nonfinite="no")


def test_numbers_of_numpy_and_integral_floats_compare_by_value():
    one = evermoe.SessionConfig(copies=np.int64(3), copy_budget=1, checkpoint_dir=Path("x"))
    other = evermoe.SessionConfig(copies=3, copy_budget=np.float32(1.0))
    assert one.shared() == other.shared()
    assert (type(one.copies), type(one.copy_budget)) == (int, float)


def test_bools_are_no_numbers_and_numbers_no_bools():
    for value, kind in ((True, int), (1, bool), (True, float), ("1", int)):
        with pytest.raises(ValueError, match="expected it"):
            checked("it", value, kind)


@pytest.mark.parametrize(
    ("name", "value"),
    [("EVERMOE_MEMBERS", "-3"), ("EVERMOE_MEMBERS", "two"), ("EVERMOE_ROLE", "x"), ("EVERMOE_SPARE", "yes")],
)
def test_wrong_variables_are_refused_by_name(monkeypatch, name, value):
    from evermoe.train.session_config import with_environment

    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"expected {name} to be .* got '{value}'"):
        with_environment(evermoe.SessionConfig())


def test_unknown_option_is_named_with_the_one_that_was_meant():
    layer = evermoe.MoE(8, 16, 4)
    given = layer, torch.optim.SGD(layer.parameters(), lr=0.1), evermoe.ElasticSampler(64, 8)
    with pytest.raises(ValueError, match="unknown option 'checkpoint_evry'; did you mean 'checkpoint_interval'"):
        evermoe.Session(*given, checkpoint_evry=5)
    with pytest.raises(ValueError, match="unknown option 'x'; expected one of address, quorum_timeout, "):
        evermoe.Session(*given, x=5)
    with pytest.raises(ValueError, match="unknown option 'stagess'; did you mean 'stages'"):
        evermoe.PipelineSession(layer, given[1], lambda session: None, stagess=2)


def test_blocking_copies_of_a_version_take_one_step():
    blocking = {"copy_pacing": "blocking", "preset": "gemini"}
    with pytest.raises(ValueError, match="expected snapshot_interval=1 or None, got 2; or use copy_pacing='windows'"):
        evermoe.SessionConfig(**blocking, snapshot_interval=2)
    assert evermoe.SessionConfig(**blocking, snapshot_interval=1).snapshot_interval == 1


@pytest.mark.parametrize(("number", "words"), [(0, "0 members"), (1, "1 member"), (2, "2 members")])
def test_one_is_counted_in_the_singular(number, words):
    assert count(number, "member") == words
