"""The balancing loss of transformers' models with several members is that of one process: value, gradients, weights."""

import contextlib
import importlib
import inspect

import numpy as np
import pytest
import torch
from test_transformers_experts import classes
from torch import nn

import evermoe
from evermoe.comm.collectives import ExpertReducer
from evermoe.moe.experts import expert_layers
from support.hub import BALANCED, VOCABULARY, Loss, build
from support.optimizers import make_optimizer
from support.ranks import run_ranks, sum_gradients
from support.worker import SAMPLES, Fault, dataset

transformers = pytest.importorskip("transformers")

COEFFICIENT, STEPS, LENGTH = 0.5, 3, 9
BOUNDS = {"unequal": [0, 1, 3, 7], "one without samples": [0, 3, 3, 7]}
KEPT = [9, 2, 5, 9, 1, 3, 7]
"""Tokens of each sample that are not padding."""
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def batch():
    """int64 `[7, 9]`: tokens, labels, and the mask."""
    tokens = torch.randint(0, VOCABULARY, (len(KEPT), LENGTH), generator=torch.Generator().manual_seed(5))
    mask = (torch.arange(LENGTH) < torch.tensor(KEPT).unsqueeze(1)).long()
    return tokens, tokens.masked_fill(mask == 0, -100), mask


def make(name):
    return build(name, output_router_logits=True, router_aux_loss_coef=COEFFICIENT)


def loss_of(model, rows, weighted_by):
    """Return what these samples add to the sum of the batch's loss over all members."""
    tokens, labels, mask = batch()
    is_mine = rows.stop > rows.start
    rows = rows if is_mine else slice(0, 1)  # as the sampler gives a member without samples one of weight 0
    out = model(input_ids=tokens[rows], attention_mask=mask[rows], labels=labels[rows])
    if weighted_by == "samples":  # the loss over tokens is that of one process with count alone
        return out.aux_loss * len(tokens[rows]) / len(tokens) * is_mine
    counted = (labels[:, 1:] != -100).sum(1)
    return out.loss * counted[rows].sum() / counted.sum() * is_mine


def train(model, rows, weighted_by, reduce=lambda: None):
    """Losses, and the weights after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, rows, weighted_by)
        loss.backward()
        reduce()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), {key: tensor.detach() for key, tensor in model.state_dict().items()}


def elastic_rank(group, name):
    """The model with each expert on two of three ranks, and what reduces its gradients."""
    from evermoe.integrations.transformers import make_elastic

    model = make_elastic(make(name))
    layers = list(expert_layers(model).values())
    matrix = np.array([[(expert + rank) % 3 != 0 for expert in range(layers[0].num_experts)] for rank in range(3)], int)
    for layer in layers:
        layer.ids = np.flatnonzero(matrix[group.rank]).tolist()
        layer.weights = nn.Parameter(layer.weights.detach()[layer.ids].clone())
        layer.group, layer.matrix_RE = group, matrix
    dense = [p for key, p in model.named_parameters() if not key.endswith("experts.weights")]
    reducer = ExpertReducer([matrix] * len(layers), [layer.weights.shape[1] for layer in layers], group.rank)

    def reduce():
        sum_gradients(dense, group)
        for layer in layers:  # the last one's experts are no part of the balancing loss alone
            layer.weights.grad = torch.zeros_like(layer.weights) if layer.weights.grad is None else layer.weights.grad
        reducer.reduce([layer.weights.grad for layer in layers], group)

    return model, layers, reduce


def on_rank(group, name, bounds, weighted_by, checkpointing):
    model, layers, reduce = elastic_rank(group, name)
    if checkpointing is not None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    rows = slice(bounds[group.rank], bounds[group.rank + 1])
    for layer in layers:
        layer.has_samples = rows.stop > rows.start
    losses, weights = train(model, rows, weighted_by, reduce)
    return {"losses": losses, "weights": weights, "ids": layers[0].ids}


@pytest.mark.parametrize(
    ("name", "bounds", "weighted_by", "checkpointing"),
    [
        ("mixtral", "unequal", "count", None),
        ("mixtral", "unequal", "samples", None),
        ("qwen3", "one without samples", "count", False),
        ("gpt-oss", "one without samples", "samples", None),
    ],
)
@pytest.mark.few(2)
def test_three_members_train_as_one_process_does(tmp_path, name, bounds, weighted_by, checkpointing):
    model = make(name)
    model.set_experts_implementation("eager")
    losses, weights = train(model, slice(0, len(KEPT)), weighted_by)
    found = run_ranks(tmp_path, 3, on_rank, name, BOUNDS[bounds], weighted_by, checkpointing)
    torch.testing.assert_close(sum(each["losses"] for each in found), losses, **CLOSE)
    for each in found:
        for key, tensor in weights.items():
            mine = tensor[each["ids"]] if ".experts." in key else tensor
            torch.testing.assert_close(each["weights"][key], mine, **CLOSE, msg=lambda text, key=key: f"{key}: {text}")


def train_alone(batch_size):
    """Losses of a session's steps, by transformers' own code in one process."""
    model, data = Loss(build(BALANCED)), dataset()
    model.model.set_experts_implementation("eager")
    optimizer, sampler = make_optimizer("adamw", model), evermoe.ElasticSampler(SAMPLES, batch_size)
    losses = []
    for _ in range(STEPS):
        loss = model(data[sampler.batch()])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sampler.advance()
        losses.append(loss.item())
    return losses


def test_a_session_trains_as_one_process_where_members_have_unequal_shares_or_none(start_job):
    """Of 5 samples two members have 2 and one has 1; a member dies; of the next job's 2 samples one has none."""
    for batch_size, faults in ((5, {"c": [Fault("reduce", 1)]}), (2, {})):
        job = start_job(3, join_interval=1)
        workers = job.start_all(faults, model=BALANCED, steps=STEPS, batch_size=batch_size)
        assert [each.join(80) for each in workers] == [0, 0, -9 if faults else 0]
        found = [event["loss"] for event in workers[0].events("commit")]
        assert found == pytest.approx(train_alone(batch_size), rel=1e-6, abs=1e-6)


def compiled_on_rank(group):
    model, _, _ = elastic_rank(group, "mixtral")
    model.compile(backend="aot_eager")
    tokens, labels, mask = batch()
    loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    loss.backward()
    return {"loss": loss.detach(), "gradient": model.model.layers[0].mlp.gate.weight.grad}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_compiled_model_has_the_same(tmp_path):
    found = run_ranks(tmp_path, 3, compiled_on_rank)
    model = make("mixtral")
    tokens, labels, mask = batch()
    loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    loss.backward()
    for each in found:
        torch.testing.assert_close(each["loss"], loss.detach(), **CLOSE)
    total = sum(each["gradient"] for each in found)
    torch.testing.assert_close(total / 3, model.model.layers[0].mlp.gate.weight.grad, **CLOSE)


def evaluated_on_rank(group):
    model, _, _ = elastic_rank(group, "mixtral")
    tokens, _, mask = batch()
    plain = make("mixtral")  # of the same class, in no job
    rows = slice(group.rank, group.rank + 2)
    with contextlib.suppress(RuntimeError):
        model(input_ids=tokens.float())  # ends in the middle: what follows is of no model
    mine = plain(input_ids=tokens[rows], attention_mask=mask[rows]).aux_loss
    with torch.no_grad():
        found = model(input_ids=tokens[rows], attention_mask=mask[rows]).aux_loss
    return {"alone": mine.detach(), "in a job": found}


def test_evaluations_and_models_of_no_job_have_their_own(tmp_path):
    for each in run_ranks(tmp_path, 3, evaluated_on_rank):
        torch.testing.assert_close(each["in a job"], each["alone"], **CLOSE)


def test_every_model_with_the_experts_interface_is_known():
    from evermoe.integrations.transformers.router_loss import ARGUMENTS, NAME

    names = {case.values[0] for case in classes()}
    modules = [importlib.import_module(f"transformers.models.{name}") for name in names]
    losses = [(module, getattr(module, NAME)) for module in modules if hasattr(module, NAME)]
    assert len(losses) > 20
    for module, loss in losses:
        assert list(inspect.signature(loss).parameters) == ARGUMENTS
        codes = [
            getattr(inspect.unwrap(kind.forward), "__code__", None)
            for kind in vars(module).values()
            if inspect.isclass(kind) and issubclass(kind, nn.Module)
        ]
        assert any(NAME in code.co_names for code in codes if code is not None), module
