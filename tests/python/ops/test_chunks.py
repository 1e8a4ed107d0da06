"""Tensors to chunks and back: ops and copier, on the CPU and, where there is one, on a GPU."""

import ctypes

import pytest
import torch

from evermoe import _native
from evermoe.copies.snapshot import chunked_copy
from evermoe.errors import CorruptCopy
from evermoe.ops import chunks
from evermoe.ops.cache import has_cuda_kernels

BLOCK = chunks.BLOCK_BYTES
raw = torch.ops.evermoe
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float64, torch.complex64]
DTYPES += [torch.int16, torch.float16, torch.int8, torch.float8_e4m3fn]
# elements of the tensors: nothing, one, primes, a block, more than a chunk
SIZES = {"none": [], "empty": [0, 0], "one": [1], "odd": [3, 0, 1021, 1, 77], "blocks": [BLOCK, 2 * BLOCK, 5]}
SIZES["large"] = [70_001, 4, 131_072]


def make(sizes, device, seed=0):
    """Random bytes as tensors of every dtype in turn; views at odd elements and without dimensions among them."""
    random = torch.Generator().manual_seed(seed)
    tensors = []
    for index, size in enumerate(sizes):
        dtype = DTYPES[index % len(DTYPES)]
        memory = torch.randint(2, (dtype.itemsize * (size + 1),), generator=random, dtype=torch.uint8)
        if dtype != torch.bool:
            memory = torch.randint(256, memory.shape, generator=random, dtype=torch.uint8)
        tensor = memory.view(dtype).to(device)[1:]
        tensors.append(tensor[0] if size == 1 else tensor.unsqueeze(0) if index % 2 else tensor)
    return tensors


def as_bytes(tensor):
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)


def stream_of(tensors, chunk_bytes):
    """The chunks as plain torch makes them."""
    parts = []
    for tensor in tensors:
        parts += [as_bytes(tensor), torch.zeros(-tensor.nbytes % 16, dtype=torch.uint8)]
    size = sum(len(part) for part in parts)
    parts.append(torch.zeros(-size % chunk_bytes, dtype=torch.uint8))
    return torch.cat(parts).view(-1, chunk_bytes)


def hashes_of(stream):
    """By xxhash-rust, a block at a time."""
    hashes = [_native.digest(block) for block in stream.view(-1, BLOCK).numpy()]
    return torch.tensor(hashes, dtype=torch.uint64).view(torch.int64).view(len(stream), stream.shape[1] // BLOCK)


def test_checksums_want_hashes():
    for wrong in (torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"hashes: expected int64 of shape \[C, N\] on the CPU, got torch"):
            chunks.checksums(wrong)


def empty_like(stream, device):
    hashes = torch.full((len(stream), stream.shape[1] // BLOCK), 7, device=device)
    return torch.full_like(stream, 0xEE, device=device), hashes, torch.full((len(stream),), 7, device=device)


def same(tensors, others):
    return all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(tensors, others, strict=True))


def corrupt(tensors):
    """Other values everywhere."""
    for tensor in tensors:
        tensor.view(torch.uint8).bitwise_xor_(1) if tensor.dim() else tensor.copy_(tensor == 0)


# ---- ops --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("chunk_bytes", [BLOCK, 3 * BLOCK, 1 << 20])
def test_there_and_back(device, sizes, chunk_bytes):
    tensors = make(SIZES[sizes], device)
    expected = stream_of(tensors, chunk_bytes)
    packed, hashes, wrong = empty_like(expected, device)
    assert chunks.num_chunks(tensors, chunk_bytes) == len(expected)
    chunks.pack_chunks(tensors, 0, packed, hashes)
    assert torch.equal(packed.cpu(), expected)
    assert torch.equal(hashes.cpu(), hashes_of(expected))
    again = torch.zeros_like(hashes)
    chunks.hash_blocks(packed, again)
    assert torch.equal(again, hashes)
    originals = [tensor.clone() for tensor in tensors]
    corrupt(tensors)
    chunks.unpack_chunks(packed, hashes, 0, tensors, wrong)
    assert same(tensors, originals)
    assert wrong.tolist() == [0] * len(expected)


def test_documented_example(device):
    tensors = [torch.arange(size, device=device).to(torch.uint8) for size in (4090, 0, 10)]
    packed, hashes, wrong = empty_like(torch.empty(2, BLOCK, dtype=torch.uint8), device)
    chunks.pack_chunks(tensors, 0, packed, hashes)
    first, second = packed.cpu()
    assert torch.equal(first[:4090], tensors[0].cpu())
    assert torch.equal(second[:10], tensors[2].cpu())
    assert not bool(first[4090:].any() or second[10:].any())
    for tensor in tensors:
        tensor.zero_()
    chunks.unpack_chunks(packed, hashes, 0, tensors, wrong)
    assert tensors[2].tolist() == list(range(10))
    assert wrong.tolist() == [0, 0]


def test_part_of_the_chunks(device):
    tensors = make(SIZES["large"], device)
    expected = stream_of(tensors, BLOCK)
    packed, hashes, _ = empty_like(expected[5:40], device)
    chunks.pack_chunks(tensors, 5, packed, hashes)
    assert torch.equal(packed.cpu(), expected[5:40])
    assert torch.equal(hashes.cpu(), hashes_of(expected[5:40]))


@pytest.mark.parametrize("at", [0, 4095, 4096, 5000, -1])
def test_corruption_is_counted_and_not_written(device, at):
    tensors = make(SIZES["blocks"], device)
    expected = stream_of(tensors, 2 * BLOCK)
    packed, hashes, wrong = empty_like(expected, device)
    chunks.pack_chunks(tensors, 0, packed, hashes)
    at %= packed.numel()
    packed.view(-1)[at] ^= 0x10
    for tensor in tensors:
        tensor.zero_()
    chunks.unpack_chunks(packed, hashes, 0, tensors, wrong)
    assert wrong.nonzero().flatten().tolist() == [at // (2 * BLOCK)]
    assert int(wrong.sum()) == 1
    right = expected.view(-1, BLOCK).clone()
    right[at // BLOCK] = 0
    assert torch.equal(stream_of(tensors, 2 * BLOCK).view(-1, BLOCK), right)


def test_threads_do_not_change_the_result():
    tensors = make([500_001, 3, 700_000], "cpu")
    expected = stream_of(tensors, 1 << 20)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            packed, hashes, _ = empty_like(expected, "cpu")
            chunks.pack_chunks(tensors, 0, packed, hashes)
            assert torch.equal(packed, expected)
            assert torch.equal(hashes, hashes_of(expected))
    finally:
        torch.set_num_threads(before)


def test_autograd_notices_writes(device):
    """Of tensors without dimensions too; a parameter that needs a gradient can be restored."""
    x, scalar = torch.randn(5, device=device, requires_grad=True), torch.tensor(3.0, device=device)
    packed, hashes, wrong = empty_like(stream_of([x, scalar], BLOCK), device)
    versions = packed._version, hashes._version
    chunks.pack_chunks([x, scalar], 0, packed, hashes)
    assert packed._version > versions[0]
    assert hashes._version > versions[1]
    y = (x.clone() * scalar).exp()
    before = x._version, scalar._version, wrong._version
    chunks.unpack_chunks(packed, hashes, 0, [x, scalar], wrong)
    assert (x._version > before[0], scalar._version > before[1], wrong._version > before[2]) == (True,) * 3
    assert float(scalar) == 3.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_wrong_arguments(device):
    tensors = make([100, 2000], device)
    expected = stream_of(tensors, BLOCK)
    packed, hashes, wrong = empty_like(expected, device)

    def refused(match, function, *arguments):
        with pytest.raises(RuntimeError, match=match):
            function(*arguments)

    pack, unpack = chunks.pack_chunks, chunks.unpack_chunks
    refused("chunks: expected contiguous uint8", pack, tensors, 0, packed.view(torch.int8), hashes)
    refused("chunks: expected contiguous uint8", pack, tensors, 0, packed.view(-1), hashes)
    refused("chunks: expected contiguous uint8", pack, tensors, 0, packed[:, :2048], hashes)
    refused("hashes: expected contiguous int64 of shape", pack, tensors, 0, packed, hashes[:1])
    refused("hashes: expected contiguous int64", pack, tensors, 0, packed, hashes.double())
    refused("take 2 chunks of 4096 bytes, expected a part of them, got 2 from 1 on", pack, tensors, 1, packed, hashes)
    refused("from -1 on", pack, tensors, -1, packed, hashes)
    refused(
        r"tensors\[1\]: expected a contiguous", pack, [tensors[0], torch.ones(8, 8).t().to(device)], 0, packed, hashes
    )
    refused("that overlaps tensors", pack, [packed[0, :8], packed[1, 9:16]], 0, packed[:1], hashes[:1])
    shifted = torch.zeros(BLOCK + 1, dtype=torch.uint8, device=device)[1:].view(1, BLOCK)
    refused("aligned to 16", chunks.hash_blocks, shifted, hashes[:1])
    refused("wrong: expected contiguous int64 of shape", unpack, packed, hashes, 0, tensors, wrong[:1])
    overlapping = torch.zeros(2000, device=device)
    refused("tensors 1 and 0 that overlap", unpack, packed, hashes, 0, [overlapping[9:], overlapping[:10]], wrong)
    assert bool((packed == 0xEE).all() and (hashes == 7).all() and (wrong == 7).all()), "something was written"
    with pytest.raises(ValueError, match="multiple of 4096"):
        chunks.num_chunks(tensors, 1000)


def test_torch_knows_the_ops():
    """Schemas, fakes and what is said to be written, checked by torch."""
    tensors = make([100, 2000], "cpu")
    packed, hashes, wrong = empty_like(stream_of(tensors, BLOCK), "cpu")
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(raw.pack_chunks.default, (tensors, 0, packed, hashes), test_utils=checks)
    torch.library.opcheck(raw.unpack_chunks.default, (packed, hashes, 0, tensors, wrong), test_utils=checks)
    torch.library.opcheck(raw.hash_blocks.default, (packed, hashes), test_utils=checks)


# ---- copier -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("chunk_bytes", "staging"), [(BLOCK, 1), (BLOCK, 2), (1 << 18, 3), (8 << 20, 2)])
def test_save_and_restore(device, sizes, chunk_bytes, staging):
    tensors = make(SIZES[sizes], device)
    copy = chunked_copy.ChunkedCopy(tensors, chunk_bytes, staging=staging)
    for seed in (1, 2):
        for tensor, other in zip(tensors, make(SIZES[sizes], device, seed), strict=True):
            tensor.copy_(other)
        expected = stream_of(tensors, chunk_bytes)
        originals = [tensor.clone() for tensor in tensors]
        saved = copy.save()
        saved.release()
        corrupt(tensors)
        saved.wait()
        assert saved.done()
        assert torch.equal(copy.chunks, expected)
        assert torch.equal(copy.hashes, hashes_of(expected))
        combined = [_native.digest(row.view("uint8")) for row in hashes_of(expected).numpy()]
        assert copy.checksums() == combined == chunks.checksums(hashes_of(expected))
        copy.restore()
        assert same(tensors, originals)


def test_save_in_parts_into_given_memory(device):
    """As a schedule of windows does it."""
    tensors = make([9000, 5, 30_000], device)
    expected = stream_of(tensors, 2 * BLOCK)
    host = torch.full_like(expected, 0xEE)
    copy = chunked_copy.ChunkedCopy(tensors, 2 * BLOCK, host=host)
    parts = [copy.save(first, min(first + 3, len(expected))) for first in range(0, len(expected), 3)]
    parts[-1].release()
    for part in parts:
        part.wait()
    assert parts[0].done(chunk=2)
    assert torch.equal(host, expected)
    originals = [tensor.clone() for tensor in tensors]
    corrupt(tensors)
    copy.restore(1, len(expected))
    copy.restore(0, 1)
    assert same(tensors, originals)
    with pytest.raises(ValueError, match=r"expected one of 0\.\.3, got 3"):
        parts[0].done(chunk=3)
    for bad in [(-1, 2), (3, 2), (0, len(expected) + 1)]:
        with pytest.raises(ValueError, match="expected a range within"):
            copy.save(*bad)


def test_a_corrupt_chunk_is_named_and_nothing_restored(device):
    tensors = make([9000, 5, 30_000], device)
    copy = chunked_copy.ChunkedCopy(tensors, 2 * BLOCK)
    copy.save().wait()
    copy.checksums()
    before = [tensor.clone() for tensor in tensors]
    copy.chunks[2, 17] ^= 1
    for tensor in tensors:
        tensor.zero_()
    with pytest.raises(CorruptCopy, match="1 of the chunks do not match their checksum: 2;"):
        copy.checksums()
    with pytest.raises(CorruptCopy, match=": 2;"):
        copy.restore()
    assert not any(as_bytes(tensor).any() for tensor in tensors)
    copy.chunks[2, 17] ^= 1
    copy.restore()
    assert same(tensors, before)


def test_what_cannot_be_copied(device):
    with pytest.raises(ValueError, match=r"tensors\[1\]: expected contiguous"):
        chunked_copy.ChunkedCopy([torch.ones(2, device=device), torch.ones(3, 4, device=device).t()])
    memory = torch.zeros(10, device=device)
    with pytest.raises(ValueError, match="tensors 1 and 0 that overlap"):
        chunked_copy.ChunkedCopy([memory[5:], memory[:6]])
    with pytest.raises(ValueError, match="chunk_bytes: expected a multiple of 4096"):
        chunked_copy.ChunkedCopy([memory], 100)
    with pytest.raises(ValueError, match=r"host: expected contiguous uint8 of shape \[1, 4096\]"):
        chunked_copy.ChunkedCopy([memory], BLOCK, host=torch.zeros(1, BLOCK))
    with pytest.raises(ValueError, match="expected them on the CPU or on CUDA"):
        chunked_copy.ChunkedCopy([torch.ones(2, device="meta")])


@pytest.mark.parametrize("name", SIZES)
def test_captures_hold_the_tensors_as_they_were(name, device, tmp_path):
    """Values come late on torch's stream, the gate opens in parts, others come right after the capture."""
    tensors = make(SIZES[name], device)
    copy, engine = chunked_copy.ChunkedCopy(tensors, BLOCK), _native.CopyEngine(chunk_bytes=5000)
    counts = [len(tensors) - 1, 0, 1] if tensors else [0]
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    units = [tensors[end - count : end] for end, count in zip(ends, counts, strict=True)]
    sizes = [(f"unit {index}", sum(tensor.nbytes for tensor in unit)) for index, unit in enumerate(units)]
    arena = _native.Arena.create(str(tmp_path / "arena"), "", sizes)
    for version in (1, 2, 3):
        expected = make(SIZES[name], device, seed=version)
        for tensor, value in zip(tensors, expected, strict=True):
            tensor.copy_(value)
        capture = copy.capture(engine, arena, version, counts)
        engine.open(6000)
        capture.wait(timeout=0.001)
        if version == 2:
            capture.cancel()
        else:
            capture.hurry()
            capture.wait()
        engine.close_gate()
        for tensor in tensors:
            tensor.zero_()
        if capture.state == "complete":
            assert arena.versions()[0] == (capture.index, version)
            assert arena.verify(capture.index) == []
            buffer = torch.from_numpy(arena.buffer(capture.index))
            for (_, offset, nbytes), end, count in zip(arena.units(), ends, counts, strict=True):
                parts = [as_bytes(tensor) for tensor in expected[end - count : end]]
                assert torch.equal(
                    buffer[offset : offset + nbytes], torch.cat([*parts, torch.empty(0, dtype=torch.uint8)])
                )
    assert arena.versions()[0][1] == 3
    if tensors:
        with pytest.raises(ValueError, match="tensors_per_unit: expected counts that add up to"):
            copy.capture(engine, arena, 4, [len(tensors) + 1])


@pytest.mark.gpu
def test_a_capture_does_not_wait_for_what_the_stream_is_given_later(tmp_path):
    """It is complete while later work of torch's stream still runs."""
    if not (torch.cuda.is_available() and has_cuda_kernels()):
        pytest.skip("no CUDA device, or no kernels in this build")
    tensors = [torch.full((1 << 20,), 7.0, device="cuda")]
    copy, engine = chunked_copy.ChunkedCopy(tensors, 1 << 20), _native.CopyEngine()
    arena = _native.Arena.create(str(tmp_path / "arena"), "", [("unit", tensors[0].nbytes)])
    torch.cuda.synchronize()
    capture = copy.capture(engine, arena, 1, [1])
    torch.cuda._sleep(3_000_000_000)  # cycles: more than a second, whose end is not waited for here
    later = torch.cuda.Event()
    later.record()
    capture.hurry()
    assert capture.wait() == arena.payload_bytes
    assert not later.query()
    assert arena.verify(capture.index) == []


@pytest.mark.gpu
@pytest.mark.parametrize("staging", [1, 3, 100])
def test_values_are_those_before_release(staging):
    """The source is overwritten on torch's stream right behind `release`, time and again, without waiting."""
    if not (torch.cuda.is_available() and has_cuda_kernels()):
        pytest.skip("no CUDA device, or no kernels in this build")
    tensors = [torch.zeros(size, device="cuda") for size in (5 << 20, 1, 3 << 20, 1001)]
    copy = chunked_copy.ChunkedCopy(tensors, 1 << 20, staging=staging)
    for step in range(20):
        torch._foreach_zero_(tensors)
        torch._foreach_add_(tensors, float(step))
        saved = copy.save()
        saved.release()
        torch._foreach_add_(tensors, 0.5)
        saved.wait()
        assert torch.equal(copy.chunks, stream_of([torch.full_like(t, step, device="cpu") for t in tensors], 1 << 20))
        copy.checksums()
    copy.restore()
    assert all(bool((tensor == 19).all()) for tensor in tensors)


@pytest.mark.gpu
def test_pinned_memory_is_cached():
    """Write-combined memory, which the host reads about a hundred times slower, has a flag."""
    if not (torch.cuda.is_available() and has_cuda_kernels()):
        pytest.skip("no CUDA device, or no kernels in this build")
    copy = chunked_copy.ChunkedCopy([torch.ones(1 << 20, device="cuda")])
    flags, write_combined = ctypes.c_uint(), 4
    address = ctypes.c_void_p(copy.chunks.data_ptr())
    assert ctypes.CDLL("libcuda.so.1").cuMemHostGetFlags(ctypes.byref(flags), address) == 0
    assert flags.value & write_combined == 0
