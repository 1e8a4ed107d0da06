"""Replicas repeat the steps of float32 masters bit for bit; the parameters are their roundings."""

import copy

import pytest
import torch

from evermoe import optim
from evermoe._native import digest
from evermoe.copies.replay.calibrate import calibrate
from evermoe.copies.replay.replica import Replica
from evermoe.copies.replay.sender import GradientSender, Row
from evermoe.errors import NotReplayable
from support.masters import MasterAdam

EXPERTS, WIDTH, STEPS = 3, 96, 60
OPTIMIZERS = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adamw, maximize": lambda p: optim.AdamW(p, lr=1e-2, maximize=True),
    "sgd": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: optim.SGD(p, lr=1e-2),
}


class Trainer:
    """A stack of experts and two dense parameters, of which one has an odd number of elements."""

    def __init__(self, make, dtype, is_hooked, device="cpu"):
        self.random = torch.Generator().manual_seed(0)
        shapes = ((EXPERTS, WIDTH), (6, 5), (7,))
        self.parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=self.random).to(device, dtype)) for shape in shapes
        ]
        self.stack, self.weight, self.bias = self.parameters
        self.optimizer = make(self.parameters)
        units = {f"experts.{index}": {"weights": Row(self.stack, index)} for index in range(EXPERTS)}
        units["dense"] = {"weight": self.weight, "bias": self.bias}
        arithmetics = None if is_hooked else {self.optimizer: calibrate(self.optimizer)}
        self.sender = GradientSender(self.optimizer, units, arithmetics=arithmetics, is_hooked=is_hooked)
        give_gradients(self, 0)  # a parameter that replicas cannot follow is laid out as its first step leaves it
        self.optimizer.step()

    def state(self, unit):
        names = {"dense": [(self.weight, None), (self.bias, None)]}
        sources = names.get(unit) or [(self.stack, int(unit.split(".")[1]))]
        found = []
        for source, row in sources:
            kept = self.optimizer.state[source]
            for value in [source.detach(), *(kept[key] for key in sorted(kept))]:
                own = value[row] if row is not None and value.dim() else value
                found.append(own.contiguous().view(-1).view(torch.uint8).cpu())
        return torch.cat(found)


def give_gradients(trainer, step):
    for parameter in trainer.parameters:
        parameter.grad = torch.randn(parameter.shape, generator=trainer.random).to(parameter.device, parameter.dtype)
    trainer.stack.grad[step % EXPERTS] = 0
    if step % 5 == 1:
        trainer.weight.grad = None


def check(replica, trainer, units):
    for unit in units:
        caught, state = replica.catch_up(unit), trainer.state(unit)
        assert torch.equal(caught.state, state), unit
        assert caught.digest == digest(state.numpy())


def clip_of(step):
    return 1.0 if step % 4 == 3 else 1 / (1.1 + step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.few(4)
def test_replica_has_the_bits_of_masters_and_parameters(name, dtype):
    trainer = Trainer(OPTIMIZERS[name], dtype, is_hooked=True)
    experts = [f"experts.{index}" for index in range(EXPERTS)]
    sizes = []
    with Replica(trainer.sender.layouts()) as replica:
        for step in range(STEPS):
            give_gradients(trainer, step)
            trainer.optimizer.step(**({} if step % 2 else {"factor": clip_of(step)}))
            messages = trainer.sender.messages(step)
            sizes.append(sum(map(len, messages[:EXPERTS])))
            assert {replica.receive(message).code for message in messages} == {"ok"}
            if step % 7 == 6:
                check(replica, trainer, [*experts, "dense"])
    assert max(sizes[1:]) < sizes[0] * 2 / 3, "gradients, not states"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.few(5)
def test_gradients_that_are_clipped_in_the_step_after_they_were_sent(name, dtype, device):
    trainer = Trainer(OPTIMIZERS[name], dtype, is_hooked=False, device=device)
    experts = [f"experts.{index}" for index in range(EXPERTS)]
    with Replica(trainer.sender.layouts()) as replica:
        for step in range(1, STEPS):  # the full state is that of the step before
            give_gradients(trainer, step)
            for _, message in trainer.sender.next_step_messages(step, experts):
                assert replica.receive(message, hold=True).code == "ok"
            trainer.optimizer.step(factor=clip_of(step))
            trainer.sender.on_step()
            replica.release_held(clip=clip_of(step))
            if step % 7 == 6:
                check(replica, trainer, experts)


@pytest.mark.parametrize("make", [MasterAdam, lambda p: torch.optim.AdamW(p, fused=True)])
def test_masters_of_another_name_and_no_masters_are_sent_as_states(make):
    parameters = [torch.nn.Parameter(torch.randn(4, 32).bfloat16())]
    with pytest.raises(NotReplayable, match="float32"):
        calibrate(make(parameters))


def test_arithmetic_is_found_for_several_types_and_the_optimizer_is_not_touched():
    parameters = [torch.nn.Parameter(torch.randn(4, 32).to(t)) for t in (torch.float32, torch.bfloat16, torch.float16)]
    optimizer = optim.AdamW(parameters)
    before = copy.deepcopy(parameters)
    assert calibrate(optimizer).variant == "evermoe"
    assert not optimizer.state
    assert all(torch.equal(*pair) for pair in zip(parameters, before, strict=True))
