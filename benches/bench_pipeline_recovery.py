"""Seconds of a pipeline's step, and of the same step after a failure: repeated by all ranks, or only by the lost one.

    python benches/bench_pipeline_recovery.py [--rounds 3] [--stages 4] [--json PATH]

Each round is a job with localised recovery and one without, of real processes with 1F1B. The second stage kills itself
when it has computed all of a step, the worst moment; another process replaces it. Times are those of the first stage: a
step before the failure, from the loss until the ranks are connected again, and from then until the step is committed.
`passes` counts the forwards of that step that all other ranks have computed, over both attempts.
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
import uuid
from pathlib import Path

import torch
from torch import nn
from torch.distributed import pipelining

import evermoe
from common import Table
from evermoe.comm.lighthouse import start_lighthouse

STEPS, DIES_IN, VICTIM = 8, 5, 1
ROWS, MICROBATCHES, WIDTH, LAYERS = 256, 8, 512, 8
COLUMNS = {"localised": "10s", "step": "7.3f", "until connected": "16.2f", "step again": "11.3f", "passes": "7.0f"}


class Stage(nn.Module):
    """One stage of the model."""

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def train(rank, stages, job, localised, folder, is_victim):
    """Run one rank from its start to the end of the job."""
    torch.set_num_threads(1)
    module, found = Stage(rank), {}

    def build_schedule(session):
        example = torch.zeros(ROWS, WIDTH, requires_grad=True)
        part = pipelining.PipelineStage(
            module, rank, stages, torch.device("cpu"), input_args=(example,), output_args=(example,)
        )
        found["connected"] = time.perf_counter()
        return pipelining.Schedule1F1B(part, MICROBATCHES, loss_fn=session.loss_function(nn.functional.mse_loss))

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    membership = evermoe.Membership(node=f"n{rank}", **job)
    session = evermoe.PipelineSession(
        module, optimizer, build_schedule, stage=rank, stages=stages, membership=membership, localised=localised
    )
    for step in session.steps(STEPS):
        before, begun = module.forwards, time.perf_counter()
        with step:
            generator = torch.Generator().manual_seed(step.number)
            inputs, target = torch.randn(2, ROWS * MICROBATCHES, WIDTH, generator=generator)
            step.run(inputs, target=target)
            if is_victim and step.number == DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)
        if step.number == DIES_IN - 1:
            found["step"] = time.perf_counter() - begun
        elif step.number == DIES_IN:
            found["passes"] = found.get("passes", 0) + module.forwards - before
            if step.committed:
                found["again"] = time.perf_counter() - begun
            else:
                found["lost"] = time.perf_counter()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))


def measure(stages, localised):
    """Run one job. Return its row of the table."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["evermoe.pipeline.pipeline", "torchft.process_group", "torch._dynamo"])
    lighthouse = start_lighthouse(heartbeat_timeout=1.0, join_timeout=5.0)
    with tempfile.TemporaryDirectory(prefix="evermoe-bench-") as folder:
        memory = {"memory_dir": folder, "lighthouse": lighthouse.address(), "job": f"b{uuid.uuid4().hex[:8]}"}
        job = memory | {"hang_timeout": 60.0, "quorum_timeout": 120.0}

        def start(rank, is_victim=False):
            made = context.Process(target=train, args=(rank, stages, job, localised, folder, is_victim), daemon=True)
            made.start()
            return made

        ranks = [start(rank, rank == VICTIM) for rank in range(stages)]
        ranks[VICTIM].join()
        ranks[VICTIM] = start(VICTIM)
        for each in ranks:
            each.join()
            assert each.exitcode == 0
        others = [rank for rank in range(stages) if rank != VICTIM]
        found = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in others]
    lighthouse.shutdown()
    first, passes = found[0], sum(each["passes"] for each in found)
    row = {"localised": str(localised), "step": first["step"], "until connected": first["connected"] - first["lost"]}
    return row | {"step again": first["again"], "passes": passes}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    title = f"{arguments.stages} stages, {MICROBATCHES} microbatches; seconds, and forwards of the other ranks"
    table = Table(title, COLUMNS)
    for _ in range(arguments.rounds):
        for localised in (True, False):
            table.add(**measure(arguments.stages, localised))
    for localised in (True, False):
        rows = [row for row in table.rows if row["localised"] == str(localised)]
        medians = {name: statistics.median(row[name] for row in rows) for name in list(COLUMNS)[1:]}
        print(f"localised={localised}:", ", ".join(f"{name} {value:.3f}" for name, value in medians.items()))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table.rows, indent=2) + "\n")


if __name__ == "__main__":
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RUST_LOG": "warn"}
    main()
