"""A step of islands ÷ a step of the same model under FSDP2 alone, and where a session's time goes.

    python benches/bench_islands.py [--islands 2] [--ranks 2] [--rounds 5] [--steps 40] [--json PATH]

`alone` is one world of all processes, without a session: FSDP2 as HSDP, whose replicas are the islands, torch's AdamW,
and experts on one process each, whose exchange is that of `evermoe.Experts`. `islands` is a session with a mesh for
each island, the preset `auto`. Complete runs of both take turns; the first steps of each are left out.

Phases are those of the session's events on rank 0: `compute` is forward and backward with the exchanges of experts and
FSDP2's collectives, `reduce` sums shards over islands and experts over their hosts, `checks` is the rest until the
vote, `vote` the vote, `update` the optimizer's step and `copies` what follows it.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import uuid
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import evermoe
from evermoe.comm.group import Group
from evermoe.comm.lighthouse import start_lighthouse

SKIPPED = 10
"""Steps at the start that are left out."""
PHASES = {"begin": "compute", "reduce": "reduce", "vote": "vote", "update": "update", "copy": "copies"}
"""Phase that begins with an event."""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.moe = evermoe.MoE(width, width, num_experts=8)

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return x + self.moe(x)


def build(options, mesh):
    """Return the model, which FSDP2 divides over a mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(options.width) for _ in range(options.layers)))
    experts = {block.moe.experts.weights for block in model}
    for module in (*model, model):
        fully_shard(module, mesh=mesh, ignored_params=experts)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def loss_of(model, x):
    return (model(x) - x.sin()).square().mean()


def train_alone(options, rank, folder, _):
    """Train in one process of a single world; return the seconds of its steps."""
    size = options.islands * options.ranks
    store = dist.FileStore(f"{folder}/world", size)
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", store), rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (options.islands, options.ranks), mesh_dim_names=("dp_replicate", "dp_shard"))
    model, group = build(options, mesh), Group()
    group.rebuild(dist.PrefixStore("experts", store), rank, size, torch.device("cpu"), timedelta(seconds=60))
    for block in model:
        spread(block.moe.experts, group)
    data = draw_data(options)
    dense = [p for p in model.parameters() if hasattr(p, "placements")]
    optimizer = torch.optim.AdamW([{"params": dense}, {"params": [b.moe.experts.weights for b in model]}], fused=True)
    sampler, seconds = evermoe.ElasticSampler(len(data), options.batch), []
    for _ in range(options.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        share = sampler.share(rank, size)
        (loss_of(model, data[share.indices]) * share.weight).backward()
        optimizer.step()
        sampler.advance()
        seconds.append(time.perf_counter() - began)
    return seconds[SKIPPED:], {}


def spread(layer, group):
    """Leave each rank an equal part of a layer's experts."""
    layer.group, experts = group, np.arange(layer.num_experts)
    layer.matrix_RE = np.array([experts % group.size == rank for rank in range(group.size)], np.int64)
    layer.ids = experts[group.rank :: group.size].tolist()
    layer.weights = nn.Parameter(layer.weights[layer.ids].detach().clone())


def train_islands(options, rank, folder, lighthouse):
    """Train in one process of an island; return the seconds of its steps, and of the phases."""
    island, position = divmod(rank, options.ranks)
    store = dist.FileStore(f"{folder}/island-{island}", options.ranks)
    dist.init_process_group("gloo", store=store, rank=position, world_size=options.ranks)
    mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("dp",))
    model, data = build(options, mesh), draw_data(options)
    phases, latest = {name: [] for name in PHASES.values()}, [None, 0.0]

    def note(event):
        now = time.perf_counter()
        if event.name in PHASES:
            if latest[0] is not None:
                phases[latest[0]].append(now - latest[1])
            latest[:] = PHASES[event.name], now

    session = evermoe.Session(
        model,
        torch.optim.AdamW(model.parameters(), fused=True),
        evermoe.ElasticSampler(len(data), options.batch),
        mesh=mesh,
        membership=evermoe.Membership(
            lighthouse=lighthouse,
            job=Path(folder).name,
            node=f"node-{island}",
            members=options.islands * options.ranks,
            memory_dir=folder,
        ),
        on_event=note,
    )
    seconds, began = [], time.perf_counter()
    for step in session.steps(options.steps):
        with step as indices:
            step.backward(loss_of(model, data[indices]))
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
    return seconds[SKIPPED:], {name: statistics.median(each[SKIPPED:]) for name, each in phases.items()}


def draw_data(options):
    return torch.randn(1024, options.width, generator=torch.Generator().manual_seed(1))


def work(train, options, rank, folder, lighthouse):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    seconds, phases = train(options, rank, folder, lighthouse)
    Path(folder, f"{rank}.json").write_text(json.dumps([statistics.median(seconds), phases]))
    os._exit(0)


def run(train, options, lighthouse):
    """Run a job; return the median of rank 0's steps, and its phases."""
    with tempfile.TemporaryDirectory(prefix=f"islands-{uuid.uuid4().hex[:8]}") as folder:
        context = multiprocessing.get_context("spawn")
        ranks = range(options.islands * options.ranks)
        processes = [context.Process(target=work, args=(train, options, rank, folder, lighthouse)) for rank in ranks]
        for each in processes:
            each.start()
        for each in processes:
            each.join()
        if any(each.exitcode for each in processes):
            raise SystemExit(f"exit codes {[each.exitcode for each in processes]}")
        return json.loads(Path(folder, "0.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in {"islands": 2, "ranks": 2, "width": 256, "layers": 3, "batch": 512, "steps": 40}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs (%(default)s)")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    lighthouse = start_lighthouse(heartbeat_timeout=1, join_timeout=30)
    ratios, phases = [], []
    try:
        for number in range(options.rounds):
            order = (train_alone, train_islands)[:: 1 if number % 2 else -1]
            found = {train: run(train, options, lighthouse.address()) for train in order}
            (alone, _), (islands, by_phase) = found[train_alone], found[train_islands]
            ratios.append(islands / alone)
            phases.append({name: seconds / islands for name, seconds in by_phase.items()})
            print(f"alone {1e3 * alone:.1f} ms, islands {1e3 * islands:.1f} ms, ratio {ratios[-1]:.3f}", flush=True)
    finally:
        lighthouse.shutdown()
    shares = {name: statistics.median(each[name] for each in phases) for name in PHASES.values()}
    print(f"islands ÷ alone: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    print("phases ÷ a step of islands: " + ", ".join(f"{name} {share:.3f}" for name, share in shares.items()))
    if options.json:
        Path(options.json).write_text(json.dumps({"ratios": ratios, "phases": phases}, indent=2) + "\n")


if __name__ == "__main__":
    main()
