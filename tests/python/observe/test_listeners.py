"""Listeners: what a session did is in the file, and in the metrics that Prometheus would read."""

import json
import math
import os
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from evermoe import Checkpoints, ElasticSampler, Session
from evermoe.config.environment import free_port
from evermoe.events import (
    Begin,
    ChunkSent,
    Commit,
    CoverageChanged,
    Damaged,
    Joined,
    Measured,
    MemberLost,
    Phase,
    Recovered,
    Skipped,
    Vote,
)
from evermoe.observe import JsonLines, Metrics
from evermoe.observe.json_lines import INNER, read_line
from evermoe.observe.listeners import combined, from_environment
from evermoe.observe.metrics import METRICS
from evermoe.state.training_state import TrainingState
from support.worker import SAMPLES, Model, dataset


def train(steps, **options):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(model, optimizer, ElasticSampler(SAMPLES, 4), **options)
    for step in session.steps(steps):
        with step:
            step.backward(model(dataset()[step.indices]))


def session_units():
    model = Model()
    return TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1)).catalog.units


def scraped(port):
    """By name and labels, as Prometheus reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_session_in_a_file_and_in_metrics(tmp_path, monkeypatch):
    port, path = free_port(), tmp_path / "new" / "events.jsonl"
    monkeypatch.setenv("EVERMOE_METRICS", str(port))
    seen = []
    train(5, on_event=[JsonLines(path), seen.append], checkpoints=Checkpoints(tmp_path / "saved", interval=4))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "commit"] == [0, 1, 2, 3, 4]
    assert {line["pid"] for line in lines} == {os.getpid()}
    assert not {"protocol", "chunk_sent"} & {line["event"] for line in lines}
    found = scraped(port)
    losses = [event.loss for event in seen if isinstance(event, Commit)]
    assert found["evermoe_step",] == found["evermoe_checkpoint_step",] == 5
    assert found["evermoe_loss",] == losses[-1]
    assert found["evermoe_members",] == found["evermoe_recoveries_total",] == 1
    measured = [event for event in seen if isinstance(event, Measured)]
    assert found["evermoe_step_seconds_count",] == 5
    assert found["evermoe_step_seconds_sum",] == pytest.approx(sum(each.seconds for each in measured))
    assert found["evermoe_tokens_total",] == 5 * 4 * 8
    speed = 5 * 4 * 8 / sum(each.seconds for each in measured)
    assert found["evermoe_recent_tokens_per_second",] == pytest.approx(speed)
    assert found["evermoe_copy_lag_steps", "checkpoint"] == measured[-1].lag["checkpoint"]
    assert found["evermoe_state", "finished"] == 1
    assert found["evermoe_survives_losses", "1"] == 0
    assert found["evermoe_fatal_loss_units", "rank 0"] == len(session_units())
    (recovered,) = (event for event in seen if isinstance(event, Recovered))
    assert found["evermoe_recovery_seconds_total", "agree"] == pytest.approx(recovered.seconds["agree"])


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(f"evermoe_{name}", labels)


def test_what_is_counted():
    metrics = Metrics()
    for sent, total in ((30, 260), (260, 260)):  # the first step after a recovery counts what that has sent
        metrics(Measured(1, 0.5, 8, 1.5, 2.0, {"snapshot": total // 130}, {"snapshot": sent}))
    metrics(ChunkSent(1, 30, 100, "window"))
    assert value(metrics, "copied_bytes_total", kind="snapshot") == 260
    assert value(metrics, "copy_waiting_bytes") == 70
    assert value(metrics, "copy_lag_steps", kind="snapshot") == 2
    metrics(Measured(2, 1.5, 8, None, None, {}, {"snapshot": 260}))
    assert value(metrics, "copy_lag_steps", kind="snapshot") is None
    assert (value(metrics, "imbalance"), value(metrics, "expert_imbalance")) == (1.5, 2.0)
    assert value(metrics, "recent_step_seconds") == pytest.approx(2.5 / 3)
    assert value(metrics, "recent_tokens_per_second") == pytest.approx(24 / 2.5)
    for each in (Begin(0), Begin(1), Skipped(1, None), Damaged("a", 1, "a bit")):
        metrics(each)
    recovered = Recovered(0.0, {"agree": 0.25}, 7, 2, 3, "lost", 100, 1, {}, 9, 0, [], {"e": 5}, {"e": 30, "f": 12})
    for each in (recovered, Begin(2), replace(recovered, failure="host", tier="peers")):
        metrics(each)
    metrics(MemberLost("b-1-3", "moe", "b-1", "b", "", "train", "host", 7, 4, "lost", 3, 4, 1))
    assert value(metrics, "step_seconds_count") == 3
    assert value(metrics, "copy_waiting_bytes") == 0
    assert value(metrics, "last_recovery_seconds", phase="agree") == 0.25
    assert value(metrics, "last_recovery_info", reason="lost", failure="host", tier="peers") == 1
    assert value(metrics, "lost_members_total", kind="host") == 1
    assert value(metrics, "skipped_total") == value(metrics, "damaged_total") == 1
    assert value(metrics, "recovery_seconds_total", phase="agree") == 0.5
    assert (value(metrics, "steps_lost_total"), value(metrics, "tokens_lost_total")) == (4, 84)
    assert (value(metrics, "step"), value(metrics, "members"), value(metrics, "fetched_bytes_total")) == (7, 3, 200)


def test_states_and_what_would_not_be_survived():
    metrics = Metrics()
    for phase in ("agree", "fetch"):
        metrics(Phase(phase))
        assert value(metrics, "state", evermoe_state=phase) == 1
    metrics(CoverageChanged(0.5, 0.0, {"a": 3, "b + c": 1}, is_complete=False))
    assert (value(metrics, "covered"), value(metrics, "fatal_loss_units", nodes="b + c")) == (0, 1)
    metrics(CoverageChanged(1.0, 0.5, {"b + c": 2}, is_complete=True))
    assert (value(metrics, "covered"), value(metrics, "fatal_loss_units", nodes="b + c")) == (1, 2)
    assert value(metrics, "fatal_loss_units", nodes="a") is None
    assert (value(metrics, "survives_losses", nodes="1"), value(metrics, "survives_losses", nodes="2")) == (1, 0.5)
    metrics(Vote(3))
    assert value(metrics, "state", evermoe_state="training") == 1
    metrics(Joined("job", "x-1", "x", 2, "replica", 5, ["u", "v", "x"]))
    about = {"job": "job", "member": "x-1", "node": "x", "rank": "2", "role": "replica", "generation": "5"}
    assert value(metrics, "member_info", **about) == 1


def test_the_table_of_metrics_names_all():
    rows = re.findall(r"`evermoe_(\w+)` \| (\w+)", Metrics.__doc__)
    suffix = {"Info": "_info", "Counter": "_total"}
    kinds = {"Info": "info", "Counter": "counter", "Gauge": "gauge", "Histogram": "histogram"}
    expected = [(each.name + suffix.get(each.kind, ""), kinds[each.kind]) for each in METRICS]
    assert sorted(rows) == sorted([*expected, ("state", "states")])


def test_lines_are_events_again(tmp_path):
    seen = []
    train(2, on_event=[JsonLines(tmp_path / "events"), seen.append])
    lines = (tmp_path / "events").read_text().splitlines()
    found = [read_line(line) for line in lines]
    assert [event for _, _, event in found] == [event for event in seen if not isinstance(event, INNER)]
    assert {pid for pid, _, _ in found} == {os.getpid()}
    for line in (
        "",
        "{",
        "[1]",
        '{"event": "begin"}',
        '{"event": "any", "pid": 1, "time": 1}',
        '{"event": "begin", "x": 1',
    ):
        assert read_line(line) is None
    assert read_line('{"event": "begin", "pid": 1, "time": 2, "step": 3, "more": 4}') == (1, 2.0, Begin(3))


def test_commits_of_files_without_a_gradient_norm_are_read():
    line = '{"event": "commit", "pid": 1, "time": 2, "step": 3, "loss": 0.5, "members": 4, "generation": 1}'
    _, _, found = read_line(line)
    assert (found.step, found.loss, found.members, found.generation) == (3, 0.5, 4, 1)
    assert math.isnan(found.grad_norm)


def test_lines_of_several_threads_and_writers_are_not_mixed(tmp_path):
    path = tmp_path / "events.jsonl"
    writers = [JsonLines(path), JsonLines(path, without=(Begin,))]
    with ThreadPoolExecutor(4) as pool:
        for number in range(200):
            for each in writers:
                pool.submit(each, Damaged("unit" * 50, number, "a bit"))
    writers[1](Begin(1))
    steps = sorted(json.loads(line)["step"] for line in path.read_text().splitlines())
    assert steps == sorted([*range(200)] * 2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_does_not_end_training():
    lines = JsonLines("/dev/full")
    with pytest.warns(UserWarning, match="events cannot be written to /dev/full: .*Training continues") as told:
        train(3, on_event=lines)
    assert len(told) == 1


def test_wrong_listeners_and_ports(monkeypatch):
    with pytest.raises(TypeError, match="on_event: expected functions of an event, got str"):
        combined(["print"])
    for text in ("here", "0", "70000"):
        monkeypatch.setenv("EVERMOE_METRICS", text)
        with pytest.raises(ValueError, match="EVERMOE_METRICS"):
            from_environment()
    port = free_port()
    monkeypatch.setenv("EVERMOE_METRICS", str(port - 1))
    monkeypatch.setenv("LOCAL_RANK", "1")
    (metrics,) = from_environment()
    assert scraped(port)["evermoe_step",] == value(metrics, "step") == 0
    with pytest.raises(OSError, match=rf"port {port} \(EVERMOE_METRICS\)"):
        from_environment()
