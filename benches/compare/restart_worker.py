"""Worker of "DS": if one dies, torchrun restarts it and all others."""

from __future__ import annotations

import os

import torch.distributed as dist

from benches.compare.checkpointed import train
from benches.compare.program import Program, main
from evermoe.demo.train import Reporter


def work(program: Program, reporter: Reporter) -> None:
    """Train from the newest checkpoint; workers that do not fill an expert-parallel group wait until the set
    changes."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    used = world // program.options.expert_parallel * program.options.expert_parallel
    saving = dist.new_group(list(range(used)))
    reporter.write("ready", {"pid": os.getpid()})
    if rank < used:
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, wait_for_workers=False)
        train(program, reporter, dist.PrefixStore("train", store), rank, used, saving)
    dist.barrier()  # fails when one of the others does
    dist.destroy_process_group()


if __name__ == "__main__":
    main(__doc__, work)
