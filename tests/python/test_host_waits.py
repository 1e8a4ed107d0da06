"""How often a forward makes the host wait for a GPU, counted on the CPU with tensors that only say they are on one."""

import numpy as np
import pytest
import torch

from evermoe import MoE
from support.paper_gpu import PaperGpu
from support.ranks import run_ranks
from test_moe import hold

E, H = 4, 16
PLACEMENTS = {1: [[1, 1, 1, 1]], 2: [[1, 1, 1, 0], [1, 0, 0, 1]]}


def waits(group, matrix, gated, dtype):
    torch.manual_seed(0)
    layer = MoE(H, 16, E, gated=gated, dtype=dtype)
    hold(layer, group, np.array(matrix))
    x = torch.randn(9 + group.rank, H, dtype=dtype)
    expected = layer(x).detach()
    with torch.no_grad(), PaperGpu() as gpu:
        found = gpu.move(layer)(gpu.tensor(x))
    return {"waits": gpu.waits, "out": found.value, "expected": expected}


@pytest.mark.parametrize("ranks", PLACEMENTS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wait_a_layer(tmp_path, ranks, gated, dtype):
    for found in run_ranks(tmp_path, ranks, waits, PLACEMENTS[ranks], gated, dtype):
        assert found["waits"] == ["aten::_to_copy from the GPU"]
        torch.testing.assert_close(found["out"], found["expected"])
