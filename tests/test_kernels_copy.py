"""kernels/copy.cu, built by a host compiler: its hashes against xxhash-rust, its bytes against plain slices."""

import pytest
import torch
from test_kernels_on_cpu import Buffer, kernels, library  # noqa: F401

from evermoe import _native

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
        self.memory = [torch.full((size + 64,), 0x5A, dtype=torch.uint8) for size in sizes]
        self.tensors, table, start = [], [], 0
        for memory, size, offset in zip(self.memory, sizes, offsets, strict=True):
            begin = -memory.data_ptr() % 16 + offset
            tensor = memory[begin : begin + size]
            tensor.copy_(torch.randint(256, (size,), generator=random, dtype=torch.uint8))
            self.tensors.append(tensor)
            table.append([tensor.data_ptr(), start, size])
            start += -(-size // 16) * 16
        self.num_blocks = max(1, -(-start // BLOCK))
        self.table = torch.tensor(table, dtype=torch.int64).reshape(-1, 3)
        self.stream = torch.zeros(self.num_blocks * BLOCK, dtype=torch.uint8)
        for tensor, (_, begin, size) in zip(self.tensors, table, strict=True):
            self.stream[begin : begin + size] = tensor

    def hashes(self):
        blocks = self.stream.view(-1, BLOCK).numpy()
        return torch.tensor([_native.digest(block) for block in blocks], dtype=torch.uint64).view(torch.int64)

    def margins_are_whole(self):
        for memory, tensor in zip(self.memory, self.tensors, strict=True):
            begin = tensor.data_ptr() - memory.data_ptr()
            around = torch.cat([memory[:begin], memory[begin + tensor.numel() :]])
            assert bool((around == 0x5A).all()), "a write beside a tensor"


def aligned(size):
    """Bytes whose address is a multiple of 16, as the kernels want chunks."""
    memory = torch.full((size + 16,), 0xEE, dtype=torch.uint8)
    begin = -memory.data_ptr() % 16
    return memory[begin : begin + size]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("grid", [(1, 32), (2, 64)])
def test_pack(kernels, case, grid):  # noqa: F811
    tensors = Tensors(*CASES[case])
    chunks, hashes = aligned(tensors.num_blocks * BLOCK), Buffer([tensors.num_blocks], torch.int64)
    arguments = (tensors.table, len(tensors.table), 0, tensors.num_blocks, chunks, hashes.tensor)
    kernels("pack_chunks", *grid, 0, *arguments)
    assert torch.equal(chunks, tensors.stream)
    hashes.equals(tensors.hashes())
    again = Buffer([tensors.num_blocks], torch.int64)
    kernels("hash_blocks", *grid, 0, chunks, tensors.num_blocks, again.tensor)
    again.equals(tensors.hashes())


def test_pack_of_a_range_of_the_stream(kernels):  # noqa: F811
    tensors = Tensors(*CASES["large"])
    for first, blocks in [(0, 1), (3, 2), (tensors.num_blocks - 1, 1), (5, 9)]:
        chunks, hashes = aligned(blocks * BLOCK), Buffer([blocks], torch.int64)
        kernels("pack_chunks", 1, 64, 0, tensors.table, 3, first * BLOCK, blocks, chunks, hashes.tensor)
        assert torch.equal(chunks, tensors.stream[first * BLOCK : (first + blocks) * BLOCK])
        hashes.equals(tensors.hashes()[first : first + blocks])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("wrong_block", [None, 0, -1])
def test_unpack_writes_right_blocks_only(kernels, case, wrong_block):  # noqa: F811
    """A block with a byte flipped is counted in its chunk, and leaves its part of the tensors as it was."""
    source, target = Tensors(*CASES[case]), Tensors(*CASES[case])
    for tensor in target.tensors:
        tensor.fill_(0x77)
    chunks = aligned(len(source.stream))
    chunks.copy_(source.stream)
    hashes, chunk_blocks = source.hashes(), 2
    expected, counts = source.stream.clone(), torch.zeros(-(-source.num_blocks // chunk_blocks), dtype=torch.int64)
    if wrong_block is not None:
        block = wrong_block % source.num_blocks
        chunks[block * BLOCK + 4095 * (block % 2)] ^= 1
        expected[block * BLOCK : (block + 1) * BLOCK] = 0x77
        counts[block // chunk_blocks] += 1
    wrong = Buffer(counts.shape, torch.int64, 0)
    arguments = (target.table, len(target.table), 0, source.num_blocks, chunks, hashes, wrong.tensor, chunk_blocks)
    kernels("unpack_chunks", 2, 32, 0, *arguments)
    wrong.equals(counts)
    for tensor, (_, begin, size) in zip(target.tensors, target.table.tolist(), strict=True):
        assert torch.equal(tensor, expected[begin : begin + size])
    target.margins_are_whole()


def test_every_bit_of_a_block_counts(kernels):  # noqa: F811
    """One byte in each of the places that a stripe gives: the 4 threads of a block, both halves, all stripes."""
    chunks = aligned(BLOCK * 64)
    chunks.zero_()
    for block in range(64):
        chunks[block * BLOCK + block * 64 + block] = 1 << block % 8
    hashes = Buffer([64], torch.int64)
    kernels("hash_blocks", 1, 64, 0, chunks, 64, hashes.tensor)
    expected = [_native.digest(block) for block in chunks.view(-1, BLOCK).numpy()]
    hashes.equals(torch.tensor(expected, dtype=torch.uint64).view(torch.int64))
    assert len(set(expected)) == 64
