"""One rank of a small pipeline run as a real process, which kills itself where its options say.

What happens is appended to a file, one JSON object a line, as in `worker.py`.
"""

from __future__ import annotations

import functools
import json
import os
import signal
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import evermoe
from evermoe._native import digest

ROWS, MICROBATCHES = 16, 4
STAGES, PEERS = 2, 2


@dataclass
class Options:
    name: str
    folder: str
    lighthouse: str
    rank: int
    steps: int = 12
    kill_in_step: int | None = None
    """Dies in the second microbatch of this step."""
    kill_in_copy: int | None = None
    """Dies when the first message of this version has been sent."""
    width: int = 96
    """Of the model."""
    work: int = 0
    """Multiplications of matrices in each forward."""
    trace: bool = False
    copies: dict[str, Any] = field(default_factory=dict)
    """Of `PipelineCopies`."""


class Stage(nn.Module):
    """A part of the model: the same on every rank that asks for it."""

    def __init__(self, index: int, width: int, work: int) -> None:
        super().__init__()
        torch.manual_seed(100 + index)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.norm = nn.LayerNorm(width)
        self.work = work
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        matrix = torch.full((256, 256), 1e-3)
        for _ in range(self.work):
            matrix = matrix @ matrix
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x)


class Killer(deque):
    """Copies that were sent; the first one of a marked version is the end of this process."""

    marked = False

    def append(self, sent: Any) -> None:
        super().append(sent)
        if self.marked:
            os.kill(os.getpid(), signal.SIGKILL)


def write(options: Options, event: str, **fields: Any) -> None:
    path = Path(options.folder) / f"{options.name}.{os.getpid()}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"event": event, **fields}) + "\n")


def connect(options: Options, copies: evermoe.PipelineCopies, module: nn.Module) -> tuple[Any, Any]:
    """torch's own groups of this epoch, and the schedule; the group of the data-parallel peers."""
    dist.init_process_group("gloo", store=copies.torch_store, rank=copies.rank, world_size=copies.size)
    peers = [dist.new_group([stage * PEERS + peer for peer in range(PEERS)]) for stage in range(STAGES)]
    chains = [dist.new_group([stage * PEERS + peer for stage in range(STAGES)]) for peer in range(PEERS)]
    stage, peer = divmod(options.rank, PEERS)
    example = torch.zeros(ROWS, options.width)
    part = pipelining.PipelineStage(
        module,
        stage,
        STAGES,
        torch.device("cpu"),
        input_args=(example,),
        output_args=(example,),
        group=chains[peer],
    )
    loss = functools.partial(nn.functional.mse_loss, reduction="mean")
    return pipelining.Schedule1F1B(part, MICROBATCHES, loss_fn=loss), peers[stage]


def run_step(options: Options, schedule: Any, peers: Any, module: Stage, step: int) -> float:
    """Forward, backward and the reduction over the data-parallel peers; the mean loss, on the last stage."""
    stage, peer = divmod(options.rank, PEERS)
    generator = torch.Generator().manual_seed(1000 * step + peer)
    inputs, target = torch.randn(2, ROWS * MICROBATCHES, options.width, generator=generator)
    losses: list[torch.Tensor] = []
    if stage == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=target, losses=losses)
    gradients = torch.cat([p.grad.flatten() for p in module.parameters()])
    dist.all_reduce(gradients, group=peers)
    start = 0
    for parameter in module.parameters():
        parameter.grad.copy_(gradients[start : start + parameter.numel()].view_as(parameter) / PEERS)
        start += parameter.numel()
    return float(torch.stack(losses).mean().detach()) if losses else 0.0


def digests(copies: evermoe.PipelineCopies) -> dict[str, int]:
    found = {}
    for name in copies.state.held():
        data = torch.empty(copies.state.by_name[name].nbytes, dtype=torch.uint8)
        copies.state.read(name, data)
        found[name] = digest(data.numpy())
    return found


def train(options: Options) -> None:
    stage, peer = divmod(options.rank, PEERS)
    module = Stage(stage, options.width, options.work)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    copies = evermoe.PipelineCopies(
        module,
        optimizer,
        stage=stage,
        stages=STAGES,
        data_parallel=peer,
        data_parallel_size=PEERS,
        lighthouse=options.lighthouse,
        **options.copies,
    )
    copies.courier.sent = killer = Killer(maxlen=4096)

    def mark(*_: Any) -> None:
        killer.marked = copies.step + 1 == options.kill_in_copy

    def die_in_step(module: nn.Module, inputs: Any) -> None:
        if step == options.kill_in_step and module.calls % MICROBATCHES == 1:
            write(options, "dies", step=step)
            os.kill(os.getpid(), signal.SIGKILL)

    module.register_forward_pre_hook(die_in_step)
    optimizer.register_step_post_hook(mark)
    step, schedule, peers = -1, None, None
    while step < options.steps:
        if schedule is None:
            step = copies.recover()
            outcome = copies.outcome
            write(options, "recovered", step=step, fetched=outcome.fetched_units, sources=dict(outcome.sources))
            module.calls = 0
        try:
            if schedule is None:
                schedule, peers = connect(options, copies, module)
            copies.begin()
            loss = run_step(options, schedule, peers, module, step)
            step = copies.commit()
            write(options, "step", step=step, loss=loss, plans=copies.pacing.plans, words=copies.pacing.words)
        except (evermoe.PeerLost, RuntimeError) as error:
            write(options, "lost", step=step, reason=str(error)[:300])
            schedule = peers = None
    compared, different = copies.verify()
    if options.trace:
        copies.write_trace(Path(options.folder) / f"{options.rank}.json")
    write(options, "done", step=step, compared=compared, different=different, digests=digests(copies))
    copies.close()
    dist.destroy_process_group()


def main(options: Options) -> None:
    """As a child of the tests' fork server: what is printed goes to a file."""
    log = os.open(Path(options.folder) / f"{options.name}.{os.getpid()}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    train(options)
