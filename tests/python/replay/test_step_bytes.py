"""A step of a unit, written as bytes and repeated from them, has the bits of the optimizer's."""

import pytest
import torch
from torch import nn

from evermoe import MoE, optim
from evermoe.copies.replay.calibrate import calibrate
from evermoe.copies.replay.exchange import rows_of
from evermoe.copies.replay.replayable import is_repeatable
from evermoe.copies.replay.source import rules_of
from evermoe.copies.replay.step_bytes import repeat_step, step_bytes, write_step
from evermoe.copies.replay.step_notes import StepNotes
from evermoe.state.training_state import TrainingState

OPTIMIZERS = {
    "torch's AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), torch.float32),
    "AdamW": (lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1), torch.float32),
    "SGD": (lambda p: optim.SGD(p, lr=1e-2, momentum=0.9), torch.float32),
    "SGD that changes gradients": (
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
        torch.float32,
    ),
    "plain SGD": (lambda p: optim.SGD(p, lr=1e-2), torch.float32),
    "masters of bfloat16": (lambda p: optim.AdamW(p, lr=1e-2), torch.bfloat16),
    "masters of float16": (lambda p: optim.AdamW(p, lr=1e-2), torch.float16),
}


class Trainer:
    """A stage with a dense layer, experts and a normalization, whose units are followed."""

    def __init__(self, kind):
        make, dtype = OPTIMIZERS[kind]
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"dense": nn.Linear(8, 6), "moe": MoE(8, 8, 3), "norm": nn.BatchNorm1d(8)}).to(dtype)
        self.optimizer = make(self.model.parameters())
        self.state = TrainingState(self.model, self.optimizer)
        arithmetics = {self.optimizer: calibrate(self.optimizer)}
        rules = rules_of(self.optimizer, arithmetics)
        self.units = [unit for unit in self.state.catalog.units if is_repeatable(self.state, unit, rules)]
        rows = {unit.name: rows_of(self.state, unit.name) for unit in self.units}
        self.notes = StepNotes(self.optimizer, arithmetics, rows)

    def read(self, unit):
        data = torch.empty(unit.nbytes, dtype=torch.uint8)
        self.state.read(unit.name, data)
        return data

    def step(self, leaves_out=None):
        """Takes a step; by unit, its bytes."""
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        if leaves_out is not None:
            leaves_out.grad = None
        self.notes.note_step()
        self.optimizer.step()
        taken = self.notes.take_steps()
        written = {unit.name: torch.zeros(step_bytes(unit), dtype=torch.uint8) for unit in self.units}
        for unit in self.units:
            write_step(unit, taken[unit.name], written[unit.name])
        return written


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_is_repeated_from_its_bytes(kind):
    trainer = Trainer(kind)
    names = [unit.name for unit in trainer.units]
    assert {"dense", "moe.experts.0", "moe.experts.1", "moe.experts.2"} <= {*names}
    assert "norm" not in names, "its buffers change without a gradient"
    copies = {unit.name: trainer.read(unit) for unit in trainer.units}
    for number in range(3):
        written = trainer.step(leaves_out=trainer.model["dense"].bias if number == 1 else None)
        for unit in trainer.units:
            repeat_step(unit, written[unit.name], copies[unit.name])
            assert torch.equal(copies[unit.name], trainer.read(unit)), (unit.name, number)


def test_nothing_noted_is_a_step_that_changes_nothing():
    trainer = Trainer("AdamW")
    trainer.step()
    unit = trainer.units[0]
    written, before = torch.ones(step_bytes(unit), dtype=torch.uint8), trainer.read(unit)
    write_step(unit, trainer.notes.take_steps().get(unit.name, []), written)
    copy = before.clone()
    repeat_step(unit, written, copy)
    assert torch.equal(copy, before)


def test_a_step_whose_numbers_are_unknown_is_taken_and_not_repeated():
    trainer = Trainer("torch's AdamW")
    trainer.step()
    trainer.optimizer.param_groups[0]["lr"] = -1e-12  # a schedule's rounding
    unit, before = trainer.units[0], trainer.read(trainer.units[0])
    copy = before.clone()
    repeat_step(unit, trainer.step()[unit.name], copy)
    assert torch.equal(copy, before)
    assert not torch.equal(trainer.read(unit), before)


def test_bytes_that_are_no_step_are_refused():
    trainer = Trainer("AdamW")
    unit = trainer.units[0]
    written, copy = trainer.step()[unit.name], trainer.read(unit)
    written[8] = 77  # how many numbers it has
    with pytest.raises(ValueError, match="has 77 numbers"):
        repeat_step(unit, written, copy)


def test_a_step_takes_a_third_of_a_state_or_less():
    for kind, most in {"AdamW": 0.36, "masters of bfloat16": 0.17}.items():
        torch.manual_seed(0)
        make, dtype = OPTIMIZERS[kind]
        model = nn.Linear(256, 256).to(dtype)
        unit = TrainingState(model, make(model.parameters())).catalog.by_name["model"]
        assert step_bytes(unit) <= most * unit.nbytes
