"""The overhead of the profiler: a training step with and without it, in turns in one run.

Steps with and without the profiler alternate, and a ratio is the median over the rounds, so that a slow moment affects
both. The steps are small, as the cost of a span does not depend on its length. For longer steps, the value that counts
is `cpu us per span`: the training thread's own processor time per span.
"""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

import evermoe
from common import Table, parse, parser, run_ranks
from evermoe.profile import Profiler

BLOCK = 10
"""Steps per block."""


def main():
    made = parser(__doc__, seconds=6.0, threads=(1,))
    made.add_argument("--hidden", type=int, default=256)
    made.add_argument("--microbatches", type=int, default=4)
    arguments = parse(made)
    columns = {
        "loop": "<22",
        "ranks": "5d",
        "step us": "10.0f",
        "spans": "6d",
        "ratio": "7.3f",
        "cpu us per span": "15.1f",
    }
    table = Table("A step with the profiler, compared with the same step without it", columns)
    table.add(loop="MoE layer", ranks=1, **measure(*moe_step(arguments)))
    if arguments.device == "cpu":
        for ranks in (2, 4):
            first, *_ = run_ranks(pipeline, ranks, arguments, ranks)
            table.add(loop="pipeline, 1F1B, gloo", ranks=ranks, **first)
    table.write(arguments)


def measure(step, seconds, model=None, agree=lambda more: more):
    """Return the median time of a step, its spans, and the ratio with the profiler to without."""
    plain, profiled = [], []
    profiler = Profiler(model)
    block(step)
    end = time.perf_counter() + seconds
    while agree(time.perf_counter() < end) or len(plain) < 5:
        plain.append(block(step))
        with profiler:
            profiled.append(block(step, profiler.step))
    spans = len(profiler.recorded[-1].step.spans)
    ratio = statistics.median(with_it / without for (without, _), (with_it, _) in zip(plain, profiled, strict=True))
    cpu = statistics.median(with_it - without for (_, without), (_, with_it) in zip(plain, profiled, strict=True))
    micros = statistics.median(wall for wall, _ in plain) * 1e6
    return {"step us": micros, "spans": spans, "ratio": ratio, "cpu us per span": cpu / spans * 1e6}


def block(step, after=lambda: None):
    """Return the median seconds of a step, in wall-clock time and in this thread's processor time."""
    wall, cpu = [], []
    for _ in range(BLOCK):
        start, used = time.perf_counter(), time.thread_time()
        step()
        after()
        wall.append(time.perf_counter() - start)
        cpu.append(time.thread_time() - used)
    return statistics.median(wall), statistics.median(cpu)


def moe_step(arguments):
    """Return a step of one MoE layer and its optimizer."""
    torch.set_num_threads(arguments.threads[0])
    torch.manual_seed(0)
    layer = evermoe.MoE(arguments.hidden, 2 * arguments.hidden, num_experts=8, device=arguments.device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    x = torch.randn(512, arguments.hidden, device=arguments.device)

    def step():
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
        if x.is_cuda:
            torch.cuda.synchronize()

    return step, arguments.seconds, layer


def pipeline(rank, folder, arguments, ranks):
    """Run a stage of a pipeline. Return its figures."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    module = nn.Sequential(nn.Linear(arguments.hidden, arguments.hidden), nn.Tanh())
    rows = torch.randn(64 * arguments.microbatches, arguments.hidden)
    example = rows[:64]
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"), input_args=(example,), output_args=(example,))
    schedule = Schedule1F1B(stage, arguments.microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        schedule.step(*([rows] if rank == 0 else []), **({"target": rows} if rank == ranks - 1 else {}))
        optimizer.step()

    def agree(more):
        votes = torch.tensor([int(more)])
        dist.broadcast(votes, 0)
        return bool(votes)

    found = measure(step, arguments.seconds, agree=agree)
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    main()
