"""Recorded routing is the routers' own, and replayed routing is computed as a plain loop over given experts does."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import evermoe
from evermoe import Expert, Experts, MoE, Router, record_routing, replay_routing
from evermoe.errors import UnsupportedState
from evermoe.moe.layer import load_balancing_loss

H, E, K, T = 8, 6, 2, 13
ROUTERS = {
    "softmax": {},
    "not normalised": {"normalize": False, "scale": 3.0},
    "sigmoid, groups": {"scores": "sigmoid", "groups": 3, "top_groups": 2, "balance_rate": 0.1},
    "chosen": {"scores": "chosen", "bias": True},
    "noise": {"noise": 0.5, "jitter": 0.2},
    "identity": {"identity_experts": 4},
    "hash": {"vocabulary": 16},
}


class OwnRouter(nn.Module):
    """Experts behind a router of one's own."""

    def __init__(self, noise=0.0):
        super().__init__()
        self.scores = nn.Linear(H, E)
        self.experts = Experts(Expert(H, 8), E)
        self.noise = noise

    def forward(self, x):
        scores = self.scores(x)
        weights, ids = (scores + self.noise * torch.randn_like(scores)).softmax(-1).topk(K)
        return self.experts(x, ids, weights / weights.sum(-1, keepdim=True))


class OwnRule(OwnRouter):
    """Chooses without `topk`."""

    def forward(self, x):
        weights, ids = self.scores(x).softmax(-1).sort(-1, descending=True)
        return self.experts(x, ids[:, :K], weights[:, :K])


class Model(nn.Module):
    """Two layers; the second one has another router."""

    def __init__(self, kind="softmax", second=OwnRouter, use_reentrant=None, preserve=True, **options):
        super().__init__()
        torch.manual_seed(0)
        self.first = MoE.of(Router(H, E, K, **ROUTERS[kind]), Experts(Expert(H, 8, gated=True), E, **options))
        self.second = second()
        self.run = functools.partial(checkpoint, use_reentrant=use_reentrant, preserve_rng_state=preserve)
        if use_reentrant is None:
            self.run = plainly

    def block(self, x):
        tokens = torch.arange(len(x)) if self.first.router.table is not None else None
        x = x + self.first(x, tokens)
        return x + self.second(x)

    def forward(self, x):
        return self.run(self.block, x)


def pickled(model):
    model.run = None
    copied = pickle.loads(pickle.dumps(model))
    copied.run = model.run = plainly
    return copied


def wrapped(model):
    """Wrap the experts, and a layer, as torch's activation checkpointing does."""
    model = copy.deepcopy(model)
    model.second.experts = checkpoint_wrapper(model.second.experts)
    model.first = checkpoint_wrapper(model.first)
    return model


def plainly(function, x):
    return function(x)


def inputs(tokens=T, seed=1):
    return torch.randn(tokens, H, generator=torch.Generator().manual_seed(seed))


def other(model, seed=5):
    """Move the routers, so that they choose otherwise."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in (model.first.router.weight, getattr(model.second, "scores", model.first.router).weight):
            weight.add_(torch.randn(weight.shape, generator=random))
    return model


def record(model, x):
    torch.manual_seed(3)
    with record_routing(model) as routing:
        out = model(x)
    return out, routing


def gradients(model, out):
    model.zero_grad()
    (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
    return {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_recording_is_what_the_router_chose(kind):
    model, x = Model(kind), inputs()
    torch.manual_seed(3)
    routes = model.first.router(x, torch.arange(T) if kind == "hash" else None)
    plain = torch.manual_seed(3) and model(x)
    out, routing = record(model, x)
    assert torch.equal(out, plain)
    assert (routing.ids.shape, routing.ids.dtype) == ((T, 2, K), torch.int64)
    ids_TK = routing.ids[:, 0]
    assert torch.equal(torch.where(ids_TK < E, ids_TK, -1), routes.ids_TK)
    torch.testing.assert_close(routing.weights[:, 0], routes.weights_TK.detach())
    hidden = x + model.first(x, torch.arange(T) if kind == "hash" else None) if kind != "noise" else None
    if hidden is not None:
        assert torch.equal(routing.ids[:, 1], model.second.scores(hidden).topk(K).indices)
    assert not routing.weights.requires_grad
    with pytest.raises(RuntimeError, match="no layer"):
        with record_routing(model) as nothing:
            pass
        _ = nothing.ids


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_replay_in_the_same_model_changes_nothing(kind):
    model, x = Model(kind), inputs()
    out, routing = record(model, x)
    expected = gradients(model, out)
    for weights in (None, routing.weights):
        torch.manual_seed(3)
        with replay_routing(model, routing.ids, weights):
            replayed = model(x)
        assert torch.equal(replayed, out)
        if weights is None:
            torch.testing.assert_close(gradients(model, replayed), expected, rtol=0, atol=0)


def by_hand(model, x, ids_TLK, weights_TLK=None):
    """Each token through the given experts, with weights of the routers' current scores."""
    for number, layer in enumerate((model.first, model.second)):
        scores = layer.router.weight if number == 0 else layer.scores.weight
        bias = 0 if number == 0 else layer.scores.bias
        out = []
        for token, ids_K in zip(x, ids_TLK[:, number], strict=True):
            chosen_K = (scores @ token + bias).softmax(-1)[ids_K]
            weights_K = chosen_K / chosen_K.sum() if weights_TLK is None else weights_TLK[len(out), number]
            views = layer.experts.expert.views(layer.experts.weights)
            rows = []
            for e in ids_K.tolist():
                up = views["up"][e] @ token
                inner = nn.functional.silu(views["gate"][e] @ token) * up if number == 0 else nn.functional.silu(up)
                rows.append(views["down"][e] @ inner)
            out.append(token + (torch.stack(rows) * weights_K.unsqueeze(1)).sum(0))
        x = torch.stack(out)
    return x


@pytest.mark.parametrize("way", [None, False, True], ids=["plain", "checkpointed", "reentrant"])
@pytest.mark.parametrize("has_weights", [False, True], ids=["of the router", "given weights"])
def test_given_experts_are_used_and_routers_are_trained(way, has_weights):
    """The backward follows the block, so that recomputations run without it."""
    x = inputs()
    _, routing = record(Model(), x)
    model, reference = other(Model(use_reentrant=way)), other(Model())
    weights = routing.weights if has_weights else None
    assert not torch.equal(record(model, x)[1].ids, routing.ids)
    leaf = x.clone().requires_grad_()
    with record_routing(model) as used, replay_routing(model, routing.ids.to(torch.int32).numpy(), weights):
        out = model(leaf)
    assert torch.equal(used.ids, routing.ids)
    expected = by_hand(reference, x, routing.ids, weights)
    torch.testing.assert_close(out, expected)
    found = gradients(model, out)
    assert len(used.ids) == T, "recomputations are not recorded"
    names = {name for name in found if "router" in name or "scores" in name}
    if has_weights:
        assert all(found.pop(name) is None or not found.get(name, torch.zeros(1)).any() for name in names)
    else:
        assert all(found[name].abs().max() > 1e-2 for name in names)
    expected = gradients(reference, expected)
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", [False, True], ids=["checkpointed", "reentrant"])
@pytest.mark.parametrize("kind", ["noise", "identity"])
def test_recomputations_without_the_state_of_generators_use_the_choice_of_the_forward(way, kind):
    x, models = inputs(), [Model(kind), Model(kind, use_reentrant=way, preserve=False)]
    found = []
    for model in models:
        torch.manual_seed(3)
        found.append(gradients(model, model(x.clone().requires_grad_())))
        after = torch.rand(1)
    torch.testing.assert_close(found[1], found[0])
    torch.manual_seed(3)
    with torch.no_grad():
        models[0](x)
    assert way or not torch.equal(after, torch.rand(1)), "a recomputation draws, as torch documents"


def test_another_choice_in_a_recomputation_is_an_error_where_it_cannot_be_replaced():
    class Noisy(OwnRule):
        def forward(self, x):
            weights, ids = (self.scores(x) + 3 * torch.randn(len(x), E)).sort(-1, descending=True)
            return self.experts(x, ids[:, :K], weights[:, :K])

    model = Model(second=Noisy, use_reentrant=False)
    gradients(model, model(inputs().requires_grad_()))
    model = Model(second=Noisy, use_reentrant=False, preserve=False)
    with pytest.raises(UnsupportedState, match="preserve_rng_state=True"):
        gradients(model, model(inputs().requires_grad_()))


def test_minus_one_leaves_the_choice_to_the_router():
    x, model = inputs(), Model()
    _, foreign = record(other(Model()), x)
    _, own = record(model, x)
    ids = foreign.ids.clone()
    ids[4:9, 1] = -1
    ids[2:5, 0] = -1
    with record_routing(model) as used, replay_routing(model, ids, foreign.weights):
        model(x)
    assert torch.equal(used.ids[:, 0], torch.where(ids[:, 0] < 0, own.ids[:, 0], ids[:, 0]))
    assert torch.equal(used.weights[2:5, 0], own.weights[2:5, 0])
    assert torch.equal(used.weights[5:, 0], foreign.weights[5:, 0])
    with replay_routing(model, torch.full_like(ids, -1)):
        assert torch.equal(model(x), Model()(x))


def test_padding_is_minus_one():
    layer, x, mask = MoE(H, 8, E), inputs(), torch.arange(T) % 3 > 0
    with record_routing(layer) as routing:
        out = layer(x, mask=mask)
    assert torch.equal((routing.ids < 0).all(-1).squeeze(1), ~mask)
    assert not routing.weights[~mask].any()
    with replay_routing(layer, routing.ids):
        assert torch.equal(layer(x, mask=mask), out)


def test_forwards_of_a_block_take_their_tokens_one_after_the_other():
    model = Model()
    parts = [inputs(5, 1), inputs(3, 2), inputs(0, 3), inputs(7, 4)]
    with record_routing(model) as routing:
        expected = [model(part) for part in parts]
    assert routing.ids.shape == (15, 2, K)
    other(model)
    single = []
    for part, ids in zip(parts, routing.ids.split([5, 3, 0, 7]), strict=True):
        with replay_routing(model, ids):
            single.append(model(part))
    with replay_routing(model, routing.ids):
        together = [model(part) for part in parts]
    assert all(torch.equal(a, b) for a, b in zip(single, together, strict=True))
    assert not torch.equal(expected[0], together[0])


def test_the_tokens_of_a_generation_by_sequence():
    model, batch = Model(), 3
    prompts, new = inputs(batch * 4).view(batch, 4, H), [inputs(batch, seed).view(batch, 1, H) for seed in (2, 3)]
    with record_routing(model) as routing:
        for part in (prompts, *new):
            model(part.reshape(-1, H))
    with record_routing(model) as complete:
        model(torch.cat([prompts, *new], 1).reshape(-1, H))
    assert torch.equal(routing.of_sequences(batch).ids, complete.ids)
    torch.testing.assert_close(routing.of_sequences(batch).weights, complete.weights)
    with pytest.raises(ValueError, match=r"multiple of batch=5 tokens, got \[12, 3, 3\] at layer first.experts"):
        routing.of_sequences(5)


def test_loads_and_balance_count_the_given_experts():
    x, layer = inputs(), MoE.of(Router(H, E, K, balance_rate=0.1), Experts(Expert(H, 8), E))
    ids = torch.tensor([[0, 1]]).expand(T, K).unsqueeze(1)
    with replay_routing(layer, ids):
        layer(x)
    assert layer.load_E.tolist() == [T, T, 0, 0, 0, 0]
    assert layer.experts.share_E.tolist() == [0.5, 0.5, 0, 0, 0, 0]
    probabilities = layer.router(x).probabilities_E
    torch.testing.assert_close(load_balancing_loss(layer), E * (probabilities[:2] * 0.5).sum())
    evermoe.moe.layer.update_balance(layer)
    torch.testing.assert_close(layer.router.balance, torch.tensor([-0.1, -0.1, 0.1, 0.1, 0.1, 0.1]))


def test_exchange_in_fp8():
    x = inputs()
    _, routing = record(Model(), x)
    model, close = other(Model(fp8_dispatch=True)), other(Model())
    outs = []
    for each in (model, close):
        with replay_routing(each, routing.ids):
            outs.append(each(x))
    torch.testing.assert_close(outs[0], outs[1], rtol=0.1, atol=0.1)
    assert not torch.equal(outs[0], outs[1])


def test_layers_without_a_forward_have_none():
    model = Model()
    with record_routing(model) as routing:
        model.first(inputs())
    assert torch.equal(routing.ids[:, 1], torch.full((T, K), -1))
    with replay_routing(model, routing.ids):
        model(inputs())
    with record_routing(model) as routing:
        model.first(inputs())
        model(inputs())
    with pytest.raises(RuntimeError, match=r"same tokens .* got .*'first.experts': \(26, 2\), 'second.experts': \(13"):
        _ = routing.ids


IDS = torch.stack([torch.arange(2 * T) % E, (torch.arange(2 * T) + 1) % E], 1).view(T, 2, K)


def changed(place, value):
    ids = IDS.clone()
    ids[place] = value
    return ids


@pytest.mark.parametrize(
    ("ids", "weights", "words"),
    [
        (IDS[:, 0], None, r"expected ids \[tokens, 2, k\], .* got \[13, 2\]"),
        (IDS[:, :1], None, r"2 layers with experts, got \[13, 1, 2\]. .*each decoder layer"),
        (IDS.float(), None, "an integer type, got torch.float32"),
        (changed((3, 1, 0), E), None, "ids of 0 to 5 for layer second.experts, or -1, got 0 to 6"),
        (changed((3, 1), -2), None, "ids of 0 to 5 for layer second.experts, or -1, got -2"),
        (changed((3, 1, 0), -1), None, "got -1 next to experts"),
        (changed((3, 1), 0), None, "got one twice.*zeros, set them to -1"),
        (IDS, IDS, r"floating-point weights of the ids' shape \[13, 2, 2\], got torch.int64"),
        (IDS, torch.ones(T, 2, 1), r"got torch.float32 \[13, 2, 1\]"),
        (IDS[:-1], None, "layer first.experts has a forward of 13 tokens, and 12 of 12 are left"),
        (torch.cat([IDS, IDS[:2]]), None, "with the 15 tokens of ids in the block, but layer first.experts had 13"),
        (IDS[..., :1], None, r"expected ids \[tokens, layers, 2\], as the router of layer first.experts chooses 2"),
    ],
)
def test_what_does_not_fit_is_an_error(ids, weights, words):
    model = Model()
    with pytest.raises(ValueError, match=words), replay_routing(model, ids, weights):
        model(inputs())
    assert torch.equal(model(inputs()), Model()(inputs())), "an error leaves nothing behind"


def test_models_and_routers_that_are_not_supported():
    with (
        pytest.raises(ValueError, match=r"record_routing: expected a model with evermoe.MoE"),
        record_routing(nn.ReLU()),
    ):
        pass
    model, x = Model(second=OwnRule), inputs()
    _, routing = record(model, x)
    with replay_routing(model, routing.ids):
        model(x)  # its own choice needs no other weights
    other(model)
    words = r"router of layer second\.experts does not choose by torch\.topk"
    with pytest.raises(UnsupportedState, match=words), replay_routing(model, routing.ids):
        model(x)
    with replay_routing(model, routing.ids, routing.weights), record_routing(model) as used:
        model(x)
    assert torch.equal(used.ids, routing.ids) and torch.equal(used.weights, routing.weights)


@pytest.mark.parametrize("change", [copy.deepcopy, pickled, wrapped], ids=["copied", "pickled", "wrapped"])
def test_copies_and_wrapped_experts_replay(change):
    """Experts of a wrapped model are found; a copy replays in its own layers."""
    x, model = inputs(), other(Model())
    _, routing = record(Model(), x)
    with replay_routing(model, routing.ids):
        expected = model(x)
    changed = change(model)
    with record_routing(changed) as used, replay_routing(changed, routing.ids):
        out = changed(x)
    assert torch.equal(used.ids, routing.ids) and torch.equal(out, expected)
    torch.testing.assert_close([*gradients(changed, out).values()], [*gradients(model, expected).values()])


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.few(1)
def test_compiled_models_record_and_replay(backend):
    torch._dynamo.reset()
    x, model, plain = inputs(), other(Model()), other(Model())
    compiled = torch.compile(model, backend=backend)
    before = compiled(x)
    _, foreign = record(Model(), x)
    with record_routing(compiled) as routing:
        compiled(x)
    assert torch.equal(routing.ids, record(plain, x)[1].ids)
    with replay_routing(compiled, foreign.ids):
        out = compiled(x)
    with replay_routing(plain, foreign.ids):
        expected = plain(x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(model, out), gradients(plain, expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compiled(x), before)
    torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x), before)


@pytest.mark.full
def test_a_compiled_forward_that_is_repeated_with_other_noise_is_an_error():
    torch._dynamo.reset()
    layer = MoE(H, 8, E, router_noise=3.0)
    compiled, x = torch.compile(layer, backend="aot_eager"), inputs().requires_grad_()
    checkpoint(compiled, x, use_reentrant=False).sum().backward()
    with pytest.raises(UnsupportedState, match="preserve_rng_state=True"):
        checkpoint(compiled, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
