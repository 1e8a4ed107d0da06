"""Ops, captures, digests and couriers on a GPU that is not the current one: its memory, its stream, its kernels."""

import pytest
import torch

from evermoe import ops
from evermoe._native import Arena, CopyEngine
from evermoe.comm.courier import Courier
from evermoe.comm.transport import Transport
from evermoe.copies.snapshot.chunked_copy import ChunkedCopy
from evermoe.ops.cache import has_cuda_kernels
from evermoe.optim import SGD
from evermoe.state.gpu_digests import gpu_digests
from evermoe.state.unit import digests_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def second():
    """The second GPU; the first one stays the current one."""
    if torch.cuda.device_count() < 2 or not has_cuda_kernels():
        pytest.skip("no second CUDA device, or no kernels in this build")
    yield torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0


def test_ops(second):
    ids = torch.tensor([[0, 2], [2, 1]], device=second)
    assert ops.expert_histogram(ids, 3).tolist() == [1, 1, 2]
    with torch.cuda.device(second):
        side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.cuda.device(0):  # a device's current stream stays as it is
        parameters = [torch.nn.Parameter(torch.ones(100, device=place)) for place in (second, "cpu")]
        for parameter in parameters:
            parameter.grad = torch.arange(100.0).to(parameter.device)
            SGD([parameter], lr=0.1, momentum=0.9).step()
        found = parameters[0].detach().cpu()
    assert torch.equal(found, parameters[1].detach())


def test_a_capture(second, tmp_path):
    tensors = [torch.randn(70_001, device=second), torch.arange(5, device=second)]
    arena = Arena.create(str(tmp_path / "arena"), "", [("a", tensors[0].nbytes), ("b", tensors[1].nbytes)])
    engine = CopyEngine()
    engine.open()
    for version in range(1, 4):
        tensors[0].mul_(2)
        capture = ChunkedCopy(tensors, 1 << 16).capture(engine, arena, version, [1, 1])
        capture.hurry()
        capture.wait()
        found = torch.from_numpy(arena.buffer(capture.index))
        for (_, offset, nbytes), tensor in zip(arena.units(), tensors, strict=True):
            assert torch.equal(found[offset : offset + nbytes].view(tensor.dtype), tensor.cpu())
    engine.shutdown()


def test_digests_of_units_on_the_host_and_on_the_device(second):
    tensors = [torch.randn(20_001, device=torch.device("cuda", place)) for place in (0, 1, 0, 1)]
    units = [*([tensor, torch.tensor(1.0)] for tensor in tensors), tensors[:2]]
    tensors[1].mul_(2)
    found = gpu_digests(units)
    assert sorted(found) == [0, 1, 2, 3]
    expected = digests_of([[tensor.cpu() for tensor in unit] for unit in units])
    assert [found[place] for place in range(4)] == expected[:4]
    assert digests_of(units) == expected


def test_an_errand(second):
    values = torch.zeros(1000, device=second)
    courier = Courier(Transport("127.0.0.1"), None, "courier", device=second)
    values += 1
    task = courier.submit(values.cpu)
    assert task.wait()
    assert bool((task.result == 1).all())
    courier.close()
