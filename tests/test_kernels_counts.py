"""The kernels of histogram.cu and exchange.cu, built by a host compiler, against the CPU's integers and copies."""

import struct

import pytest
import torch

from evermoe import ops
from test_kernels_on_cpu import Buffer, kernels, library  # noqa: F401  (fixtures)

TABLE_LAYERS = 64


def layers_table(layers, blocks):
    """The kernel's last argument as words, and the blocks of all layers together; `blocks` are those of each."""
    packed, end = b"", 0
    for ids, own in zip(layers, blocks, strict=True):
        end += own
        packed += struct.pack("<QQII", ids.data_ptr(), ids.numel(), end, ids.dtype == torch.int64)
    return struct.unpack(f"<{TABLE_LAYERS * 3}Q", packed.ljust(TABLE_LAYERS * 24, b"\0")), end


def count(kernels, layers, blocks, experts):  # noqa: F811
    counts = Buffer([len(layers), experts], torch.int64, 0)
    table, end = layers_table(layers, blocks)
    sizes = (len(layers), experts, 0, 0)
    kernels("expert_histograms", end, 64, 4 * experts, counts.tensor, *sizes, *table)
    return counts


@pytest.mark.parametrize("experts", [1, 5, 257, 4096, 12288])
def test_histograms(kernels, experts):  # noqa: F811
    random = torch.Generator().manual_seed(experts)
    sizes = [0, 1, 31, 64, 1031, 0, 700]
    types = [torch.int32, torch.int64]
    layers = [
        torch.randint(-1, experts, (size,), generator=random).to(types[layer % 2]) for layer, size in enumerate(sizes)
    ]
    layers.append(torch.full((300,), experts - 1))  # one expert gets all
    counts = count(kernels, layers, [0, 1, 1, 2, 3, 0, 1, 2], experts)
    counts.equals(torch.stack([ops.expert_histogram(ids, experts) for ids in layers]))


def test_as_many_layers_as_a_launch_takes(kernels):  # noqa: F811
    layers = [torch.arange(layer % 7, dtype=torch.int32) for layer in range(TABLE_LAYERS)]
    counts = count(kernels, layers, [layer % 7 > 0 for layer in range(TABLE_LAYERS)], 6)
    counts.equals(ops.expert_histograms(layers, 6))


def test_ids_out_of_range_are_not_counted(kernels):  # noqa: F811
    ids = torch.tensor([0, 1, 2, 7, -5, 1 << 40, -(1 << 63)])
    count(kernels, [ids, ids.int()[:5]], [1, 1], 3).equals(torch.tensor([[1, 1, 1], [1, 1, 1]]))
