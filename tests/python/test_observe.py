"""Listeners: what a session did is in the file, and in the metrics that Prometheus would read."""

import json
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from evermoe import ElasticSampler, Session
from evermoe.environment import free_port
from evermoe.events import Begin, Chunk, Commit, Damaged, Recovered, Skipped
from evermoe.observe import JsonLines, Metrics, combined, from_environment
from support.worker import SAMPLES, Model, dataset


def train(steps, **options):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(model, optimizer, ElasticSampler(SAMPLES, 4), **options)
    for step in session.steps(steps):
        with step:
            step.backward(model(dataset()[step.indices]))


def scraped(port):
    """By name and labels, as Prometheus reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_session_in_a_file_and_in_metrics(tmp_path, monkeypatch):
    port, path = free_port(), tmp_path / "new" / "events.jsonl"
    monkeypatch.setenv("EVERMOE_METRICS", str(port))
    seen = []
    train(5, on_event=[JsonLines(path), seen.append], checkpoint_dir=tmp_path / "saved")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "commit"] == [0, 1, 2, 3, 4]
    assert {line["pid"] for line in lines} == {os.getpid()}
    assert not {"protocol", "chunk"} & {line["event"] for line in lines}
    found = scraped(port)
    losses = [event.loss for event in seen if isinstance(event, Commit)]
    assert found["evermoe_step",] == found["evermoe_checkpoint_step",] == 5
    assert found["evermoe_loss",] == losses[-1]
    assert found["evermoe_members",] == found["evermoe_recoveries_total",] == 1
    assert found["evermoe_step_seconds_count",] == 4
    (recovered,) = (event for event in seen if isinstance(event, Recovered))
    assert found["evermoe_recovery_seconds_total", "agree"] == pytest.approx(recovered.seconds["agree"])


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(f"evermoe_{name}", labels)


def test_what_is_counted():
    metrics = Metrics()
    for sent in (10, 40, 100, 60, 100, 30, 30):  # the third snapshot was given up, and the next one has the same size
        metrics(Chunk(1, sent, 100))
    assert value(metrics, "copied_bytes_total") == 260
    for each in (Begin(0), Begin(1), Skipped(1, None), Damaged("a", 1, "a bit")):
        metrics(each)
    recovered = Recovered(0.0, {"agree": 0.25}, 7, 2, 3, "lost", 100, 1, {}, 9, 0, [], {"e": 5}, {"e": 30, "f": 12})
    for each in (recovered, Begin(2), recovered):
        metrics(each)
    assert value(metrics, "step_seconds_count") == 1
    assert value(metrics, "skipped_total") == value(metrics, "damaged_total") == 1
    assert value(metrics, "recovery_seconds_total", phase="agree") == 0.5
    assert (value(metrics, "steps_lost_total"), value(metrics, "tokens_lost_total")) == (4, 84)
    assert (value(metrics, "step"), value(metrics, "members"), value(metrics, "fetched_bytes_total")) == (7, 3, 200)


def test_lines_of_several_threads_and_writers_stay_whole(tmp_path):
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
