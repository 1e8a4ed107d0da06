"""The loss scale follows torch's own scaler, and continues where its state was taken."""

import pytest
import torch

from evermoe.session.loss_scale import LossScale

OPTIONS = [{}, {"growth_factor": 3.0, "backoff_factor": 0.3, "growth_interval": 2}, {"init_scale": 2.0**127}]


@pytest.mark.parametrize("options", OPTIONS)
def test_scale_is_that_of_torch(options):
    options = {"growth_interval": 3, **options}
    ours, theirs = torch.amp.GradScaler("cpu", **options), torch.amp.GradScaler("cpu", **options)
    scale = LossScale(ours)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    random = torch.Generator().manual_seed(0)
    for number in range(40):
        overflows = bool(torch.rand(1, generator=random) < 0.25)
        theirs.scale(torch.zeros(1))
        weight.grad = torch.full((1,), float("inf") if overflows else 1.0)
        theirs.step(optimizer)
        theirs.update()
        scale.update(has_overflowed=overflows)
        assert scale.value == theirs.get_scale() == ours.get_scale()
        assert scale.state_dict().items() <= ours.state_dict().items() == theirs.state_dict().items()
        if number == 20:
            state = scale.state_dict()
            ours = torch.amp.GradScaler("cpu", **options)
            scale = LossScale(ours)
            scale.load_state_dict(state)


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False)])
def test_without_a_scaler_there_is_no_scale(scaler):
    scale = LossScale(scaler)
    scale.update(has_overflowed=True)
    scale.load_state_dict({"scale": 4.0, "_growth_tracker": 1})
    assert (scale.value, scale.state_dict(), scale.settings()) == (1.0, {}, {})


def test_settings_are_those_that_all_members_share():
    found = LossScale(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)).settings()
    assert found == {"scaler": "growth_factor 2.0, backoff_factor 0.5, growth_interval 5"}
