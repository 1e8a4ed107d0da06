"""The cost of a session's step on a GPU, counted behind the stand-ins."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import evermoe
from evermoe.comm.nccl import Nccl
from support import stand_in
from support.flat_options import grouped
from support.worker import VOCABULARY, Model

SAMPLES, BATCH = 24, 8
STEADY = 6
"""Steps after which one costs as much as the other."""
STEPS = STEADY + 4


class Costs:
    """Counts calls of this process by phase, and by whether the training thread or another one makes them."""

    def __init__(self) -> None:
        self.phase = ""
        self.found: dict[str, Counter[str]] = {}
        self.names: dict[str, Counter[str]] = {}
        self._kernels = self._memory = 0
        stand_in.on_launch = lambda name: self.note("launches", name)
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("_local_scalar_dense", self._item, "CUDA", allow_override=True)
        self._count(torch.cuda.Event, "record", "events")
        self._count(torch.cuda.Event, "synchronize", "waits")
        self._count(torch.cuda.Stream, "synchronize", "waits")
        for name in ("all_reduce", "all_gather", "all_to_all"):
            self._count(Nccl, name, "collectives")

    def note(self, what: str, name: str) -> None:
        """Count a call."""
        if not self.phase:
            return
        thread = threading.current_thread().name
        where = f"{what} of other threads" if thread.startswith("evermoe") else what
        if name.endswith("that waits"):
            what, where = "waits", where.replace("launches", "waits")
        self.found.setdefault(self.phase, Counter())[where] += 1
        self.names.setdefault(f"{self.phase}: {where}", Counter())[name] += 1

    def begin(self, phase: str) -> None:
        """Begin a phase; "" counts nothing."""
        kernels, memory = stand_in.DRIVER.fake_driver_launches(), self._allocations()
        if self.phase:
            counted = self.found.setdefault(self.phase, Counter())
            counted["launches"] += kernels - self._kernels
            counted["allocations"] += memory - self._memory
            self.names.setdefault(f"{self.phase}: launches", Counter())["evermoe's kernels"] += kernels - self._kernels
        self.phase, self._kernels, self._memory = phase, kernels, memory

    @staticmethod
    def _allocations() -> int:
        return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))

    def _count(self, owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.note(what, f"{owner.__name__}.{name}")
            return original(*args, **kwargs)

        setattr(owner, name, call)

    def _item(self, tensor: torch.Tensor) -> Any:
        self.note("launches", "item that waits")
        stand_in.wait([tensor])
        return stand_in.on_cpu(tensor).item()


def data() -> torch.Tensor:
    """Tokens on the GPU, int64 `[SAMPLES, 9]`."""
    return torch.randint(0, VOCABULARY, (SAMPLES, 9), generator=torch.Generator().manual_seed(1)).cuda()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in bfloat16 and its optimizer."""
    model = Model().to("cuda", torch.bfloat16)
    return model, evermoe.optim.AdamW(model.parameters(), lr=1e-3)


def plain(write: Callable[..., None], tokens: torch.Tensor, costs: Costs) -> None:
    """Steps without a session."""
    model, optimizer = make()
    for number in range(4):
        costs.begin("forward" if number == 3 else "")
        loss = model(tokens[:BATCH])
        costs.begin("backward" if number == 3 else "")
        loss.backward()
        costs.begin("end" if number == 3 else "")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    costs.begin("")
    write("plain", costs=costs.found, names=costs.names)
    costs.found, costs.names = {}, {}


def session_steps(
    write: Callable[..., None], environment: dict[str, dict[str, str]], node: str, options: dict[str, Any]
) -> None:
    """Steps in a session; writes the costs of each from `STEADY` on."""
    os.environ |= environment[node]
    tokens, costs = data(), Costs()
    plain(write, tokens, costs)
    model, optimizer = make()
    sampler = evermoe.ElasticSampler(SAMPLES, BATCH)
    session = evermoe.Session(model, optimizer, sampler, **grouped(options | {"max_grad_norm": 1.0}, node=node))
    for step in session.steps(STEPS):
        with counted(costs, "forward", step.number), step as batch:
            loss = model(tokens[batch])
            costs.begin("backward" if costs.phase else "")
            step.backward(loss)
            costs.begin("end" if costs.phase else "")
        write("step", step=step.number, committed=step.committed, costs=costs.found, names=costs.names)
        costs.found, costs.names = {}, {}
        costs.begin("next" if step.number >= STEADY else "")
    costs.begin("")


@contextmanager
def counted(costs: Costs, phase: str, number: int) -> Iterator[None]:
    """Count from a phase on."""
    costs.begin(phase if number >= STEADY else "")
    yield
    costs.begin("")
