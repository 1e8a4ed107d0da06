"""Steps as the optimizer counts them, on a GPU with one wait for all parameters."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evermoe.copies.replay.sender import GradientSender, Row
from evermoe.copies.replay.step_counts import StepCounts


class Reads(TorchDispatchMode):
    """Counts what the host reads."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from_gpu = any(isinstance(each, torch.Tensor) and each.is_cuda for each in args)
        to_host = func is torch.ops.aten._to_copy.default and str((kwargs or {}).get("device")) == "cpu"
        self.count += from_gpu and (func is torch.ops.aten._local_scalar_dense.default or to_host)
        return func(*args, **(kwargs or {}))


def stepped(device, steps, **options):
    parameters = [torch.nn.Parameter(torch.ones(4, 3, device=device)) for _ in range(5)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)
    for number in range(steps):
        for parameter in parameters[: 5 - number]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return parameters, optimizer


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_counts_are_the_optimizers(device, options):
    parameters, optimizer = stepped(device, 3, **options)
    counts = StepCounts(optimizer)
    assert [counts.steps_of(each) for each in parameters] == [3, 3, 3, 2, 1]
    parameters[4].grad = torch.ones_like(parameters[4])
    optimizer.step()
    counts.forget_counts()
    assert [counts.steps_of(each) for each in parameters] == [3, 3, 3, 2, 2]
    loaded = optimizer.state_dict()
    loaded["state"][0]["step"] = loaded["state"][0]["step"] + 40
    optimizer.load_state_dict(loaded)
    counts.forget_counts()
    assert [counts.steps_of(each) for each in parameters] == [43, 3, 3, 2, 2]


def test_what_has_taken_no_step_has_no_count():
    parameters, optimizer = stepped("cpu", 0)
    assert StepCounts(optimizer).steps_of(parameters[0]) is None


@pytest.mark.gpu
def test_the_host_reads_a_gpu_once_after_a_step_for_all_rows(cuda):
    parameters, optimizer = stepped(cuda, 1, fused=True)
    units = {
        f"{number}.{row}": {"w": Row(each, row)} for number, each in enumerate(parameters) for row in range(len(each))
    }
    sender = GradientSender(optimizer, units)
    for step in (2, 3):
        for each in parameters:
            each.grad = torch.ones_like(each)
        list(sender.messages(step - 1))
        optimizer.step()
    with Reads() as reads:
        for source in sender._sources:
            source.steps_taken()
    assert reads.count <= 1
    assert {source.steps_taken() for source in sender._sources} == {3}
