"""Scripts of workers that do in a step what only they know of: they draw random numbers, or change gradients."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal

import numpy as np
import torch

import evermoe
from evermoe.process.memory_folder import job_folder
from evermoe.state import same_everywhere
from support.flat_options import grouped
from support.habits import DATA, DIES_IN, SAMPLES, STEPS, Model, adamw, cross_entropy


def drawing_steps(write, node, options):
    """Draws numbers in each attempt at a step; the last worker dies in one."""
    model = Model()
    session = evermoe.Session(model, adamw(model), evermoe.ElasticSampler(SAMPLES, 12), **grouped(options, node=node))
    for step in session.steps(STEPS):
        with step:
            numbers = [random.random(), np.random.rand(), torch.rand(()).item()]
            write("drew", step=step.number, rank=session.group.rank, numbers=numbers)
            loss = cross_entropy(model, DATA[step.indices])
            if session.group.rank == 2 and step.number == DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(loss)


# ---- gradients that the script changes


def clamped(gradients):
    """Clamps each element; noise of each parameter's and expert's own."""
    for name, gradient in gradients:
        gradient.clamp_(-2e-3, 2e-3)
        gradient.add_(torch.randn(gradient.shape, generator=gradients.generator(name)), alpha=1e-3)


def two_groups(model):
    """Experts and all else, each with a norm of its own."""
    experts = [layer.weights for layer in (model.first.experts, model.second.experts)]
    others = [p for p in model.parameters() if all(p is not each for each in experts)]
    groups = [{"params": experts, "max_norm": 0.02}, {"params": others, "max_norm": 0.05}]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


def changed_gradients(write, kind, node, options):
    """Trains with changed gradients, or with a norm for each group; rank 0 writes the weights at the end.

    The last worker dies, and its node's memory is lost.
    """
    model = Model()
    optimizer = two_groups(model)
    seen = []

    def clip_groups(gradients):
        seen.append([gradients.clip_norm_(group["params"], group["max_norm"]) for group in optimizer.param_groups])

    functions = {"clamp": clamped, "groups": clip_groups}
    session = evermoe.Session(
        model,
        optimizer,
        evermoe.ElasticSampler(SAMPLES, 12),
        on_gradients=functions[kind],
        on_event=lambda event: write(event.name, **event.fields()) if event.name in ("recovered", "verified") else None,
        **grouped(options, node=node),
    )
    for step in session.steps(STEPS):
        with step:
            loss = cross_entropy(model, DATA[step.indices])
            if node == "c" and step.number == DIES_IN:
                shutil.rmtree(job_folder(options["memory_dir"], options["job"]) / node)
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(loss)
        if step.committed:
            write("commit", step=step.number, loss=session.loss, norm=session.grad_norm, seen=seen[-1:])
        if session.step == STEPS:
            write("weights", weights={name: value.tolist() for name, value in session.full_state_dict().items()})


def plain_changed_gradients(kind):
    """The same in plain training: the steps, and the weights at the end."""
    model = Model()
    optimizer = two_groups(model)
    sampler = evermoe.ElasticSampler(SAMPLES, 12)
    experts = {"first.experts": model.first.experts, "second.experts": model.second.experts}
    steps = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model, DATA[sampler.share(0, 1).indices])
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        seen = []
        if kind == "clamp":
            stacks = {id(layer.weights) for layer in experts.values()}
            parts = [(name, p.grad) for name, p in model.named_parameters() if id(p) not in stacks]
            parts += [
                (f"{path}.{e}", row) for path, layer in experts.items() for e, row in enumerate(layer.weights.grad)
            ]
            for name, gradient in parts:
                gradient.clamp_(-2e-3, 2e-3)
                digest = hashlib.sha256(f"0 {number} {name}".encode()).digest()
                random = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
                gradient.add_(torch.randn(gradient.shape, generator=random), alpha=1e-3)
        else:
            for group in optimizer.param_groups:
                seen.append(torch.nn.utils.clip_grad_norm_(group["params"], group["max_norm"]).item())
        optimizer.step()
        sampler.advance()
        steps.append({"loss": loss.item(), "norm": norm.item(), "seen": seen})
    return steps, {name: value.tolist() for name, value in model.state_dict().items()}


def stray_hook(write, node, options):
    """From the fifth step on, a hook after the optimizer's step adds a number of its member's own to weights."""
    same_everywhere.PERIOD = 7
    model = Model()
    optimizer = adamw(model)
    session = evermoe.Session(model, optimizer, evermoe.ElasticSampler(SAMPLES, 12), **grouped(options, node=node))

    def add(*_):
        if session.step >= 4:
            model.head.bias.data.add_(ord(node) * 1e-6)

    optimizer.register_step_post_hook(add)
    for step in session.steps(STEPS):
        with step:
            step.backward(cross_entropy(model, DATA[step.indices]))
