"""An average of the weights equals torch's own, with every optimizer, and is applied without a write."""

import pytest
import torch

from evermoe.copies.replay.replayable import find_arithmetics
from evermoe.optim import EMA
from evermoe.optim.ema import is_averaged
from evermoe.state.training_state import TrainingState
from support.models import OPTIMIZERS, Tied, digests, train

DECAY = 0.8


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("has_state", [False, True], ids=["alone", "of a session"])
def test_equals_that_of_torch(name, has_state):
    model = Tied()
    optimizer = OPTIMIZERS[name](model.parameters())
    ema = EMA(optimizer, DECAY)
    average_of = torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)
    expected = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average_of)
    if has_state:
        TrainingState(model, optimizer)
    assert not list(ema.averages())
    for step in range(4):
        train(model, optimizer, 1, step)
        expected.update_parameters(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with ema.applied():
        for (key, found), value in zip(model.named_parameters(), expected.module.parameters(), strict=True):
            torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-7, msg=key)
        assert not torch.equal(model.embedding.weight, before["embedding.weight"])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_averages_are_pieces_of_units_and_their_steps_are_not_repeated_elsewhere():
    model = Tied()
    optimizer = OPTIMIZERS["adamw-evermoe"](model.parameters())
    assert find_arithmetics(optimizer)
    EMA(optimizer)
    assert is_averaged(optimizer)
    assert not find_arithmetics(optimizer)
    state = TrainingState(model, optimizer)
    names = [spec.name for spec in state.catalog.by_name["moe.experts.0"].specs]
    assert {"weights/ema", "weights/ema_steps"} <= set(names)
    train(model, optimizer, 2)
    before = digests(state)
    state.adopt({"moe.experts": [2, 3]}, {})
    assert digests(state)["moe.experts.2"] == before["moe.experts.2"]
    other = Tied()
    without = TrainingState(other, OPTIMIZERS["adamw-evermoe"](other.parameters()))
    assert without.catalog.layout != state.catalog.layout, "a worker without the average is refused"


def test_average_of_bfloat16_is_kept_in_float32():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    ema = EMA(optimizer, 0.999)
    for _ in range(100):
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
    expected = sum(0.999 ** (99 - i) * 0.001 * (i + 2) for i in range(1, 100)) + 0.999**99 * 2
    [(_, average)] = ema.averages()
    assert average.dtype == torch.float32
    torch.testing.assert_close(average, torch.full((4,), expected))
    with ema.applied():
        assert weight.dtype == torch.bfloat16
        assert weight[0] == torch.tensor(expected).bfloat16()


def test_what_cannot_be_is_named():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=1.0)
    with pytest.raises(ValueError, match=r"expected 0 <= decay < 1, got 1.0"):
        EMA(optimizer, 1.0)
    EMA(optimizer)
    with pytest.raises(ValueError, match="but this one has one"):
        EMA(optimizer)
