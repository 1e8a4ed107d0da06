"""Options of all kinds: each wrong type, range or name is refused by the name that the user wrote."""

import inspect
import math

import numpy as np
import pytest
import torch

import evermoe
from evermoe import Checkpoints, Membership, Placement
from evermoe.options import checked, count
from evermoe.presets import Auto, Baft, Gemini, Lazarus, Moetion, Pec
from evermoe.session.session_config import SessionArguments, session_config

WRONG = {
    Membership: {
        "members": [0, -1, 1.5, "2", 2**70],
        "hang_timeout": [0, -1, math.inf, math.nan, "30", 10**400],
        "quorum_timeout": [0.0, math.inf],
        "rejoin_timeout": [-1, math.nan],
        "join_interval": [0, 1.5],
        "role": ["none", None],
        "lighthouse": [5],
        "job": ["a/b", ""],
        "on_lost": [5],
    },
    Placement: {
        "expert_slots": [0, "2"],
        "min_replicas": [0],
        "policy": ["none", 3],
        "failures": [0, -1, 1.5, "1", True],
        "rebalance_interval": [-1],
    },
    Checkpoints: {
        "url": [5],
        "interval": [-1, 1.5],
        "keep": [0],
        "keep_interval": [-1],
        "resume_settings": ["mine"],
        "resume_from": ["oldest"],
    },
    Auto: {"copy_budget": [0, 1.5, math.nan], "replica_device": ["gpu", "cuda:x", None], "replay_log_bytes": [0]},
    Gemini: {"copy_pacing": ["slow"], "snapshot_interval": [0], "window_share": [0, 1.1], "copy_buffers": [0, 65]},
    Baft: {"profile_steps": [-1], "profile_interval": [21], "copy_buffer_bytes": [0]},
    Pec: {"save_interval": [0, None], "snapshot_interval": [0], "max_lost_token_fraction": [0, 2]},
    Moetion: {"remote_bytes_per_step": [-1], "local_bytes_per_step": [-1]},
    Lazarus: {"snapshot_memory": ["disk"], "snapshot_interval": [0]},
    session_config: {
        "preset": ["none", None, ["auto"], Pec],
        "replication": [-1, 1.5, "2", None, True],
        "membership": ["http://a:1", {}],
        "placement": ["safest"],
        "checkpoints": [5],
        "shard_optimizer": ["sharded", 1, None],
        "max_grad_norm": [-1, 0, math.nan, math.inf, "1", True],
        "on_nonfinite": ["ignore", None],
        "seed": ["x", 1.5],
        "on_gradients": [5],
    },
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in WRONG.items() for name in names])
def test_wrong_options_are_refused_by_name(kind, name):
    for value in WRONG[kind][name]:
        with pytest.raises(ValueError, match=name) as refused:
            kind(**{name: value})
        assert "expected" in str(refused.value)


def test_message_says_what_was_expected_and_what_came():
    with pytest.raises(ValueError, match=r"^expected max_grad_norm to be a number or None, > 0, got -1$"):
        session_config(max_grad_norm=-1)
    with pytest.raises(ValueError, match=r"^expected replication to be a whole number, >= 0, got '2'$"):
        session_config(replication="2")
    with pytest.raises(ValueError, match=r"^expected on_nonfinite to be one of error, skip, got 'no'$"):
        session_config(on_nonfinite="no")
    with pytest.raises(ValueError, match=r"^expected placement to be an evermoe.Placement or None, got 'safest'$"):
        session_config(placement="safest")


WRONG_TOGETHER = [
    (lambda: Checkpoints(interval=5), "interval is 5 steps and there is no url .*: give a folder or a URL"),
    (lambda: Membership(join_wait=9, quorum_timeout=9), "join_wait = 9 s, .*quorum_timeout = 9 s: expected a shorter"),
    (
        lambda: Membership(lighthouse="http://a:1,http://b:1", allow_solo_resume=True),
        "allow_solo_resume .* lets each part of a job continue, .*: expected one of the two",
    ),
    (
        lambda: Gemini(copy_pacing="blocking", snapshot_interval=2),
        "expected snapshot_interval=1 or None, got 2; or use",
    ),
    (lambda: Pec(experts_per_save=3, experts_per_snapshot=2), "expected at most experts_per_snapshot, 2, got 3"),
    (
        lambda: Auto(profile_steps=20, profile_interval=21),
        r"expected profile_interval >= profile_steps \+ 2 = 22, got 21",
    ),
    (
        lambda: session_config(preset="pec"),
        "the preset pec saves to a checkpoint store: expected checkpoints .* got none",
    ),
    (
        lambda: session_config(preset="pec", checkpoints="x", replication=3),
        "expected replication to be at most 2 with the preset pec, got 3: .* use one of gemini, baft",
    ),
    (
        lambda: session_config(preset="lazarus", shard_optimizer=True),
        "shard_optimizer=True leaves .*, and the preset lazarus makes no copies of it: use preset gemini or pec",
    ),
    (
        lambda: session_config(preset=Lazarus(), shard_optimizer="overlap"),
        "shard_optimizer=overlap leaves .* or shard_optimizer=False",
    ),
]


@pytest.mark.parametrize(("make", "words"), WRONG_TOGETHER)
def test_combinations_that_do_not_work_are_refused_with_what_to_do(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_an_option_of_another_preset_cannot_be_written_down():
    for wrong in (lambda: Auto(experts_per_save=1), lambda: Gemini(replay_log_bytes=1), lambda: Pec(window_share=0.5)):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            wrong()


def test_numbers_of_numpy_and_integral_floats_compare_by_value():
    one = session_config(replication=np.int64(3), preset=Auto(copy_budget=1))
    other = session_config(replication=3, preset=Auto(copy_budget=np.float32(1.0)))
    assert one.shared() == other.shared()
    assert (type(one.copies.replication), type(other.copies.preset.copy_budget)) == (int, float)


def test_bools_are_no_numbers_and_numbers_no_bools():
    for value, kind in ((True, int), (1, bool), (True, float), ("1", int)):
        with pytest.raises(ValueError, match="expected it"):
            checked("it", value, kind)


def test_a_folder_or_a_url_stands_for_all_options_of_checkpoints(tmp_path):
    assert session_config(checkpoints=tmp_path).checkpoints == Checkpoints(tmp_path)
    assert session_config(checkpoints="s3://bucket/run").checkpoints == Checkpoints("s3://bucket/run")


def test_a_name_stands_for_a_preset_with_its_defaults():
    assert session_config(preset="moetion").copies.preset == Moetion()
    assert session_config().copies.preset == Auto()


def test_gradients_that_a_function_changes_are_sent_after_backward():
    given = {"on_gradients": lambda gradients: None}
    for preset in (Auto(gradient_bucket_bytes=5), Moetion()):
        assert session_config(preset=preset, **given).copies.preset.gradient_bucket_bytes == 0
    assert session_config(preset="gemini", **given).copies.preset == Gemini()


def test_the_preset_decides_what_the_placement_leaves_open():
    assert session_config(preset="lazarus", replication=3).placement == Placement(policy="safest", min_replicas=3)
    assert session_config(replication=3).placement == Placement(policy="balanced", min_replicas=1)
    own = Placement(policy="balanced", min_replicas=2)
    assert session_config(preset="lazarus", replication=3, placement=own).placement == own


def test_an_unknown_keyword_is_a_type_error():
    layer = evermoe.MoE(8, 16, 4)
    given = layer, torch.optim.SGD(layer.parameters(), lr=0.1), evermoe.ElasticSampler(64, 8)
    with pytest.raises(TypeError, match="unexpected keyword argument 'checkpoint_interval'"):
        evermoe.Session(*given, checkpoint_interval=5)


def test_keywords_that_are_passed_on_are_those_of_a_session():
    every = inspect.signature(evermoe.Session).parameters
    keywords = {name: each for name, each in every.items() if each.kind == each.KEYWORD_ONLY}
    assert len(keywords) == 16
    assert keywords.keys() == SessionArguments.__annotations__.keys()


@pytest.mark.parametrize(("number", "words"), [(0, "0 members"), (1, "1 member"), (2, "2 members")])
def test_one_is_counted_in_the_singular(number, words):
    assert count(number, "member") == words
