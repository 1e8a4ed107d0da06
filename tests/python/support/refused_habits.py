"""Scripts of workers in a session that are refused, or warned of."""

from __future__ import annotations

import copy
import warnings

import torch

import evermoe
from support.flat_options import grouped
from support.habits import DATA, SAMPLES, STEPS, VOCABULARY, WIDTH, Model, adamw, cross_entropy


def as_many_forwards_as_samples(write, node, options):
    """Accumulates over its own samples one by one, as many as it has."""
    model = Model()
    session = evermoe.Session(model, adamw(model), evermoe.ElasticSampler(SAMPLES, 10), **grouped(options, node=node))
    for step in session.steps(STEPS):
        with step:
            for index in step.indices:
                step.backward(cross_entropy(model, DATA[index : index + 1]) / len(step.indices))


def one_backward_less(write, node, options):
    """All run two forwards, but one member backpropagates only one of them."""
    model = Model()
    session = evermoe.Session(model, adamw(model), evermoe.ElasticSampler(SAMPLES, 12), **grouped(options, node=node))
    for step in session.steps(STEPS):
        with step:
            losses = [cross_entropy(model, DATA[step.indices]) for _ in range(2)]
            for loss in losses[: 1 if node == "a" else 2]:
                step.backward(loss)


def counts_on_one(write, node, options):
    """One member gives a mean, the others sums with their counts."""
    model = Model()
    session = evermoe.Session(model, adamw(model), evermoe.ElasticSampler(SAMPLES, 12), **grouped(options, node=node))
    for step in session.steps(STEPS):
        with step:
            count = None if node == "a" else len(step.indices)
            step.backward(cross_entropy(model, DATA[step.indices]), count=count)


def noisy_optimizer(write, node, options):
    """An optimizer with a hook that changes the weights by a number of its member's own."""
    model = Model()
    optimizer = adamw(model)
    session = evermoe.Session(model, optimizer, evermoe.ElasticSampler(SAMPLES, 12), **grouped(options, node=node))
    optimizer.register_step_post_hook(lambda *_: model.head.bias.data.add_(ord(node) * 1e-6))
    for step in session.steps(STEPS):
        with step:
            step.backward(cross_entropy(model, DATA[step.indices]))


class SomeSteps(torch.optim.SGD):
    """Steps every second parameter that is no matrix of experts, other ones on each member, as an own ZeRO would."""

    first = 0

    def step(self, closure=None):
        kept = {}
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.shape[0] in (VOCABULARY, WIDTH)][self.first :: 2]:
                kept[p], p.grad = p.grad, None
        super().step(closure)
        for p, gradient in kept.items():
            p.grad = gradient


def own_sharded_optimizer(write, node, options):
    """An optimizer of the script's own that leaves some parameters to another member."""
    model = Model()
    optimizer = SomeSteps(model.parameters(), lr=0.1)
    optimizer.first = "ab".index(node)
    session = evermoe.Session(model, optimizer, evermoe.ElasticSampler(SAMPLES, 12), **grouped(options, node=node))
    for step in session.steps(STEPS):
        with step:
            step.backward(cross_entropy(model, DATA[step.indices]))


def own_buffer(write, node, options):
    """Counts samples in a buffer of the member, and in one that says so; clips its part of the gradient."""
    model = Model()
    model.register_buffer("seen", torch.zeros(4))
    model.register_buffer("scratch", torch.zeros(4), persistent=False)
    session = evermoe.Session(model, adamw(model), evermoe.ElasticSampler(SAMPLES, 10), **grouped(options, node=node))
    for step in session.steps(2):
        with warnings.catch_warnings(record=True) as clipped:
            warnings.simplefilter("always")
            with step:
                model.seen[session.group.rank] += 1
                model.scratch[session.group.rank] += 1
                step.backward(cross_entropy(model, DATA[step.indices]))
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step.number == 0:
            write("clipped", warnings=[str(each.message) for each in clipped])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.state_dict()
            write("warned", warnings=[str(each.message) for each in caught])
            for duplicate in (torch.optim.swa_utils.AveragedModel, copy.deepcopy):
                try:
                    duplicate(model)
                except evermoe.errors.UnsupportedState as error:
                    write("refused", message=str(error))
