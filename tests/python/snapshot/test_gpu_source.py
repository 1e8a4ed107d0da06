"""What is captured from a GPU has the bytes of the units, though optimizers share or keep elsewhere some of them."""

import pytest
import torch

from evermoe import MoE, ops
from evermoe._native import Arena, CopyEngine
from evermoe.snapshot.gpu_source import GpuSource
from evermoe.snapshot.gpu_sources import GpuSources
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_lies_beside_is_captured_though_training_goes_on(tmp_path, device, name):
    """Nothing is copied to the host until the state has changed."""
    layer = MoE(8, 8, 3, top_k=1, device=device)
    optimizer = OPTIMIZERS[name](layer.parameters())
    state = TrainingState(layer, optimizer, has_session=False)
    units = state.held()
    sizes = [(unit, state.catalog.by_name[unit].nbytes) for unit in units]
    arena, engine = Arena.create(str(tmp_path / "arena"), "", sizes), CopyEngine()
    tensors = state.tensors(units)
    every = [tensor for each in tensors for tensor in each]
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    source = GpuSource(every, place, is_beside=True)
    assert source.nbytes == sum(tensor.nbytes for tensor in every)
    for version in range(1, 4):
        expected = {unit: torch.empty(nbytes, dtype=torch.uint8) for unit, nbytes in sizes}
        for unit, out in expected.items():
            state.read(unit, out)
        engine.close_gate()
        capture = source.copy().capture(engine, arena, version, [*map(len, tensors)])
        source.release()
        train(layer, optimizer, device)
        engine.open()
        capture.hurry()
        capture.wait()
        found = torch.from_numpy(arena.buffer(capture.index))
        for unit, offset, nbytes in arena.units():
            assert torch.equal(found[offset : offset + nbytes], expected[unit]), unit
            now = torch.empty(nbytes, dtype=torch.uint8)
            state.read(unit, now)
            assert not torch.equal(now, expected[unit]), "the test has changed it meanwhile"
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


class Capturing:
    """A bundle of one unit that is captured again and again, on a device of which so much memory is free."""

    def __init__(self, folder, device, sources):
        self.tensors = [torch.arange(4096.0, device=device)]
        self.device = self.tensors[0].device
        self.arena = Arena.create(str(folder / "arena"), "", [("unit", 4 * 4096)])
        self.engine, self.sources, self.version = CopyEngine(), sources, 0
        self.engine.open()

    def capture(self):
        """Captures, and whether that was on the GPU first."""
        self.version += 1
        source = self.sources.of(0, self.tensors, self.device)
        self.sources.note(0, source.copy().capture(self.engine, self.arena, self.version, [1]))
        return self.sources.release(0)


@pytest.mark.parametrize(("memory", "beside"), [("host", [False] * 4), ("gpu", [True] * 4)])
def test_snapshots_are_made_where_they_are_asked_for(tmp_path, device, memory, beside):
    capturing = Capturing(tmp_path, device, GpuSources(memory))
    assert [capturing.capture() for _ in beside] == beside
    assert capturing.sources.nbytes == 4 * 4096 * beside[0]
    capturing.sources.clear()
    assert capturing.sources.nbytes == 0
    capturing.engine.shutdown()


@pytest.mark.gpu
def test_free_memory_decides_once_a_step_has_shown_what_training_takes(tmp_path, monkeypatch):
    if not (torch.cuda.is_available() and ops.has_cuda_kernels()):
        pytest.skip("no CUDA device, or no kernels in this build")
    total = 1 << 30
    free = [total, total, total // 16, total // 8, total // 32, total // 65, total // 32]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free.pop(0), total))
    capturing = Capturing(tmp_path, "cuda", GpuSources("auto"))
    found = [capturing.capture() for _ in range(7)]
    assert found == [False, False, False, True, True, False, False]
    capturing.engine.shutdown()


@pytest.mark.gpu
def test_too_little_memory_leaves_snapshots_on_the_host(tmp_path, monkeypatch):
    if not (torch.cuda.is_available() and ops.has_cuda_kernels()):
        pytest.skip("no CUDA device, or no kernels in this build")

    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    capturing = Capturing(tmp_path, "cuda", GpuSources("gpu"))
    first = torch.empty
    calls = []

    def once(*arguments, **options):
        calls.append(arguments)
        return full() if len(calls) == 1 else first(*arguments, **options)

    monkeypatch.setattr(torch, "empty", once)
    with pytest.warns(UserWarning, match="made in host memory from now on: CUDA out of memory"):
        assert not capturing.capture()
    assert not capturing.capture()
    capturing.engine.shutdown()
