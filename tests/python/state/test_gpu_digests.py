"""Digests of units on a GPU are those of their bytes, whichever way these come to the host."""

import gc

import numpy as np
import pytest
import torch

from evermoe import _native
from evermoe.ops.chunks import open_copier
from evermoe.state.gpu_digests import gpu_digests
from evermoe.state.unit import digests_of

gpu = pytest.mark.gpu
MIB = 1 << 20


def random_bytes(count, seed, device):
    found = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    return torch.from_numpy(found).to(device)


def units_of(device):
    """As optimizers have them: one `step` for several units, on the CPU or on the device; and what models may have."""
    step, shared = torch.tensor(7.0), torch.tensor(9.0, device=device)
    moments = random_bytes(3 * 40_004, 1, device).view(torch.float32).view(3, 10_001)
    experts = [[moments[row], shared, step] for row in range(3)]
    return [
        *experts,
        [],
        [torch.empty(0, device=device)],
        [step, step],
        [torch.empty(0, 4, device=device), random_bytes(1, 2, device), torch.zeros(3, 0)],
        [random_bytes(9001, 3, "cpu"), random_bytes(70_000, 4, device).view(torch.bfloat16), step],
        [random_bytes(60_000, 5, device).view(100, 600).t()],
        [random_bytes(6, 6, device).view(2, 3).t(), random_bytes(6, 7, "cpu").view(2, 3).t()],
        [torch.tensor([True, False], device=device), random_bytes(16, 8, device).view(torch.complex64)],
    ]


def expected(units):
    """Of bytes that were brought to the host tensor by tensor."""
    return [_native.digest(np.array(bytearray(b"".join(map(bytes_of, unit))), np.uint8)) for unit in units]


def bytes_of(tensor):
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_digests_are_those_of_the_bytes(device):
    units = units_of(device)
    assert digests_of(units) == expected(units)


@gpu
def test_units_on_a_gpu_are_digested_there(cuda):
    units = units_of(cuda)
    found = gpu_digests(units)
    assert sorted(found) == [0, 1, 2], "all but short ones, those mostly on the CPU, and those with gaps"
    values = expected(units)
    assert found == {place: values[place] for place in found}


@gpu
def test_units_of_any_size(cuda):
    sizes = [5 * MIB + 3, 17, 6 * MIB, 0, 237, 1021, MIB + 1]
    units = [[random_bytes(size, seed, cuda), torch.tensor(float(seed))] for seed, size in enumerate(sizes)]
    assert sorted(gpu_digests(units)) == [0, 2, 4, 5, 6]
    assert digests_of(units) == expected(units)


@gpu
def test_work_of_the_current_stream_comes_first(cuda):
    units = [[torch.zeros(50_000, device=cuda)] for _ in range(4)]
    old = expected(units)
    side = torch.cuda.Stream(cuda)
    for stream in (torch.cuda.current_stream(cuda), side):
        side.wait_stream(torch.cuda.current_stream(cuda))
        with torch.cuda.stream(stream):
            for value, (tensor,) in enumerate(units, 1):
                torch.cuda._sleep(1_000_000)
                tensor.add_(value)
            found = gpu_digests(units)
            for (tensor,) in units:
                tensor.mul_(-1)  # too late to be read
        torch.cuda.synchronize(cuda)
        for (tensor,) in units:
            tensor.mul_(-1)
        values = expected(units)
        assert [found[place] for place in range(4)] == values
        assert all(value != before for value, before in zip(values, old, strict=True))
        old = values


@gpu
def test_without_room_for_the_table_units_are_copied_one_by_one(cuda):
    units = [[random_bytes(3 * MIB, 1, cuda)], [random_bytes(5 * MIB, 2, cuda)]]
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-9, cuda)
    try:
        with pytest.warns(UserWarning, match="plain copies of each unit"):
            assert digests_of(units) == expected(units)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    assert sorted(gpu_digests(units)) == [0, 1]


@gpu
def test_a_copier_for_captures_restores_nothing(cuda):
    copier = open_copier([torch.ones(10, device=cuda), torch.ones(20, device=cuda)], 4096, 2, for_captures=True)
    with pytest.raises(ValueError, match="expected all chunks on the host"):
        copier.restore(torch.cuda.current_stream(cuda).cuda_stream, 0, 1)
