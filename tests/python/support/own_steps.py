"""Scripts of workers that do in a step what only they know of: they draw random numbers, or change gradients."""

from __future__ import annotations

import os
import random
import signal

import numpy as np
import torch

import evermoe
from support.habits import DATA, DIES_IN, SAMPLES, STEPS, Model, adamw, cross_entropy


def drawing_steps(write, node, options):
    """Draws numbers in each attempt at a step; the last worker dies in one."""
    model = Model()
    session = evermoe.Session(model, adamw(model), evermoe.ElasticSampler(SAMPLES, 12), node=node, **options)
    for step in session.steps(STEPS):
        with step:
            numbers = [random.random(), np.random.rand(), torch.rand(()).item()]
            write("drew", step=step.number, rank=session.group.rank, numbers=numbers)
            loss = cross_entropy(model, DATA[step.indices])
            if session.group.rank == 2 and step.number == DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(loss)
