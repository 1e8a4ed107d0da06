"""`evermoe.optim.AdamW` as a drop-in for torch's class."""

import copy
import pickle

import pytest
import torch
from torch import nn

from evermoe import ops, optim
from evermoe.optim import SGD, AdamW
from evermoe.optim.masters import takes_factor


def make_model():
    """Sizes are multiples of 8, but for a number without dimensions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    return model


def loss_of(model, step):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    return (model(x) - x).square().sum() + (model.scale - 3).square()


def train(model, optimizer, steps, scheduler=None, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if scheduler:
            scheduler.step()


def groups(model):
    return [{"params": model[0].parameters(), "lr": 3e-2}, {"params": [*model[2].parameters(), model.scale]}]


def equal(one, two, but=()):
    """All parameters, bit for bit; those named in `but` nearly."""
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        if name in but:
            torch.testing.assert_close(a, b)
        else:
            assert torch.equal(a, b), name


OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.1}


@pytest.mark.parametrize("options", [{}, OPTIONS, {"maximize": True, "lr": 1e-4}], ids=["defaults", "odd", "maximize"])
def test_trains_like_torch(options):
    models = make_model(), make_model()
    for model, kind in zip(models, (AdamW, torch.optim.AdamW), strict=True):
        fused = {} if kind is AdamW else {"fused": True}
        optimizer = kind(groups(model), **options, **fused)
        train(model, optimizer, 20, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15))
    equal(*models, but=["scale"])
    assert not torch.equal(models[0][0].weight, make_model()[0].weight)


def test_state_dict_round_trip_continues_bit_for_bit():
    model = make_model()
    optimizer = AdamW(groups(model), **OPTIONS)
    train(model, optimizer, 5)
    saved = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
    train(model, optimizer, 5, start=5)
    other = make_model()
    other.load_state_dict(saved[0])
    resumed = AdamW(groups(other))
    resumed.load_state_dict(saved[1])
    train(other, resumed, 5, start=5)
    equal(model, other)
    assert resumed.state[other.scale]["step"].item() == 10


@pytest.mark.parametrize("kinds", [(AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)])
def test_state_moves_to_and_from_torch(kinds):
    def make(kind, model):
        return kind(groups(model), **OPTIONS, **({} if kind is AdamW else {"fused": True}))

    model = make_model()
    first = make(kinds[0], model)
    train(model, first, 4)
    second = make(kinds[1], model)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for group in second.param_groups:
        group["fused"] = True  # what torch's class would forget, and ours does not look at
    reference = copy.deepcopy(model)
    again = make(kinds[0], reference)
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    train(model, second, 4, start=4)
    train(reference, again, 4, start=4)
    equal(model, reference, but=["scale"])


def test_amsgrad_is_not_ignored():
    model = make_model()
    torchs = torch.optim.AdamW(model.parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad: expected False"):
        AdamW(model.parameters()).load_state_dict(torchs.state_dict())


def test_no_gradient_is_no_step_and_zeros_are_one():
    parameters = [nn.Parameter(torch.ones(8)) for _ in range(2)]
    optimizer = AdamW(parameters)
    parameters[1].grad = torch.zeros(8)
    optimizer.step()
    assert parameters[0] not in optimizer.state
    assert torch.equal(parameters[0], torch.ones(8))
    assert optimizer.state[parameters[1]]["step"].item() == 1
    assert bool((parameters[1] < 1).all())


def test_closure_is_called_with_gradients_enabled():
    model = make_model()
    optimizer = AdamW(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == loss_of(make_model(), 0).item()
    assert optimizer.state[model.scale]["step"].item() == 1


def test_learning_rate_may_be_a_tensor():
    models = make_model(), make_model()
    for model, lr in zip(models, (0.25, torch.tensor(0.25)), strict=True):
        train(model, AdamW(model.parameters(), lr=lr), 2)
    equal(*models)


def test_step_that_a_scaler_skips_changes_nothing():
    model = make_model()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 2)
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, 2)).backward()
    model.scale.grad.fill_(float("inf"))
    scaler.step(optimizer)
    equal(model, before)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lr", {"lr": -1.0}),
        ("betas", {"betas": (0.9, 1.0)}),
        ("eps", {"eps": float("nan")}),
        ("weight_decay", {"weight_decay": -0.1}),
        ("params", {"params": [nn.Parameter(torch.ones(4).double())]}),
        ("params", {"params": [nn.Parameter(torch.ones(4, 3).t())]}),
    ],
)
def test_wrong_options_are_named_and_nothing_is_added(name, options):
    fine = AdamW([nn.Parameter(torch.ones(4))])
    with pytest.raises(ValueError, match=f"{name}: expected"):
        fine.add_param_group({"params": [nn.Parameter(torch.ones(4))]} | options)
    assert len(fine.param_groups) == 1
    with pytest.raises(ValueError, match=f"{name}: expected"):
        AdamW(**({"params": [nn.Parameter(torch.ones(4))]} | options))


def test_option_of_a_wrong_type_adds_nothing():
    fine = AdamW([nn.Parameter(torch.ones(4))])
    with pytest.raises(TypeError):
        fine.add_param_group({"params": [nn.Parameter(torch.ones(4))], "betas": 0.9})
    assert len(fine.param_groups) == 1


def test_refused_gradient_counts_no_step():
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = AdamW([parameter])
    parameter.grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert optimizer.state[parameter]["step"].item() == 0
    assert torch.equal(parameter, torch.ones(4, 4))


KINDS = [(AdamW, "adamw_all_"), (SGD, "sgd_all_")]


@pytest.fixture
def calls(monkeypatch):
    """Return how many parameters each call of an op took, by the op's name."""
    found = []

    def count(name, op):
        def counted(p, *rest):
            found.append((name, len(p)))
            op(p, *rest)

        monkeypatch.setattr(optim, name, counted, raising=False)

    for name in ("adamw_", "adamw_all_", "sgd_", "sgd_all_"):
        count(name, getattr(ops.optim, name))
    return found


def one_by_one(kind, parameters, **options):
    """The same optimizer, but each parameter has one of its own."""
    return [kind([parameter], **options) for parameter in parameters]


@pytest.mark.parametrize(("kind", "op"), KINDS)
def test_all_parameters_take_their_step_in_one_call(kind, op, calls):
    """Of two groups; some without a gradient at times, so that they are at different steps."""
    options = {"lr": 0.1, "weight_decay": 0.2} | ({"momentum": 0.9} if kind is SGD else {})
    random = torch.Generator().manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, generator=random)) for shape in [(8, 4), (), (0,), (71,), (2, 3)]]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizer = kind([{"params": ours[:3]}, {"params": ours[3:], "lr": 0.3}], **options)
    others = one_by_one(kind, theirs[:3], **options) + one_by_one(kind, theirs[3:], **options | {"lr": 0.3})
    for step in range(4):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            skipped = (step + number) % 3 == 0
            for parameter in pair:
                parameter.grad = None if skipped else torch.full_like(parameter, step + 0.5)
        calls.clear()
        optimizer.step()
        assert calls == [(op, sum(parameter.grad is not None for parameter in ours))]
        for other in others:
            other.step()
    for one, two, other in zip(ours, theirs, others, strict=True):
        assert torch.equal(one, two)
        assert optimizer.state[one].keys() == other.state[two].keys()
        for name, value in optimizer.state[one].items():
            assert torch.equal(value, other.state[two][name]), name


@pytest.mark.parametrize(("kind", "op"), KINDS)
def test_without_a_gradient_there_is_no_call(kind, op, calls):
    kind([nn.Parameter(torch.ones(8))]).step()
    assert not calls


FACTORS = [1.0, 0.37, 1 / 3, 3e-5, 1e-39, 0.0]
OPTIMIZERS = {
    "adamw": lambda p: AdamW(p, lr=1e-2, weight_decay=0.1),
    "adamw, maximize": lambda p: AdamW(p, lr=1e-2, maximize=True),
    "sgd": lambda p: SGD(p, lr=0.1),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_factor_has_the_bits_of_separate_passes(make, dtype):
    """In float32: multiplied before the step; parameters of 16 bits round a master. Gradients keep their values."""
    random = torch.Generator().manual_seed(0)
    ours = [nn.Parameter(torch.randn(size, generator=random).to(dtype)) for size in (1, 71, 4099)]
    masters = [nn.Parameter(parameter.detach().to(torch.float32, copy=True)) for parameter in ours]
    optimizer, separate = make(ours), make(masters)
    for factor in FACTORS:
        gradients = [torch.randn(parameter.shape, generator=random).to(dtype) for parameter in ours]
        for one, two, gradient in zip(ours, masters, gradients, strict=True):
            one.grad, two.grad = gradient.clone(), gradient.float() * factor
        optimizer.step(factor=factor)
        separate.step()
        for one, two, gradient in zip(ours, masters, gradients, strict=True):
            assert torch.equal(one, two.to(dtype)), factor
            assert torch.equal(one.grad, gradient)
            kept = dict(optimizer.state[one])
            assert torch.equal(kept.pop("master_param", two), two)
            assert all(
                torch.equal(value, separate.state[two][name]) for name, value in kept.items() if value is not None
            )


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf")])
def test_factor_out_of_its_range_changes_nothing(factor):
    model = make_model()
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match="clip: expected a finite number of 0 or more"):
        AdamW(model.parameters()).step(factor=factor)
    equal(model, make_model())


def test_own_step_of_a_subclass_takes_no_factor():
    class Own(AdamW):
        def step(self, closure=None):
            return super().step(closure)

    parameters = [nn.Parameter(torch.ones(4))]
    assert takes_factor(AdamW(parameters)) and takes_factor(type("Kin", (SGD,), {})(parameters))
    assert not takes_factor(Own(parameters)) and not takes_factor(torch.optim.AdamW(parameters))


def sparse(parameters):
    parameters[1].grad = torch.ones(4).to_sparse()


def freed(parameters):
    parameters[1].grad.untyped_storage().resize_(0)


@pytest.mark.parametrize("spoil", [sparse, freed])
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_one_refused_gradient_changes_no_parameter(kind, spoil):
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = kind([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    optimizer.step()
    before, state = copy.deepcopy(parameters), copy.deepcopy(optimizer.state_dict())
    spoil(parameters)
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert all(torch.equal(one, two) for one, two in zip(parameters, before, strict=True))
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)


def test_option_out_of_its_range_changes_no_parameter():
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = AdamW([{"params": [parameter]} for parameter in parameters])
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    optimizer.param_groups[1]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr: expected"):
        optimizer.step()
    assert all(torch.equal(parameter, torch.ones(4)) for parameter in parameters)


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_capture_of_a_graph_is_refused_and_nothing_changes(kind, monkeypatch):
    """A capture would repeat one step's numbers for ever. Torch says itself whether it captures; only a GPU can."""
    model = make_model()
    optimizer = kind(model.parameters(), lr=0.1)
    loss_of(model, 0).backward()
    before = copy.deepcopy(model)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=rf"evermoe.optim.{kind.__name__}: expected no capture of a CUDA graph"):
        optimizer.step()
    equal(model, before)
    assert not optimizer.state


@pytest.mark.gpu
@pytest.mark.chip
def test_capture_of_a_graph_is_refused_on_a_gpu():
    parameter = torch.nn.Parameter(torch.ones(64, device="cuda"))
    optimizer = AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with (
        pytest.raises(RuntimeError, match="expected no capture of a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
