"""Worker of NVIDIA's resiliency extension, which restarts the training function in the remaining processes."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

import torch.distributed as dist

from benches.compare.checkpointed import train
from benches.compare.program import Program, main
from evermoe.demo.train import Reporter


def work(program: Program, reporter: Reporter) -> None:
    """Train under in-process restart, as in the extension's usage guide, from the newest checkpoint."""
    from nvidia_resiliency_ext import inprocess

    options = program.options
    host, port = options.store.rsplit(":", 1)
    groups = inprocess.rank_assignment.ActiveWorldSizeDivisibleBy(options.expert_parallel)
    attempts = itertools.count()

    def run() -> None:
        prefix = f"attempt-{next(attempts)}"
        server = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        store = dist.PrefixStore(prefix, server)
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=dist.PrefixStore("dcp", store), rank=rank, world_size=world)
        train(Program(options), reporter, store, rank, world, None)
        dist.destroy_process_group()

    reporter.write("ready", {"pid": os.getpid()})
    inprocess.Wrapper(
        store_kwargs={"host_name": host, "port": int(port), "wait_for_workers": False},
        rank_assignment=inprocess.Compose(groups, inprocess.rank_assignment.ShiftRanks()),
        heartbeat_timeout=timedelta(seconds=5),
    )(run)()


if __name__ == "__main__":
    main(__doc__, work)
