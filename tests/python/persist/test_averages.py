"""Checkpoints have the weights, also where a script puts averages in their place while they are read."""

from __future__ import annotations

import threading

import torch
from safetensors.torch import load_file

import evermoe
from evermoe import ElasticSampler, Session
from evermoe.checkpoint.checkpoint_folder import find_manifests
from evermoe.checkpoint.checkpoint_write import CheckpointWrite
from evermoe.checkpoint.manifest import SAVE
from evermoe.optim import EMA
from evermoe.state.version import step_of
from support.harness import PATIENCE


def test_a_checkpoint_that_is_read_while_averages_are_applied_has_the_weights(tmp_path, monkeypatch):
    may_read, write = threading.Event(), CheckpointWrite._write

    def late(self):
        assert may_read.wait(PATIENCE)
        return write(self)

    monkeypatch.setattr(CheckpointWrite, "_write", late)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ema = EMA(optimizer, 0.5)
    session = Session(
        model,
        optimizer,
        ElasticSampler(16, 4),
        checkpoints=evermoe.Checkpoints(str(tmp_path), interval=2),
        replication=0,
    )
    weights = {}
    for step in session.steps(3):
        with step:
            step.backward(model(torch.ones(4, 4)).square().mean())
        if session.step == 2:
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            with ema.applied():
                assert not torch.equal(model.weight, weights["weight"])
                may_read.set()
                session._driver.saving.checkpointer.under_way.wait_captured()
    session.close()
    (file,) = tmp_path.glob("*2*/units-0.safetensors")
    saved = {name.split("/", 1)[1]: value for name, value in load_file(file).items() if not name.startswith("session")}
    for name, value in weights.items():
        assert torch.equal(saved[name].view(value.dtype).reshape(value.shape), value)


def test_a_save_of_pec_that_is_read_while_averages_are_applied_has_the_weights(tmp_path, monkeypatch):
    may_read, write = threading.Event(), CheckpointWrite._write
    may_read.set()

    def late(self):
        assert may_read.wait(PATIENCE)
        return write(self)

    monkeypatch.setattr(CheckpointWrite, "_write", late)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ema = EMA(optimizer, 0.5)
    session = Session(model, optimizer, ElasticSampler(16, 4), preset="pec", checkpoints=str(tmp_path))
    saver = session._driver.saving.saver
    weights = {}
    for step in session.steps(3):
        if saver.under_way is not None:
            saver.under_way.wait_at_most(PATIENCE)
        if step.number == 1:
            may_read.clear()
        with step:
            step.backward(model(torch.ones(4, 4)).square().mean())
        if session.step == 2:
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            with ema.applied():
                assert not torch.equal(model.weight, weights["weight"])
                may_read.set()
                saver.under_way.wait_captured()
            saver.under_way.wait_published()
            catalog = session._state.catalog
            newest = find_manifests(tmp_path, catalog.layout, (SAVE,))[-1]
            assert step_of(newest.version) == 2
            (unit,) = newest.units.keys() - {"session"}
            saved = catalog.by_name[unit].tensors(newest.units[unit].data)
            for name, value in weights.items():
                assert torch.equal(saved[name].reshape(value.shape), value)
    assert weights
    session.close()
