"""Counts of tokens as an aborted collective leaves them: any numbers. A GPU whose code fails on them is lost."""

import numpy as np
import pytest
import torch

from evermoe import Expert, Experts
from evermoe.comm.group import Group
from evermoe.moe.token_exchange import Exchange, Padding

H, E, K, MOST = 16, 4, 2, 12
PLACEMENTS = [
    [[1, 1, 1, 0], [1, 0, 0, 1]],
    [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 2, 0]],
    [[0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 1, 1, 1]],
]
KINDS = ("anything", "two numbers of 32 bits", "too many", "too many of one rank", "huge", "negative")


def draw(kind, ranks, seed):
    """Counts `[R, E]` that fit no tokens."""
    random = np.random.default_rng(seed)
    found = {
        "anything": lambda: random.integers(-(1 << 63), (1 << 63) - 1, (ranks, E), endpoint=True),
        "two numbers of 32 bits": lambda: random.integers(0, 1 << 13, (ranks, 2 * E), dtype=np.int32).view(np.int64),
        "too many": lambda: random.integers(0, 2 * MOST * K, (ranks, E)),
        "too many of one rank": lambda: np.full((ranks, E), MOST * K),
        "huge": lambda: np.full((ranks, E), (1 << 61) // (4 * ranks)),
        "negative": lambda: -random.integers(0, 1 << 40, (ranks, E)),
    }[kind]()
    return torch.from_numpy(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_plan_stays_in_its_buffers(kind):
    for seed, placement in enumerate(PLACEMENTS * 10):
        matrix_RE, ranks = np.array(placement), len(placement)
        counts_RE = draw(kind, ranks, seed)
        for rank in range(ranks):
            experts = np.flatnonzero(matrix_RE[rank]).tolist()
            padding = Padding.of(matrix_RE, experts, MOST, K, counts_RE.device)
            exchange = Exchange.padded(counts_RE, padding, rank)
            ends_e = [0, *exchange.ends_e.tolist(), sum(exchange.sizes.received_R)]
            assert ends_e == sorted(ends_e)
            positions_TK = torch.randperm(MOST * K, dtype=torch.int32).view(MOST, K)
            row_ids, padded_TK = exchange.pad(positions_TK)
            assert len(row_ids) == sum(exchange.sizes.sent_R)
            assert set(row_ids.tolist()) <= {-1, *range(MOST * K)}
            assert padded_TK.shape == (MOST, K)


class Aborted(Group):
    """A group whose collectives end without results."""

    def __init__(self, rank, counts_RE):
        super().__init__()
        self.rank, self.size, self.is_alone, self.counts_RE = rank, len(counts_RE), False, counts_RE

    def all_gather(self, tensor):
        return self.counts_RE

    def all_to_all(self, rows, send_counts, receive_counts):
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        received.view(torch.uint8).fill_(255)  # NaN
        return received


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_layer_does_not_fail(cuda, kind, fp8):
    for seed, placement in enumerate(PLACEMENTS):
        matrix_RE = np.array(placement)
        expert = Expert(H, 16, gated=True, bias=True, layout="fused")
        for rank in (0, 1):
            layer = Experts(expert, E, max_tokens=MOST, fp8_dispatch=fp8, dtype=torch.bfloat16, device=cuda)
            layer.ids = np.flatnonzero(matrix_RE[rank]).tolist()
            layer.weights = torch.nn.Parameter(layer.weights.detach()[layer.ids])
            layer.matrix_RE = matrix_RE
            layer.group = Aborted(rank, draw(kind, len(matrix_RE), seed).to(cuda))
            x_TH = torch.randn(MOST, H, dtype=torch.bfloat16, device=cuda, requires_grad=True)
            ids_TK = torch.randint(-1, E, (MOST, K), device=cuda)
            out_TH = layer(x_TH, ids_TK, torch.rand(MOST, K, device=cuda))
            out_TH.sum().backward()
            torch.cuda.synchronize()
            assert (out_TH.shape, x_TH.grad.shape) == (x_TH.shape, x_TH.shape)
