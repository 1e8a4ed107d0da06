"""Compiled, checkpointed and wrapped models: their checkpoints have the keys of the plain model, both ways."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import evermoe
from evermoe.moe.module_paths import named_parts
from support.habits import DATA, SAMPLES, Model, adamw, mean_loss


class Wrapper(nn.Module):
    """Calls the model inside, as wrappers of many libraries do."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, tokens):
        return self.module(tokens)


def inside(model):
    """Wraps parts: an MoE layer, its experts, and what is neither."""
    model.second = checkpoint_wrapper(model.second)
    model.first.experts = torch.compile(model.first.experts, backend="eager")
    model.head = Wrapper(torch.compile(model.head, backend="eager"))
    return model


WRAPS = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "checkpoint_wrapper": checkpoint_wrapper,
    "module": Wrapper,
    "several": lambda model: Wrapper(torch.compile(checkpoint_wrapper(model), backend="eager")),
    "inside": inside,
}


def changed():
    """Other weights than those of `Model()`."""
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model


def train(model, steps, folder, memory):
    session = evermoe.Session(
        model,
        adamw(model),
        evermoe.ElasticSampler(SAMPLES, 12),
        checkpoints=folder,
        membership=evermoe.Membership(memory_dir=str(memory)),
    )
    losses = []
    for step in session.steps(steps):
        with step as indices:
            step.backward(mean_loss(model, DATA[indices]))
        losses.append(session.loss)
    return losses


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(wrap, id=name, marks=() if name in ("checkpoint_wrapper", "module") else pytest.mark.full)
        for name, wrap in WRAPS.items()
    ],
)
def test_a_wrapped_model_and_the_plain_one_load_each_others_checkpoints(tmp_path, wrap):
    plain, wrapped = Model(), wrap(Model())
    memory = tmp_path / "memory"
    memory.mkdir()
    expected = train(plain, 6, tmp_path / "of plain", memory)
    assert train(wrapped, 3, tmp_path / "of wrapped", memory) == pytest.approx(expected[:3], rel=1e-6)
    other = changed()
    evermoe.load_weights(other, tmp_path / "of wrapped" / "step-00000003")
    assert all(map(torch.equal, other.parameters(), wrapped.parameters()))
    other = wrap(changed())
    evermoe.load_weights(other, tmp_path / "of plain" / "step-00000006")
    assert all(map(torch.equal, other.parameters(), plain.parameters()))
    # A job may be resumed without the wrapper, or with it, with its optimizer's state.
    assert train(Model(), 5, tmp_path / "of wrapped", memory) == pytest.approx(expected[3:5], rel=1e-6)
    assert train(wrap(Model()), 6, tmp_path / "of wrapped", memory) == pytest.approx(expected[5:], rel=1e-6)


def test_a_module_with_more_than_what_it_wraps_is_no_wrapper():
    model = Wrapper(nn.Linear(2, 2))
    model.bias = nn.Parameter(torch.zeros(2))
    assert [path for path, _ in named_parts(model)] == ["", "module"]
    model = Wrapper(nn.Linear(2, 2))
    model.head = nn.Linear(2, 2)
    assert [path for path, _ in named_parts(model)] == ["", "module", "head"]


@pytest.mark.parametrize("name", ["checkpoint_wrapper", "several", "inside"])
def test_the_complete_state_dict_has_the_keys_of_the_models_own(tmp_path, name):
    model, found = WRAPS[name](Model()), {}
    session = evermoe.Session(
        model,
        adamw(model),
        evermoe.ElasticSampler(SAMPLES, 12),
        membership=evermoe.Membership(memory_dir=str(tmp_path)),
    )
    for step in session.steps(1):
        with step as indices:
            step.backward(mean_loss(model, DATA[indices]))
        with session.evaluation():
            found = session.full_state_dict()
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=0)
