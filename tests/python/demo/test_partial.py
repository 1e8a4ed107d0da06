"""The demo of presets that may lose tokens, in real processes: it says as many as its routers have counted, and why."""

from __future__ import annotations

import argparse
import json

import pytest

from evermoe.demo import flags, train
from evermoe.presets import Pec
from support.commands import evermoe_process

SMALL = ["--layers", "2", "--hidden", "32", "--intermediate", "32", "--sequence", "16", "--no-baseline"]
GIVEN = {
    "experts_per_snapshot": 3,
    "experts_per_save": 2,
    "snapshot_interval": 4,
    "save_interval": 5,
    "expert_selection": "sequential",
    "max_lost_token_fraction": 0.25,
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("preset", "given", "reason"),
    [
        ("pec", [], "pec saves 2 of 8 experts of each layer"),
        (
            "moetion",
            ["--moetion.remote-bytes-per-step", "80000"],
            "moetion brings copies on other nodes up to date for 80,000",
        ),
    ],
)
@pytest.mark.long
def test_what_the_usual_kill_loses_is_what_the_routers_have_counted(tmp_path, preset, given, reason):
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    run = ["--preset", preset, *given, "--steps", "26", "--no-join", "--memory-dir", str(memory)]
    done = evermoe_process("demo", *run, *SMALL, "--json", "out.json", folder=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["ok"], result["problems"]
    assert result["lost_tokens"] > 0
    assert result["plt"] > 0
    assert result["plt"] == pytest.approx(result["plt_counted"], abs=1e-12)
    (back,) = result["rolled_back"]
    assert back["step"] == 20
    assert 1 <= back["fewest_steps"] <= back["most_steps"] <= 20
    assert reason in " ".join(done.stdout.split())


def test_flags_reach_the_session(tmp_path):
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    given = [part for name, value in GIVEN.items() for part in (f"--pec.{name.replace('_', '-')}", str(value))]
    options = parser.parse_args([*SMALL, "--preset", "pec", "--workers", "1", *given])
    flags.check(options)
    reporter = train.Reporter(None, None)
    train.train(train.parse(flags.worker_arguments(options, 1, 2, tmp_path)), reporter)
    config = reporter.session._config
    assert config.copies.preset == Pec(**GIVEN)
    assert config.checkpoints.url == str(tmp_path / "store")
    assert (config.membership.join_interval, config.membership.hang_timeout) == (1, 10.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--pec.experts-per-save", "0"], "expected experts_per_save to be a whole number"),
        (["--pec.experts-per-save", "3", "--pec.experts-per-snapshot", "2"], "experts_per_save: expected at most"),
        (["--pec.max-lost-token-fraction", "2"], "expected max_lost_token_fraction"),
    ],
)
def test_what_a_session_would_refuse_is_refused_before_any_worker_starts(given, message):
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    with pytest.raises(ValueError, match=message):
        flags.check(parser.parse_args(["--preset", "pec", *given]))
