"""A small model of every kind of parameter and buffer, its optimizers, and the state that a session keeps of it."""

import torch
import torch.nn.functional as F
from torch import nn

import evermoe
from evermoe import MoE
from evermoe._native import digest
from evermoe.state.training_state import TrainingState


class Tied(nn.Module):
    """Tied weights, buffers of both kinds, a bare parameter, a frozen one and an MoE layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 8)
        self.moe = MoE(8, 5, 4, top_k=2)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.norm(x + self.moe(x) * self.scale + self.frozen(x))
        return F.cross_entropy(self.head(x), tokens)


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "adamw-evermoe": lambda parameters: evermoe.optim.AdamW(parameters, lr=1e-2),
    "adam-amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}


def make(name, steps=0):
    model = Tied()
    optimizer = OPTIMIZERS[name](model.parameters())
    state = TrainingState(model, optimizer)
    train(model, optimizer, steps)
    return model, optimizer, state


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        model(torch.randint(0, 12, (6,), generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()
        model.steps += 1


def read(state):
    found = {}
    for name in state.held():
        found[name] = torch.empty(state.catalog.by_name[name].nbytes, dtype=torch.uint8)
        state.read(name, found[name])
    return found


def digests(state):
    return {name: digest(data.numpy()) for name, data in read(state).items()}


def everyone(state):
    return {path: list(range(layer.num_experts)) for path, layer in state.layers.items()}
