"""kernels/copy.cu on the CPU: its hashes against xxhash-rust, its bytes against plain slices."""

import pytest
import torch

from evermoe import _native
from support.kernels import MARGIN, Buffer, sparse

BLOCK = 4096
# bytes of the tensors, offsets of their addresses from a multiple of 16
CASES = {
    "nothing": ([], []),
    "one byte": ([1], [0]),
    "one block": ([BLOCK], [0]),
    "a block and a byte": ([BLOCK + 1], [0]),
    "many small": ([1, 15, 16, 17, 5, 31, 33] * 40, [0, 1, 4, 8, 2, 3, 12] * 40),
    "large": ([3 * BLOCK, 5 * BLOCK + 36, 7 * BLOCK], [0, 0, 0]),
    "aligned to 4 only": ([3 * BLOCK + 20, 2 * BLOCK], [4, 12]),
    "aligned to nothing": ([2 * BLOCK + 7, BLOCK + 3, 19], [1, 7, 13]),
    "more blocks than a warp takes": ([11 * BLOCK + 1, 8 * BLOCK], [0, 0]),
}


class Tensors:
    """Random bytes at the wanted addresses, the table of them, and the stream that they should become."""

    def __init__(self, sizes, offsets):
        random = torch.Generator().manual_seed(len(sizes))
        self.buffers, table, start = [], [], 0
        for size, offset in zip(sizes, offsets, strict=True):
            buffer = at_offset(size, offset)
            self.buffers.append(buffer.set(torch.randint(256, (size,), generator=random, dtype=torch.uint8)))
            table.append([buffer.tensor.data_ptr(), start, size])
            start += -(-size // 16) * 16
        self.tensors = [buffer.tensor for buffer in self.buffers]
        self.num_blocks = max(1, -(-start // BLOCK))
        self.table = torch.tensor(table, dtype=torch.int64).reshape(-1, 3)
        self.stream = torch.zeros(self.num_blocks * BLOCK, dtype=torch.uint8)
        for tensor, (_, begin, size) in zip(self.tensors, table, strict=True):
            self.stream[begin : begin + size] = tensor

    def hashes(self):
        return hashes_of(self.stream)


def hashes_of(stream):
    hashes = [_native.digest(block) for block in stream.view(-1, BLOCK).numpy()]
    return torch.tensor(hashes, dtype=torch.uint64).view(torch.int64)


def at_offset(size, offset):
    """A buffer of bytes at an address that is `offset` more than a multiple of 16."""
    buffer = Buffer([size + 32], torch.uint8)
    begin = MARGIN + (-(buffer.memory.data_ptr() + MARGIN) % 16) + offset
    buffer.memory[MARGIN:] = 0x5A
    buffer.memory = buffer.memory[begin - MARGIN : begin + size + MARGIN]
    buffer.tensor = buffer.memory[MARGIN : MARGIN + size]
    buffer.tensor.fill_(0xEE)
    return buffer


def aligned(size):
    """A buffer of bytes whose address is a multiple of 16, as the kernels want chunks."""
    return at_offset(size, 0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("grid", [(1, 32), (2, 64)])
@pytest.mark.few(19)
def test_pack(kernels, case, grid):
    tensors = Tensors(*CASES[case])
    chunks, hashes = aligned(tensors.num_blocks * BLOCK), Buffer([tensors.num_blocks], torch.int64)
    arguments = (tensors.table, len(tensors.table), 0, tensors.num_blocks, chunks, hashes)
    kernels("pack_chunks", *grid, 0, *arguments, also=tensors.tensors)
    chunks.equals(tensors.stream)
    hashes.equals(tensors.hashes())
    again = Buffer([tensors.num_blocks], torch.int64)
    kernels("hash_blocks", *grid, 0, chunks, tensors.num_blocks, again)
    again.equals(tensors.hashes())


def test_pack_of_a_range_of_the_stream(kernels):
    tensors = Tensors(*CASES["large"])
    for first, blocks in [(0, 1), (3, 2), (tensors.num_blocks - 1, 1), (5, 9)]:
        chunks, hashes = aligned(blocks * BLOCK), Buffer([blocks], torch.int64)
        arguments = (tensors.table, 3, first * BLOCK, blocks, chunks, hashes)
        kernels("pack_chunks", 1, 64, 0, *arguments, also=tensors.tensors)
        chunks.equals(tensors.stream[first * BLOCK : (first + blocks) * BLOCK])
        hashes.equals(tensors.hashes()[first : first + blocks])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("wrong_block", [None, 0, -1])
@pytest.mark.few(23)
def test_unpack_writes_right_blocks_only(kernels, case, wrong_block):
    """A block with a byte flipped is counted in its chunk, and leaves its part of the tensors as it was."""
    source, target = Tensors(*CASES[case]), Tensors(*CASES[case])
    for tensor in target.tensors:
        tensor.fill_(0x77)
    chunks = aligned(len(source.stream)).set(source.stream)
    hashes, chunk_blocks = source.hashes(), 2
    expected, counts = source.stream.clone(), torch.zeros(-(-source.num_blocks // chunk_blocks), dtype=torch.int64)
    if wrong_block is not None:
        block = wrong_block % source.num_blocks
        chunks.tensor[block * BLOCK + 4095 * (block % 2)] ^= 1
        expected[block * BLOCK : (block + 1) * BLOCK] = 0x77
        counts[block // chunk_blocks] += 1
    wrong = Buffer(counts.shape, torch.int64, 0)
    arguments = (target.table, len(target.table), 0, source.num_blocks, chunks, hashes, wrong, chunk_blocks)
    kernels("unpack_chunks", 2, 32, 0, *arguments, also=target.tensors)
    wrong.equals(counts)
    for buffer, (_, begin, size) in zip(target.buffers, target.table.tolist(), strict=True):
        buffer.equals(expected[begin : begin + size])


def test_every_bit_of_a_block_counts(kernels):
    """One byte in each of the places that a stripe gives: the 4 threads of a block, both halves, all stripes."""
    chunks = aligned(BLOCK * 64).set(torch.zeros(BLOCK * 64, dtype=torch.uint8))
    for block in range(64):
        chunks.tensor[block * BLOCK + block * 64 + block] = 1 << block % 8
    hashes = Buffer([64], torch.int64)
    kernels("hash_blocks", 1, 64, 0, chunks, 64, hashes)
    expected = hashes_of(chunks.tensor)
    hashes.equals(expected)
    assert len(set(expected.tolist())) == 64


@pytest.mark.long
def test_tensors_far_beyond_2_to_the_31(fast_kernels):
    """The last blocks of a stream of 9 GB, which takes memory only where it is touched."""
    size, blocks = 9_000_000_011, 3
    source, target = sparse([size], torch.uint8), sparse([size], torch.uint8)
    first_byte = (size // BLOCK - 1) * BLOCK
    tail = source[first_byte:]
    tail.copy_(torch.randint(256, tail.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8))
    stream = torch.zeros(blocks * BLOCK, dtype=torch.uint8)
    stream[: len(tail)] = tail
    chunks, hashes = aligned(len(stream)), Buffer([blocks], torch.int64)
    table = torch.tensor([[source.data_ptr(), 0, size]])
    fast_kernels("pack_chunks", 1, 32, 0, table, 1, first_byte, blocks, chunks, hashes)
    chunks.equals(stream)
    hashes.equals(hashes_of(stream))
    wrong = Buffer([blocks], torch.int64, 0)
    table[0, 0] = target.data_ptr()
    fast_kernels("unpack_chunks", 1, 32, 0, table, 1, first_byte, blocks, chunks, hashes, wrong, 1)
    wrong.equals(torch.zeros(blocks, dtype=torch.int64))
    assert torch.equal(target[first_byte:], tail)


KILOBYTE = 1024
# bytes and offsets of each unit's tensors
UNITS = {
    "one tensor": [([241], [0])],
    "a kilobyte": [([KILOBYTE], [0])],
    "a kilobyte and a byte": [([KILOBYTE + 1], [0])],
    "all ends": [([size], [0]) for size in (255, 256, 257, 1023, 1087, 1088, 1089, 2047, 2048, 2049)],
    "many small": [([1, 15, 16, 17, 5, 31, 33] * 40, [0, 1, 4, 8, 2, 3, 12] * 40)],
    "a scalar first": [([4, 9 * KILOBYTE, 5 * KILOBYTE], [0, 0, 8]), ([4, 300], [0, 4])],
    "aligned to nothing": [([2 * KILOBYTE + 7, 3 * KILOBYTE + 3, 19], [1, 7, 13])],
    "more than a turn of the block": [([63 * KILOBYTE, 2 * KILOBYTE, 200 * KILOBYTE + 65], [0, 4, 0])],
    "turns that end with the block": [([64 * KILOBYTE], [0]), ([128 * KILOBYTE], [4]), ([65 * KILOBYTE], [0])],
}


@pytest.mark.parametrize("case", UNITS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_digests_of_units(kernels, case, blocks):
    """They are those of the host, however the bytes are spread over tensors."""
    units = [Tensors(sizes, offsets) for sizes, offsets in UNITS[case]]
    tables = [unit.table.clone() for unit in units]
    for table in tables:
        table[:, 1] = table[:, 2].cumsum(0) - table[:, 2]
    ends = torch.tensor([len(table) for table in tables]).cumsum(0)
    digests = Buffer([len(units)], torch.int64)
    tensors = [tensor for unit in units for tensor in unit.tensors]
    kernels("digest_units", blocks, 256, 0, torch.cat(tables), ends, len(units), digests, also=tensors)
    expected = [_native.digest(torch.cat(unit.tensors).numpy()) for unit in units]
    digests.equals(torch.tensor(expected, dtype=torch.uint64).view(torch.int64))
