"""peft's adapters on tiny models of transformers, each trained in one plain process and as a worker in a session."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import peft
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn

import evermoe
from evermoe.integrations.transformers import make_elastic
from support.flat_options import grouped
from support.hub import VOCABULARY, build

STEPS, DIES_IN, BATCH, CLIP = 6, 3, 12, 0.5
DATA = torch.randint(3, VOCABULARY, (48, 7), generator=torch.Generator().manual_seed(1))
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("qwen3", {"target_modules": ["q_proj", "v_proj"]}),
    "experts": ("qwen3", {"target_modules": [], "target_parameters": EXPERTS}),
    "router, biased experts and head": (
        "gpt-oss",
        {
            "target_modules": ["o_proj"],
            "target_parameters": ["mlp.router.weight", EXPERTS[1]],
            "modules_to_save": ["lm_head"],
        },
    ),
    "latent attention": ("deepseek-v3", {"target_modules": ["q_b_proj", "kv_b_proj", "o_proj"], "use_rslora": True}),
}
"""The model, and what is adapted."""


def adapted(kind: str, **more: Any) -> Any:
    """The plain model with adapters, which change something from the start."""
    name, options = KINDS[kind]
    model = build(name)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **options, **more))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


def result(model: Any) -> dict[str, Any]:
    """Return the adapters of a complete model in the end, and the loss of the merged model."""
    adapters = {key: tensor.flatten().tolist() for key, tensor in get_peft_model_state_dict(model).items()}
    merged = model.merge_and_unload()
    assert not any(isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer) for module in merged.modules())
    with torch.no_grad():
        return {"adapters": adapters, "merged": loss_of(merged, DATA[:8]).item()}


def plain(kind: str) -> tuple[list[float], dict[str, Any]]:
    """Losses and the result of transformers' and peft's own code."""
    model = adapted(kind)
    model.base_model.model.set_experts_implementation("eager")
    optimizer, sampler, losses = optimizer_of(model), evermoe.ElasticSampler(len(DATA), BATCH), []
    for _ in range(STEPS):
        loss = loss_of(model, DATA[sampler.share(0, 1).indices])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        sampler.advance()
        losses.append(loss.item())
    return losses, result(model)


def kept_by_others(session: evermoe.Session) -> list[int]:
    """The bytes of each unit of which copies are kept."""
    sizes = dict(session._state.catalog.sizes())
    return [sizes[kept.unit] for kept in session._protection.plan.units for _ in kept.holders]


def tune(write: Callable[..., None], kind: str, node: str, options: dict[str, Any]) -> None:
    """Trains in a session; the first member that is left writes what the complete model has."""
    model = make_elastic(adapted(kind))

    def on_event(event: Any) -> None:
        if event.name in ("recovered", "verified"):
            write(event.name, **{key: value for key, value in event.fields().items() if key != "seconds"})

    session = evermoe.Session(
        model,
        optimizer_of(model),
        evermoe.ElasticSampler(len(DATA), BATCH),
        on_event=on_event,
        **grouped({"max_grad_norm": CLIP, **options}, node=node),
    )
    for step in session.steps(STEPS):
        with step as indices:
            if node == "b" and step.number == DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(loss_of(model, DATA[indices]))
        if step.committed:
            copied = sum(each.nbytes for each in session._protection.sent_messages())
            write("commit", step=step.number, loss=session.loss, copied=copied, kept=kept_by_others(session))
        if session.step == STEPS:
            with session.evaluation():
                state = session.full_state_dict()
            if session.is_main:
                complete = adapted(kind)
                complete.load_state_dict(state)
                write("result", **result(complete))
