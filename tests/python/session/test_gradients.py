"""Whether gradients are finite: in any type, place and size."""

import pytest
import torch

from evermoe.train.gradients import are_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_is_found_wherever_it_is(dtype, value):
    largest = torch.finfo(dtype).max
    gradients = [torch.full((17, 33), largest, dtype=dtype), torch.zeros((), dtype=dtype), torch.empty(0, dtype=dtype)]
    assert are_finite(gradients), "the largest numbers are fine"
    for place in (0, 300, 560):
        gradients[0].view(-1)[place] = value
        assert not are_finite(gradients)
        gradients[0].view(-1)[place] = -largest
    assert are_finite([])
