"""The profiler on real pipeline schedules of torch, over gloo."""

from __future__ import annotations

import functools
import json
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evermoe.profile import Profiler
from ranks import run_ranks

HIDDEN, MICROBATCHES, STEPS = 64, 4, 6


def part(index, layers):
    """A stage of the model: the same on every rank that asks for it."""
    generator = torch.Generator().manual_seed(index)
    modules = []
    for _ in range(layers):
        linear = nn.Linear(HIDDEN, HIDDEN)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.uniform_(-0.1, 0.1, generator=generator)
        modules += [linear, nn.Tanh()]
    return nn.Sequential(*modules)


def schedule_of(kind, rank, size):
    """The schedule, its stages' modules on this rank, and whether this rank feeds it and whether it has the loss."""
    from torch.distributed import pipelining as pp

    # ZBV folds the pipeline into a V: with 2 ranks, rank 0 has the stages 0 and 3
    per_rank = 1 if kind == "Schedule1F1B" else 2
    count = size * per_rank
    mine = [rank, count - 1 - rank] if "ZBV" in kind else list(range(rank, count, size))
    modules = {index: part(index, 2) for index in mine}
    example = torch.zeros(8, HIDDEN)
    stages = [
        pp.PipelineStage(modules[i], i, count, torch.device("cpu"), input_args=(example,), output_args=(example,))
        for i in mine
    ]
    loss = functools.partial(nn.functional.mse_loss, reduction="sum")
    schedule = getattr(pp, kind)(stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=loss)
    return schedule, modules, 0 in mine, count - 1 in mine


def train(kind, rank, size, steps, profiler=None):
    """Losses and gradients of some steps."""
    schedule, modules, first, last = schedule_of(kind, rank, size)
    optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=0.01)
    found = []
    for number in (profiler.steps if profiler else iter)(range(steps)):
        generator = torch.Generator().manual_seed(100 + number)
        inputs, target = torch.randn(2, 8 * MICROBATCHES, HIDDEN, generator=generator)
        losses = []
        optimizer.zero_grad()
        schedule.step(*([inputs] if first else []), **({"target": target, "losses": losses} if last else {}))
        found += [torch.stack(losses).detach()] if last else []
        found += [p.grad.clone() for module in modules.values() for p in module.parameters()]
        optimizer.step()
    return found


def wrapped():
    """What the profiler wraps, as it is now."""
    from torch.distributed.pipelining.stage import _PipelineStageBase as Stage

    methods = [getattr(dist.ProcessGroup, name) for name in ("send", "recv", "allreduce", "barrier")]
    return [*methods, dist.Work.wait, torch.autograd.backward, torch.autograd.grad, *map(vars(Stage).get, vars(Stage))]


def pipeline(group, kind, folder):
    rank, size = group.rank, group.size
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    try:
        plain = train(kind, rank, size, STEPS)
        before = wrapped()
        with Profiler() as profiler:
            profiled = train(kind, rank, size, STEPS, profiler)
            during = wrapped()
        assert len(plain) == len(profiled) > 0
        assert all(torch.equal(a, b) for a, b in zip(plain, profiled, strict=True))
        assert before == wrapped() != during
        gathered = profiler.gather_windows()
        assert profiler.unfinished == 0
        dist.barrier()
    finally:
        dist.destroy_process_group()
    spans = [[[s._asdict() for s in step.spans] for step in steps] for steps in gathered.steps]
    return json.dumps(
        {
            "local": [[s._asdict() for s in r.step.spans] for r in profiler.recorded],
            "spans": spans,
            "starts": gathered.starts,
            "seconds": [[step.seconds for step in steps] for steps in gathered.steps],
            "windows": [[w._asdict() for w in windows.windows] for windows in gathered.windows],
            "evidence": [windows.evidence for windows in gathered.windows],
            "errors": gathered.clock_errors,
            "trace": gathered.trace(),
        }
    )


KINDS = [
    ("Schedule1F1B", 2),
    ("Schedule1F1B", 4),
    ("ScheduleInterleaved1F1B", 2),
    ("ScheduleInterleavedZeroBubble", 2),
]


@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_pipeline(tmp_path, kind, size):
    found = [json.loads(each) for each in run_ranks(tmp_path, size, pipeline, kind, str(tmp_path))]
    os.makedirs("/tmp/pp", exist_ok=True)
    json.dump(found, open(f"/tmp/pp/{kind}{size}.json", "w"))
