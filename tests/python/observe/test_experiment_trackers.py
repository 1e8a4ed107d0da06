"""Curves in Weights & Biases and in MLflow, read back from their files: those of TensorBoard, with two points for a
step that a failure has undone.

The packages are imported by the tests that use them: MLflow takes seconds.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from evermoe import ElasticSampler, Session
from evermoe.events import Commit, CoverageChanged, Damaged, Measured, Recovered, SlowMember
from evermoe.observe import MLflow, TensorBoard, Wandb
from observe.test_tensorboard import curves
from support.worker import SAMPLES, Model, dataset

EVENTS = (
    CoverageChanged(1.0, 0.5, {"a + b": 2}, is_complete=True),
    Measured(7, 0.5, 8, 1.5, 2.0, {"snapshot": 2}, {"snapshot": 30}, 0, 0.25, 3),
    Commit(7, 1.0, 3, 2, 2.5, 96, 768, 1.25),
    Measured(8, 0.25, 8, 1.5, 2.0, {"snapshot": 3}, {"snapshot": 40}, 0, 0.25, 3),
    SlowMember(8, "a-1", "a", 0, "compute", 0.5, 0.25, 2.0),
    Recovered(0.0, {"agree": 1.0, "fetch": 0.5}, 7, 2, 3, "lost", 100, 1, {}, 9, 0, [], {"e": 5}, {"e": 30}),
    Measured(7, 1.0, 8, 1.5, 2.0, {"snapshot": 1}, {"snapshot": 50}, 0, 0.25, 3),
    Commit(7, 2.0, 2, 3, 2.5, 96, 768, 1.25),
    Damaged("u", 8, "a bit"),
)
"""A failure after step 8 undoes it and step 7."""
BLOCK = 32768
"""Bytes of a block of W&B's files, which begin with a header of 7 bytes and have the format of LevelDB's logs."""


def all_records(folder):
    """Return the records of a finished run; W&B's own process may write the last ones after `finish` has returned."""
    found = []
    while not found or found[-1].WhichOneof("record_type") != "exit":
        time.sleep(0.02)
        found = list(records(folder))
    return found


def records(folder):
    """Yield the records of the only run that W&B has written to a folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = Path(folder).glob("wandb/offline-run-*/*.wandb")
    written, at, text = path.read_bytes(), 7, b""
    while at + 7 <= len(written):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        if at + 7 + int.from_bytes(written[at + 4 : at + 6], "little") > len(written):
            return  # is being written
        size, kind = int.from_bytes(written[at + 4 : at + 6], "little"), written[at + 6]
        text += written[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:  # a complete record, or the end of one
            yield Record.FromString(text)
            text = b""


def wandb_curves(folder):
    """By name steps and values, on the axis that each curve has."""
    axes, found = {}, {}
    for record in all_records(folder):
        if record.WhichOneof("record_type") == "metric":
            axes[record.metric.name] = record.metric.step_metric
        row = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for name in row.keys() & axes.keys() - {"evermoe/step"}:
            found.setdefault(name, []).append((row[axes[name]], row[name]))
    return found


def mlflow_curves(mlflow, run_id):
    client = mlflow.MlflowClient()
    return {
        name: [(each.step, each.value) for each in client.get_metric_history(run_id, name)]
        for name in client.get_run(run_id).data.metrics
    }


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of W&B, offline."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=tmp_path, project="evermoe", settings=wandb.Settings(x_disable_stats=True))
    yield run
    run.finish()


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow, which writes its files to this test's folder."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    previous = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    yield mlflow
    mlflow.end_run()
    mlflow.set_tracking_uri(previous)


def expected(tmp_path):
    """The curves that TensorBoard has of `EVENTS`."""
    listener = TensorBoard(tmp_path / "curves")
    for event in EVENTS:
        listener(event)
    listener.close()
    found = curves(tmp_path / "curves")
    assert found["step/seconds"] == [(8, 0.5), (9, 0.25), (8, 1.0)]
    return found


def test_wandb_has_the_curves_of_tensorboard(tmp_path, run):
    listener = Wandb()
    for event in EVENTS:
        listener(event)
    run.finish()
    assert wandb_curves(tmp_path) == expected(tmp_path)


def test_mlflow_has_the_curves_of_tensorboard(tmp_path, mlflow):
    with mlflow.start_run() as run:
        listener = MLflow()
        for event in EVENTS:
            listener(event)
    found = {name: sorted(points) for name, points in mlflow_curves(mlflow, run.info.run_id).items()}
    assert found == {name: sorted(points) for name, points in expected(tmp_path).items()}


def test_a_session_logs_to_both(tmp_path, run, mlflow):
    model, seen = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mlflow.start_run() as active:
        listeners = [seen.append, Wandb(run), MLflow()]
        session = Session(model, optimizer, ElasticSampler(SAMPLES, 4), on_event=listeners)
        for step in session.steps(3):
            with step:
                step.backward(model(dataset()[step.indices]))
    run.finish()
    losses = [(event.step + 1, event.loss) for event in seen if isinstance(event, Commit)]
    assert len(losses) == 3
    assert wandb_curves(tmp_path)["loss"] == losses
    assert sorted(mlflow_curves(mlflow, active.info.run_id)["loss"]) == losses


def test_a_run_that_has_ended_is_one_warning(run):
    listener = Wandb(run)
    run.finish()
    with pytest.warns(UserWarning, match=rf"W&B's run {run.id}: .*finished.* Training continues") as warnings:
        for event in EVENTS:
            listener(event)
    assert len(warnings) == 1


def test_a_run_must_have_begun(mlflow):
    pytest.importorskip("wandb")
    with pytest.raises(RuntimeError, match=r"call wandb\.init\(\) first"):
        Wandb()
    with pytest.raises(RuntimeError, match=r"call mlflow\.start_run\(\) first"):
        MLflow()


def test_the_packages_are_imported_on_first_use():
    code = "import sys, evermoe.observe; assert not {'wandb', 'mlflow', 'tensorboard'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
