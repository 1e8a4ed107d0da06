"""Bytes that a worker of a session holds, by the parts of the planner's formula; a part of its model is frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import evermoe
from evermoe.integrations.transformers import make_elastic
from evermoe.state.model_shape import shape_of
from support.adapters import EXPERTS, loss_of, optimizer_of
from support.flat_options import grouped
from support.hub import VOCABULARY, build

SIZES = {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 9, "num_hidden_layers": 3}
DATA = torch.randint(3, VOCABULARY, (24, 7), generator=torch.Generator().manual_seed(1))
MEASURED_IN = 2
"""Step in which the bytes are counted: all copies are complete."""


def adapters(model: Any) -> Any:
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], target_parameters=EXPERTS)
    return make_elastic(get_peft_model(model, lora))


def frozen(*names: str) -> Callable[[Any], Any]:
    """Return a function that freezes the parameters with a part of their names."""

    def freeze(model: Any) -> Any:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(each in name for each in names))
        return make_elastic(model)

    return freeze


KINDS = {
    "adapters": adapters,
    "frozen experts": frozen(".experts."),
    "frozen layer of experts": frozen("layers.0.mlp.experts."),
    "frozen but experts": frozen("attn", "norm", "gate.weight", "embed", "lm_head"),
    "frozen embedding": frozen("embed", "lm_head"),
}


def model_of(kind: str) -> Any:
    return KINDS[kind](build("qwen3", **SIZES))


def measure(write: Callable[..., None], kind: str, node: str, options: dict[str, Any]) -> None:
    """Train for a few steps. Write the model's sizes, and what this worker holds while gradients exist."""
    model = model_of(kind)
    write("shape", **vars(shape_of(model)))
    optimizer = optimizer_of(model)
    session = evermoe.Session(model, optimizer, evermoe.ElasticSampler(len(DATA), 6), **grouped(options, node=node))
    for step in session.steps(MEASURED_IN + 2):
        with step as indices:
            step.backward(loss_of(model, DATA[indices]))
            if step.number == MEASURED_IN:
                write("held", **_held(session, model, optimizer))


def _held(session: evermoe.Session, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    now, store = session._protection.replicas._now, session._store
    parts = [] if now is None else now.copies.replica._parts
    return {
        "parameters": _nbytes(model.parameters()),
        "moments": _nbytes(each for state in optimizer.state.values() for each in state.values() if each.dim()),
        "gradients": _nbytes(each.grad for each in model.parameters() if each.grad is not None),
        "replicas": _nbytes(part.state for part in parts if part.state is not None),
        "snapshots": sum(each.arena.mapped_bytes for each in (*store.own, *store.peers)),
    }


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)
