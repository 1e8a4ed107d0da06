"""Does the emulator do what CUDA does, and find what it must? With the small kernels of probes/probe.cu.

And whether the driver is asked for all of evermoe's own.
"""

import contextlib
import re

import pytest
import torch

from support.kernels import EMULATOR, ORDERS, ROOT, SHUFFLES, Buffer, Kernels, build


@pytest.fixture(scope="module")
def probes():
    """The library of the probes, with checks."""
    return build(ROOT / "target/emulator/probes", checked=1, kernels=EMULATOR / "probes")


@pytest.fixture(params=ORDERS)
def launch(probes, request):
    with contextlib.closing(Kernels(probes, request.param)) as kernels:
        yield kernels


def test_shuffles_and_votes(launch):
    out = Buffer([64, 8], torch.int32)
    launch("shuffles", 1, 64, 0, out)
    lane = torch.arange(32)
    expected = [
        torch.full([32], 5),
        torch.where(lane < 3, lane, lane - 3),
        torch.where(lane > 28, lane, lane + 3),
        lane ^ 1,
        torch.where(lane % 8 == 7, lane, lane + 1),
        lane ^ 4,
        torch.full([32], 0b01001001001001001001001001001001),
        torch.full([32], 31),
    ]
    out.equals(torch.stack(expected, 1).int().repeat(2, 1))


def test_parts_of_a_warp(launch):
    out = Buffer([32], torch.float64)
    launch("halves", 1, 32, 0, out)
    out.equals(torch.tensor([1.5] * 16 + [17.25] * 16, dtype=torch.float64))
    out = Buffer([32], torch.int32, 0)
    launch("early", 1, 32, 0, out)
    groups = torch.tensor([0x11111111, 0, 0x44444444, 0]).int()
    out.equals(groups.repeat(8))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])
def test_static_shared_memory(launch, dtype):
    name = f"reversed_{str(dtype).replace('torch.int', 'i')}"
    values, out = torch.arange(192).to(dtype), Buffer([192], dtype)
    launch(name, 3, 64, 0, values, out, b"\1")
    out.equals(values.view(3, 64).flip(1).flatten())
    with pytest.raises(AssertionError, match=r"probe.cu:\d+: (race|uninitialised): .*static shared memory"):
        launch(name, 3, 64, 0, values, out, b"\0")
    with pytest.raises(AssertionError, match="__launch_bounds__"):
        launch(name, 1, 96, 0, values, out, b"\1")


def test_an_index_past_a_shared_array(launch):
    out = Buffer([4], torch.int32)
    launch("too_long", 1, 32, 0, out, 4)
    out.equals(torch.ones(4).int())
    with pytest.raises(AssertionError, match=r"probe.cu:\d+: undefined: an index past the end of an array"):
        launch("too_long", 1, 32, 0, out, 5)


def test_what_orders_memory(launch):
    out = Buffer([64], torch.int32)
    launch("neighbours", 1, 64, 0, out, 16)
    out.equals((torch.arange(64) ^ 16).int())
    with pytest.raises(AssertionError, match=r"probe.cu:\d+: (race|uninitialised)"):
        launch("neighbours", 1, 64, 0, out, 32)
    with pytest.raises(AssertionError, match=r"probe.cu:\d+: race: reads byte \d+ of static shared memory"):
        launch("shuffle_is_no_barrier", 1, 32, 0, out)
    with pytest.raises(AssertionError, match=r"race: .* of block \d"):
        launch("from_block_to_block", 3, 32, 0, torch.zeros(4, dtype=torch.int32))


def test_any_parameters(launch):
    out = Buffer([1], torch.int32)
    small = (b"\1", b"\2\0", b"\3\0\0\0", 4, b"\0\0\xa0\x40", b"\0\0\0\0\0\0\x18\x40")  # 1, 2, 3, 4, 5.0, 6.0
    launch("many", 1, 32, 0, out, *small, 7, 8, 9, 10, 11, bytes(299) + b"\14")
    out.equals(torch.tensor([sum(range(13))]).int())


def test_atomics(launch):
    out, total = Buffer([5], torch.int32).set(torch.tensor([0, 99, 0, 7, 0])), Buffer([1], torch.float32, 0)
    launch("atomics", 2, 64, 0, out, total)
    out.equals(torch.tensor([63, 0, -1, 8, 5]).int())
    total.equals(torch.tensor([64.0]))
    with pytest.raises(AssertionError, match=r"probe.cu:\d+: race: (changes atomically|writes) byte 0"):
        launch("atomic_and_plain", 1, 32, 0, Buffer([1], torch.int32, 0))


def test_memory_that_is_not_the_kernels(launch):
    with pytest.raises(AssertionError, match=r"probe.cu:\d+: out of bounds: writes 4 bytes"):
        launch("writes_a_constant", 1, 32, 0, Buffer([1], torch.int32, 0))
    never = Buffer([1], torch.int32)
    with pytest.raises(AssertionError, match=r"uninitialised: reads byte 0 of argument 0 \(int32 \[1\]\)"):
        launch("writes_a_constant", 1, 32, 0, never)


# ---- concurrent blocks: what no race shows, as everything is atomic --------------------------------------
BLOCKS = 12


def running_sums(launch, with_tickets, with_wait):
    states, ticket, out = (
        Buffer([BLOCKS], torch.int64, 0),
        Buffer([1], torch.int32, 0),
        Buffer([BLOCKS], torch.int32),
    )
    launch("running_sums", BLOCKS, 32, 0, states, ticket, out, int(with_tickets), int(with_wait))
    out.equals(torch.arange(1, BLOCKS + 1).cumsum(0).int())


def test_a_result_of_another_block_is_waited_for(launch):
    running_sums(launch, with_tickets=True, with_wait=True)
    if launch.order in SHUFFLES:
        with pytest.raises(AssertionError, match="not equal"):
            running_sums(launch, with_tickets=True, with_wait=False)
    else:  # each block ends before the next begins
        running_sums(launch, with_tickets=True, with_wait=False)


def test_a_block_that_may_not_have_begun(launch):
    if launch.order == 0:
        running_sums(launch, with_tickets=False, with_wait=True)
        return
    with pytest.raises(AssertionError, match="for a block that has not started"):
        running_sums(launch, with_tickets=False, with_wait=True)


@pytest.mark.parametrize(("name", "unnoticed"), [("first_block_clears", [0]), ("two_atomics_for_one", [0, 1])])
def test_the_order_of_blocks_shows(launch, name, unnoticed):
    out = Buffer([1], torch.int32, 0)
    launch(name, BLOCKS, 32, 0, out)
    if launch.order in unnoticed:
        out.equals(torch.tensor([BLOCKS]).int())
    else:
        assert int(out.tensor) < BLOCKS


def test_each_block_has_its_shared_memory(launch):
    values = torch.arange(BLOCKS * 64).int()
    for _ in range(2):
        out = Buffer([BLOCKS * 64], torch.int32)
        launch("own_shared_memory", BLOCKS, 64, 256, out, Buffer([1], torch.int32, 0))
        out.equals(values.view(BLOCKS, 64).flip(1).flatten() * 2)


def test_the_driver_is_asked_for_each_kernel_in_its_own_binary(library):
    compiled = {
        path.name.split(".")[0]: sorted(re.findall(r"EVERMOE_KERNEL\((\w+)", path.read_text()))
        for path in library.parent.glob("*.kernels.cpp")
    }
    table = (ROOT / "src/cuda/kernels.rs").read_text()
    asked = {
        file: sorted(re.findall(r'"(\w+)"', names))
        for file, names in re.findall(r'binary!\("(\w+)":(.*?)\)', table, re.DOTALL)
    }
    assert asked == compiled
