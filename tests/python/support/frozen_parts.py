"""A model of which most is frozen, in one plain process and as a worker in a session; the script writes it once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import evermoe
from support.flat_options import grouped

STEPS, WRITTEN_AFTER, DIES_IN, BATCH, WIDTH, EXPERTS = 12, 6, 9, 12, 32, 6
DATA = torch.randn(36, WIDTH, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Frozen experts, a frozen matrix with a bias that is trained, and what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.moe = evermoe.MoE(WIDTH, 2 * WIDTH, EXPERTS, top_k=2)
        self.out = nn.Linear(WIDTH, 1)
        self.moe.experts.requires_grad_(False)
        self.inside.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.moe(self.inside(x)))  # type: ignore[no-any-return]

    @torch.no_grad()
    def write(self) -> None:
        """Write what is frozen, as a script may."""
        self.moe.experts.weights.mul_(1.5)
        self.inside.weight.add_(0.1)


def make() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def plain() -> list[float]:
    """Losses of one process without a session."""
    model, optimizer = make()
    sampler, losses = evermoe.ElasticSampler(len(DATA), BATCH), []
    for step in range(STEPS):
        loss = loss_of(model, DATA[sampler.share(0, 1).indices])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sampler.advance()
        losses.append(loss.item())
        if step + 1 == WRITTEN_AFTER:
            model.write()
    return losses


def train(write: Callable[..., None], node: str, options: dict[str, Any]) -> None:
    """Train in a session, and write the bytes of copies that were sent until each step."""
    model, optimizer = make()

    def on_event(event: Any) -> None:
        if event.name in ("recovered", "verified"):
            write(event.name, **{key: value for key, value in event.fields().items() if key != "seconds"})

    session = evermoe.Session(
        model, optimizer, evermoe.ElasticSampler(len(DATA), BATCH), on_event=on_event, **grouped(options, node=node)
    )
    for step in session.steps(STEPS):
        with step as indices:
            if node == "b" and step.number == DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(loss_of(model, DATA[indices]))
        if step.committed:
            copied = sum(each.nbytes for each in session._protection.sent_messages())
            own = session._store.own
            sizes = [
                [kept.arena.payload_bytes, sum(n for _, n in kept.still), len(kept.bundle.holders) - 1] for kept in own
            ]
            write("commit", step=step.number, loss=session.loss, copied=copied, sizes=sizes)
            if session.step == WRITTEN_AFTER:
                model.write()
