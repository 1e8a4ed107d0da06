"""Optimizers that can be divided into units: those that step each expert as if it were alone, of this model."""

import pytest
import torch
from torch import nn

import evermoe
from evermoe.errors import UnsupportedState
from evermoe.state.training_state import TrainingState
from support.models import OPTIMIZERS, Tied


class Lamb(torch.optim.Optimizer):
    """Scales each tensor's step by its norm, so that rows of one depend on each other."""

    def __init__(self, params, lr, decay):  # without defaults: no second one can be made from groups alone
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(0.9).add_(p.grad)
                update = m.sign() + group["decay"] * p
                p.sub_(update, alpha=group["lr"] * float(p.norm() / update.norm().clamp(min=1e-6)))


class OwnMuon(torch.optim.Optimizer):
    """Makes each matrix's step orthogonal; other parameters get plain steps."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr, "is_matrix": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(0.9).add_(p.grad)
                if group["is_matrix"] and p.dim() == 2:
                    left, _, right = torch.linalg.svd(m, full_matrices=False)
                    p.sub_(left @ right, alpha=group["lr"])
                else:
                    p.sub_(m, alpha=group["lr"])


class Nested(torch.optim.Optimizer):
    """Lets another optimizer step, as wrappers do."""

    def __init__(self, inner, extra):
        super().__init__(inner.param_groups, {"lr": 0.1})
        self.inner, self.extra = inner, extra

    def step(self, closure=None):
        self.inner.step()


class Quantized(torch.Tensor):
    """As optimizers in 8 bits keep their state: numbers of another type, and what they are multiplied by."""

    @staticmethod
    def __new__(cls, like):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    def __init__(self, like):
        self.codes = torch.zeros(like.shape, dtype=torch.uint8)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"Quantized: {function}")


class Adam8bit(torch.optim.Optimizer):
    """Keeps its state in tensors of a class of its own."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p].setdefault("exp_avg", Quantized(p))
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Adam8bit, "Adam8bit keeps 'exp_avg' as Quantized for a parameter of shape"),
        (torch.optim.NAdam, "NAdam"),
        (lambda p: Lamb(p, 0.1, 0.01), "Lamb mixes the rows"),
        (OwnMuon, "OwnMuon mixes the rows"),
        (torch.optim.Muon, "Muon mixes the rows"),
        (torch.optim.Adafactor, "Adafactor"),
        (torch.optim.LBFGS, "LBFGS cannot step"),
        (torch.optim.SparseAdam, "SparseAdam cannot step"),
        (lambda p: Nested(torch.optim.SGD(p, lr=0.1), 1), "Nested does not step"),
    ],
)
def test_optimizers_that_mix_experts_are_refused_by_name(make, message):
    layer = evermoe.MoE(8, 16, 4)
    before = [p.detach().clone() for p in layer.parameters()]
    with pytest.raises(UnsupportedState, match=message):
        TrainingState(layer, make(list(layer.parameters())))
    assert all(torch.equal(*both) for both in zip(before, layer.parameters(), strict=True))


def test_matrices_outside_of_the_experts_may_be_mixed():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), evermoe.MoE(8, 16, 4))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "is_matrix": False}]
    state = TrainingState(model, OwnMuon(groups))
    assert [spec.name for spec in state.catalog.by_name["0"].specs] == ["weight", "weight/m"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_elementwise_optimizers_are_taken_with_a_scheduler_and_their_state(name):
    model = Tied()
    optimizer = OPTIMIZERS[name](model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 * step)  # begins with 0, and wraps `step`
    TrainingState(model, optimizer)
    model(torch.randint(0, 12, (6,))).backward()
    optimizer.step()


def test_optimizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"group 0 has a parameter of shape \[4, 8\] that is not the model's"):
        TrainingState(evermoe.MoE(8, 16, 4), torch.optim.SGD(evermoe.MoE(8, 16, 4).parameters(), lr=0.1))
