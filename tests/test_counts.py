"""Counts of several layers, the split of tokens, and regrouping: against plain torch and the planners."""

import pytest
import torch

from evermoe import ops
from test_ops import device, make_ids  # noqa: F401  (fixture)

raw = torch.ops.evermoe


# ---- counts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [1, 7, 4096])
def test_layers_are_counted_each_for_itself(experts, device):  # noqa: F811
    shapes = [(0, 2), (1, 1), (53, 3), (7,), (5, 2, 3), ()]
    random = torch.Generator().manual_seed(experts)
    types = [torch.int32, torch.int64]
    layers = [torch.randint(-1, experts, s, generator=random).to(types[i % 2]) for i, s in enumerate(shapes)]
    layers.append(make_ids(70_001, 2, experts).t())  # not contiguous, more than one block
    counts = ops.expert_histograms([ids.to(device) for ids in layers], experts)
    assert counts.dtype == torch.int64 and counts.device.type == device
    expected = [torch.bincount(ids[ids >= 0].flatten().long(), minlength=experts) for ids in layers]
    assert torch.equal(counts.cpu(), torch.stack(expected))


def test_histograms_example(device):  # noqa: F811
    layers = [torch.tensor([[0, 2], [2, -1]], device=device), torch.tensor([1], device=device)]
    assert ops.expert_histograms(layers, 3).tolist() == [[1, 0, 2], [0, 1, 0]]


def test_more_layers_than_one_launch_takes(device):  # noqa: F811
    layers = [make_ids(layer % 11, 2, 5, seed=layer).to(device) for layer in range(150)]
    assert torch.equal(ops.expert_histograms(layers, 5), torch.stack([ops.expert_histogram(ids, 5) for ids in layers]))


def test_histograms_name_the_layer():
    ids = torch.tensor([0, 1])
    for layers, message in [
        ([], "one layer or more, got none"),
        ([ids, ids.float()], "layer 1: ids: expected int32 or int64, got float32"),
        ([ids, ids, torch.tensor([0, 9])], r"layer 2: ids\[1\].* = 9 is out of range.*num_experts = 2"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            ops.expert_histograms(layers, 2)
    with pytest.raises(RuntimeError, match="num_experts: expected 1 to"):
        ops.expert_histograms([ids], 0)
