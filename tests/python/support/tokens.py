"""Choices of tokens and counts of them, of many kinds."""

import numpy as np
import torch

COUNTS = [
    [[1, 2], [3, 0]],
    [[0, 0], [0, 0]],
    [[5]],
    [[4, 0, 3, 1]],
    [[4], [0], [3]],
    [[0, 0, 7], [0, 0, 0], [1, 0, 0], [2, 9, 31]],
]
"""Rows that each rank sends to each expert."""


def make_ids(tokens, top_k, experts, dtype=torch.int64, seed=0):
    """Seeded ids; about one in `experts + 1` is -1."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-1, experts, (tokens, top_k), generator=random).to(dtype)


def draw_split(seed):
    """Counts and replicas of many kinds: holders few or all, several replicas on a rank, experts without tokens."""
    random = np.random.default_rng(seed)
    ranks = int(random.choice([1, 2, 3, 5, 8, 33, 200], p=[0.1, 0.2, 0.2, 0.2, 0.2, 0.08, 0.02]))
    experts = int(random.integers(1, 9))
    most = int(random.choice([1, 4, 100, 8192, 1 << 40]))
    counts = random.integers(0, most, (experts, ranks), endpoint=True) * (random.random((experts, ranks)) < 0.7)
    replicas = random.integers(1, 4, (ranks, experts)) * (random.random((ranks, experts)) < random.random())
    replicas[random.integers(ranks), :] += 1
    counts[random.random(experts) < 0.1] = 0
    return counts, replicas, int(random.integers(ranks))


FP8_WIDTHS = [1, 7, 8, 16, 24, 127, 128, 129, 200, 384, 1031]


def fp8_row_bytes(width):
    """Bytes of a row in 8 bits: numbers and scales, each padded to 16."""
    return -(-width // 16) * 16 + -(-4 * -(-width // 128) // 16) * 16


def draw_rows(rows, width, dtype, seed=0):
    """Rows of many magnitudes, with zeros and a block of zeros."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=random) * torch.randint(-9, 9, (rows, width), generator=random).exp2()
    x[torch.rand(rows, width, generator=random) < 0.1] = 0
    x[: rows // 3, :128] = 0
    return x.to(dtype)
