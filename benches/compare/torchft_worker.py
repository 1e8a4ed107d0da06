"""Worker of torchft's own recovery: one replica group each, healed live from a peer's checkpoint transport."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benches.compare.expert_parallel import clip
from benches.compare.program import MAX_GRAD_NORM, Program, main
from evermoe.demo.train import Reporter
from evermoe.session.gradients import norms

BEGIN = "begin"
"""File next to the events that exists once all first workers have started; torchft would begin with the first of
them."""


def work(program: Program, reporter: Reporter) -> None:
    """Train as torchft's `train_ddp.py` does, except that batches are divided among the participants.

    Gradients are averaged by `Manager.allreduce`, not in torchft's DistributedDataParallel: that of 0.2.0 ends the
    process with an AssertionError when an all-reduce of gloo fails, as `_ManagedWork.wait` then leaves no future.
    """
    from torchft.optim import OptimizerWrapper

    options = program.options
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=options.hang_timeout)
    manager = connect_manager(program.model, program.optimizer, store, options.store, options.worker, timeout)
    optimizer = OptimizerWrapper(manager, program.optimizer)
    reporter.write("ready", {"pid": os.getpid()})
    while not Path(options.events).with_name(BEGIN).exists():
        time.sleep(0.02)
    members = step = -1
    try:
        while manager.current_step() < options.steps:
            optimizer.zero_grad()
            before, step = step, manager.current_step()
            if members != (members := manager.num_participants()) or step > before + 1:
                reporter.write("resumed", {"step": step, "members": members})
            _take(program, reporter, manager, optimizer, step)
    finally:
        if manager.current_step() >= options.steps:
            reporter.write("final", {"loss": program.held_out_loss()})
        manager.shutdown(wait=False)


def connect_manager(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    store: dist.TCPStore,
    lighthouse: str,
    worker: int,
    timeout: timedelta,
    *,
    least: int = 1,
) -> Any:
    """Return the Manager of a replica group of one worker, which waits for `least` replica groups."""
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=least,
        use_async_quorum=False,  # a batch is divided among the participants, so they must be known first
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"worker_{worker}",
        hostname="127.0.0.1",
        init_sync=False,  # all have the weights of the same seed
    )


def _take(program: Program, reporter: Reporter, manager: Any, optimizer: Any, step: int) -> None:
    """Attempt a step once; the Manager decides whether it counts."""
    members = manager.num_participants()
    share = program.share(step, manager.participating_rank(), members)
    reporter.write("begin", {"step": step})
    loss = program.loss(share)
    reporter.strike(step, "step")
    part = loss * (share.weight * members)  # the Manager averages over members
    part.backward()
    gradients = [parameter.grad for parameter in program.model.parameters() if parameter.grad is not None]
    mean = _average(manager, [*gradients, part.detach().reshape(1)])
    clip(gradients, float(norms(gradients).square().sum() ** 0.5), MAX_GRAD_NORM)
    optimizer.step()
    if manager.current_step() > step:
        reporter.write("taken", {"step": step, "loss": mean, "members": members})


def _average(manager: Any, tensors: list[Tensor]) -> float:
    """Average tensors over the participants, in place and in one bucket; return the last element.

    After a failure the Manager does not count the step.
    """
    bucket = torch.cat([tensor.reshape(-1) for tensor in tensors])
    manager.allreduce(bucket).wait()
    for tensor, part in zip(tensors, bucket.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
    return float(bucket[-1])


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main(__doc__, work)
