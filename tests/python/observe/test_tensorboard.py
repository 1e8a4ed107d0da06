"""Curves for TensorBoard, read back by its own reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evermoe import Checkpoints, ElasticSampler, Membership, Session
from evermoe.events import (
    Commit,
    CorruptionFound,
    CoverageChanged,
    Damaged,
    Measured,
    Recovered,
    SampleSkipped,
    SickNode,
    Skipped,
    SlowLoader,
    SlowMember,
)
from evermoe.observe import TensorBoard
from evermoe.observe.listeners import from_environment
from support.worker import SAMPLES, Model, dataset

FULL = """
import itertools, resource, sys, warnings
from evermoe.events import Measured
from evermoe.observe import tensorboard

warnings.simplefilter("always")
tensorboard.FLUSH_SECONDS = 0
curves = tensorboard.TensorBoard(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
for step in itertools.count():
    curves(Measured(step, 1.0, 1, 1.0, 1.0, {}, {}))
    if curves._writer is None:
        break
for step in range(100):
    curves(Measured(step, 1.0, 1, 1.0, 1.0, {}, {}))
print("trained on")
"""
LEFT = """
import sys
from evermoe.events import Commit
from evermoe.observe import TensorBoard

curves = TensorBoard(sys.argv[1])
for step in range(1000):
    curves(Commit(step, 0.5, 1, 1, 2.5))
"""


def curves(folder):
    """By name steps and values, as TensorBoard shows them."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {name: [(each.step, each.value) for each in reader.Scalars(name)] for name in reader.Tags()["scalars"]}


def of(seen, kind):
    return [event for event in seen if isinstance(event, kind)]


def test_curves_of_a_session_are_what_its_events_say(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERMOE_TENSORBOARD", str(tmp_path))
    monkeypatch.setenv("EVERMOE_NODE", "here")
    monkeypatch.setenv("LOCAL_RANK", "3")
    model, seen = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"checkpoints": Checkpoints(tmp_path / "saved", interval=2), "membership": Membership(node="here")}
    session = Session(model, optimizer, ElasticSampler(SAMPLES, 4), on_event=seen.append, **options)
    for step in session.steps(5):
        with step:
            step.backward(model(dataset()[step.indices]))
    found = curves(tmp_path / "here-3")
    assert found["loss"] == [(event.step + 1, pytest.approx(event.loss)) for event in of(seen, Commit)]
    measured = of(seen, Measured)
    assert found["step/seconds"] == [(event.step + 1, pytest.approx(event.seconds)) for event in measured]
    speeds = [(event.step + 1, pytest.approx(event.tokens / event.seconds)) for event in measured]
    assert found["step/tokens_per_second"] == speeds
    assert found["load/expert_imbalance"] == [
        (event.step + 1, pytest.approx(event.expert_imbalance)) for event in measured
    ]
    assert found["copies/lag/checkpoint"] == [(event.step + 1, event.lag["checkpoint"]) for event in measured]
    (recovered,) = of(seen, Recovered)
    assert found["recovery/agree"] == [(0, pytest.approx(recovered.seconds["agree"]))]
    assert found["recovery/total"] == [(0, pytest.approx(sum(recovered.seconds.values())))]
    assert [value for _, value in found["survives/fatal_losses"]] == [
        len(each.fatal) for each in of(seen, CoverageChanged)
    ]


def test_the_table_of_curves_names_all(tmp_path):
    listener = TensorBoard(tmp_path)
    for event in (
        Recovered(0.0, {"agree": 1.0}, 7, 2, 3, "lost", 100, 1, {}, 9, 0, [], {"e": 5}, {"e": 30}),
        CoverageChanged(1.0, 0.5, {"a + b": 2}, is_complete=True),
        Measured(7, 0.5, 8, 1.5, 2.0, {"snapshot": 2}, {"snapshot": 30}, 0, 0.25, 3),
        Skipped(8, None),
        Damaged("u", 8, "a bit"),
        CorruptionFound(8, ["u"], [1], ["b"], "repair"),
        SampleSkipped(8, 3, 0, 17, "ValueError: damaged"),
        SlowLoader(8, "a-1", "ElasticLoader", 0.5, 0.6, "slow"),
        SickNode("a-1", "a", "GPU-1", "Xid 63", "warn"),
        SlowMember(8, "a-1", "a", 0, "compute", 0.5, 0.25, 2.0),
        Commit(7, 1.0, 3, 2, 2.5, 96, 768, 1.25),
    ):
        listener(event)
    listener.close()
    listener(Commit(8, 1.0, 3, 2, 2.5))  # is ignored
    named = {"recovery/agree": "recovery/PHASE", "copies/lag/snapshot": "copies/lag/KIND"}
    named["copies/sent_bytes/snapshot"] = "copies/sent_bytes/KIND"
    found = curves(tmp_path)
    rows = [line for line in TensorBoard.__doc__.splitlines() if line.strip().startswith("| `")]
    assert sorted(named.get(name, name) for name in found) == sorted(
        name.strip("` ") for row in rows for name in row.split("|")[1].split(",")
    )
    assert found["recovery/tokens_lost"] == [(7, 30)]
    assert found["damaged"] == [(8, 1)]
    assert found["loss"] == [(8, 1)]


@pytest.mark.timeout(200)
@pytest.mark.long
def test_a_full_disk_is_one_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], text=True, capture_output=True, timeout=180, check=True
    )
    assert done.stdout == "trained on\n"
    assert done.stderr.count("UserWarning") == 1
    assert f"curves cannot be written to {tmp_path}: [Errno 27] File too large. Training continues" in done.stderr


@pytest.mark.timeout(200)
def test_the_end_of_a_process_writes_all_values(tmp_path):
    subprocess.run([sys.executable, "-c", LEFT, str(tmp_path)], timeout=180, check=True)
    assert len(curves(tmp_path)["loss"]) == 1000


def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EVERMOE_TENSORBOARD", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"file \(EVERMOE_TENSORBOARD\)"):
        from_environment()
    assert os.listdir(tmp_path) == ["file"]
    monkeypatch.setenv("EVERMOE_TENSORBOARD", "")
    assert from_environment() == []
    assert Path(TensorBoard(tmp_path / "new" / "one").folder).is_dir()
