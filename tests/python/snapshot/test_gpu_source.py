"""What is captured from a GPU has the bytes of the units, though optimizers share or keep elsewhere some of them."""

import pytest
import torch

from evermoe import MoE
from evermoe._native import Arena, CopyEngine
from evermoe.snapshot.gpu_source import GpuSource
from evermoe.state.training_state import TrainingState

OPTIMIZERS = {
    "one step for all experts": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "a step on the CPU": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "no state": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


def train(layer, optimizer, device):
    layer(torch.randn(20, 8, device=device)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_capture_has_the_bytes_of_the_units(tmp_path, device, name):
    layer = MoE(8, 8, 3, top_k=1, device=device)
    optimizer = OPTIMIZERS[name](layer.parameters())
    state = TrainingState(layer, optimizer, has_session=False)
    units = state.held()
    sizes = [(unit, state.catalog.by_name[unit].nbytes) for unit in units]
    arena, engine = Arena.create(str(tmp_path / "arena"), "", sizes), CopyEngine()
    engine.open()
    tensors = state.tensors(units)
    every = [tensor for each in tensors for tensor in each]
    source = GpuSource(every, torch.device(device, 0) if device == "cuda" else torch.device(device))
    for version in range(1, 4):
        train(layer, optimizer, device)
        capture = source.copy().capture(engine, arena, version, [*map(len, tensors)])
        capture.hurry()
        capture.wait()
        found = torch.from_numpy(arena.buffer(capture.index))
        for unit, offset, nbytes in arena.units():
            expected = torch.empty(nbytes, dtype=torch.uint8)
            state.read(unit, expected)
            assert torch.equal(found[offset : offset + nbytes], expected), unit
    engine.shutdown()


def test_it_is_of_the_tensors_where_they_were():
    tensors = [torch.zeros(100), torch.zeros(3)]
    source = GpuSource(tensors, torch.device("cpu"))
    assert source.is_of(tensors)
    assert not source.is_of([tensors[0], torch.zeros(3)])


def test_little_may_be_elsewhere():
    large, small = torch.zeros(1000, device="meta"), torch.zeros(1)
    assert GpuSource.fits([large, small, small], torch.device("meta"))
    assert not GpuSource.fits([large, torch.zeros(100)], torch.device("meta"))
