"""Captures from a GPU have the bytes of the units, though optimizers share or keep elsewhere some of them."""

import pytest
import torch

from evermoe import MoE
from evermoe._native import Arena, CopyEngine
from evermoe.copies.snapshot.gpu_source import GpuSource
from evermoe.copies.snapshot.gpu_sources import GpuSources
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


class Training:
    """A layer that is trained, and an arena for its units."""

    def __init__(self, folder, device, name):
        self.layer = MoE(8, 8, 3, top_k=1, device=device)
        self.optimizer = OPTIMIZERS[name](self.layer.parameters())
        self.state = TrainingState(self.layer, self.optimizer, session=None)
        units = self.state.held()
        sizes = [(unit, self.state.catalog.by_name[unit].nbytes) for unit in units]
        self.arena, self.engine = Arena.create(str(folder / "arena"), "", sizes), CopyEngine()
        tensors = self.state.tensors(units)
        self.tensors = [tensor for each in tensors for tensor in each]
        self.counts = [*map(len, tensors)]
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)

    def step(self):
        train(self.layer, self.optimizer, self.device)

    def begin(self, source, version):
        return source.copy().capture(self.engine, self.arena, version, self.counts)

    def captured(self, capture):
        """By unit, the bytes of a capture that ends now."""
        capture.hurry()
        capture.wait()
        found = torch.from_numpy(self.arena.buffer(capture.index))
        return {unit: found[offset : offset + nbytes] for unit, offset, nbytes in self.arena.units()}

    def now(self):
        """By unit, the bytes of the state."""
        found = {unit: torch.empty(nbytes, dtype=torch.uint8) for unit, _, nbytes in self.arena.units()}
        for unit, out in found.items():
            self.state.read(unit, out)
        return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_capture_has_the_bytes_of_the_units(tmp_path, device, name):
    training = Training(tmp_path, device, name)
    training.engine.open()
    source = GpuSource(training.tensors, training.device)
    for version in range(1, 4):
        training.step()
        found, expected = training.captured(training.begin(source, version)), training.now()
        assert all(torch.equal(found[unit], expected[unit]) for unit in expected)
    training.engine.shutdown()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_buffers_outside_the_optimizer_are_captured_while_training_continues(tmp_path, device, name):
    """Nothing is copied to the host until the state has changed."""
    training = Training(tmp_path, device, name)
    source = GpuSource(training.tensors, training.device, copies_first=True)
    assert source.nbytes == sum(tensor.nbytes for tensor in training.tensors)
    for version in range(1, 4):
        expected = training.now()
        training.engine.close_gate()
        capture = training.begin(source, version)
        source.release()
        training.step()
        training.engine.open()
        found, changed = training.captured(capture), training.now()
        assert all(torch.equal(found[unit], expected[unit]) for unit in expected)
        assert not any(torch.equal(changed[unit], expected[unit]) for unit in expected)
    training.engine.shutdown()


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
        self.sources.note_capture(0, source.copy().capture(self.engine, self.arena, self.version, [1]))
        return self.sources.release(0)


@pytest.mark.parametrize(("memory", "on_gpu"), [("host", [False] * 4), ("gpu", [True] * 4)])
def test_snapshots_are_made_where_they_are_asked_for(tmp_path, device, memory, on_gpu):
    capturing = Capturing(tmp_path, device, GpuSources(memory))
    assert [capturing.capture() for _ in on_gpu] == on_gpu
    assert capturing.sources.nbytes == 4 * 4096 * on_gpu[0]
    capturing.sources.clear()
    assert capturing.sources.nbytes == 0
    capturing.engine.shutdown()


@pytest.mark.gpu
def test_free_memory_decides_once_a_step_has_shown_what_training_takes(tmp_path, cuda, monkeypatch):
    total = 1 << 30
    free = [total, total, total // 16, total // 8, total // 32, total // 65, total // 32]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free.pop(0), total))
    capturing = Capturing(tmp_path, cuda, GpuSources("auto"))
    found = [capturing.capture() for _ in range(7)]
    assert found == [False, False, False, True, True, False, False]
    capturing.engine.shutdown()


@pytest.mark.gpu
def test_too_little_memory_leaves_snapshots_on_the_host(tmp_path, cuda, monkeypatch):
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    capturing = Capturing(tmp_path, cuda, GpuSources("gpu"))
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


def test_nothing_is_read_any_more_once_the_tensors_are_let_go(tmp_path, device):
    capturing = Capturing(tmp_path, device, GpuSources("gpu"))
    capturing.engine.close_gate()
    assert capturing.capture(), "training may continue"
    assert capturing.arena.versions() == []
    capturing.sources.clear()
    assert [version for _, version in capturing.arena.versions()] == [1]
    capturing.engine.shutdown()
