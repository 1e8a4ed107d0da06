"""Training from periodic checkpoints of `torch.distributed.checkpoint.async_save`, the papers' "DS"."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benches.compare.expert_parallel import ExpertParallel
from benches.compare.program import Program
from evermoe.demo.train import Reporter


class Checkpoints:
    """Folder of checkpoints, written in the background by all ranks of a group; the newest two stay.

    Args:
        folder: folder that all ranks share.
        every: steps between two checkpoints.
        group: a separate group of the ranks that train, as its collectives run concurrently with those of training.
    """

    def __init__(self, folder: Path, every: int, group: Any) -> None:
        self._folder, self._every, self._group = folder, every, group
        self._pending: Future[Any] | None = None

    def save_if_due(self, step: int, entries: dict[str, Tensor]) -> None:
        """Begin a checkpoint when scheduled, after the previous one has ended; the state is copied before this
        returns."""
        if step % self._every:
            return
        self.wait()
        self._pending = dcp.async_save(  # type: ignore[assignment]
            {**entries, "step": torch.tensor(step)}, checkpoint_id=self._folder / name(step), process_group=self._group
        )

    def wait(self) -> None:
        """Wait for the checkpoint in progress, and remove all but the last two."""
        if self._pending is None:
            return
        self._pending.result()
        self._pending = None
        if dist.get_rank() == 0:
            for old in complete(self._folder)[:-2]:
                shutil.rmtree(self._folder / name(old))

    def load(self, entries: dict[str, Tensor], step: int) -> None:
        """Read a checkpoint into these tensors; collective."""
        dcp.load(
            {**entries, "step": torch.tensor(0)}, checkpoint_id=self._folder / name(step), process_group=self._group
        )


def name(step: int) -> str:
    """Return the folder of the checkpoint after this number of steps."""
    return f"step-{step:08d}"


def complete(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints, in order. DCP writes `.metadata` last."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/.metadata"))


def newest(folder: Path, store: dist.Store, rank: int) -> int:
    """Return the step of the newest checkpoint as rank 0 sees it, the same on all ranks; 0 if there is none."""
    if rank == 0:
        store.set("resume", str(max(complete(folder), default=0)))
    return int(store.get("resume"))


def train(program: Program, reporter: Reporter, store: dist.Store, rank: int, world: int, group: Any) -> None:
    """Train to the end from the newest checkpoint; collective over all ranks.

    Args:
        program: a newly created program.
        reporter: reporter of this worker.
        store: store with a prefix that no other set of ranks uses.
        rank: rank of this worker.
        world: number of ranks that train, a multiple of `--expert-parallel`.
        group: group of these ranks for checkpoints.

    Raises:
        PeerLost: a rank is lost.
    """
    options = program.options
    parallel = ExpertParallel(program.model, program.optimizer, options.expert_parallel, options.hang_timeout)
    parallel.hold(rank % options.expert_parallel)
    parallel.connect(store, rank, world)
    checkpoints = Checkpoints(Path(options.checkpoints), options.checkpoint_interval, group)
    step = newest(Path(options.checkpoints), store, rank)
    if step:
        checkpoints.load(parallel.entries(), step)
        parallel.set_step(step)
    reporter.write("resumed", {"step": step, "members": world})
    while step < options.steps:
        take(program, reporter, parallel, step, rank, world)
        step += 1
        checkpoints.save_if_due(step, parallel.entries())
    reporter.write("final", {"loss": program.held_out_loss()})
    checkpoints.wait()


def take(
    program: Program,
    reporter: Reporter,
    parallel: ExpertParallel,
    step: int,
    rank: int,
    world: int,
    notes: Tensor | None = None,
) -> None:
    """Take one step and report it; collective. `notes` are as for `ExpertParallel.step`."""
    share = program.share(step, rank, world)
    reporter.write("begin", {"step": step})

    def loss_of() -> Tensor:
        loss = program.loss(share)
        reporter.strike(step, "step")
        return loss

    mean = parallel.step(loss_of, share.weight, torch.zeros(0, dtype=torch.float64) if notes is None else notes)
    reporter.write("taken", {"step": step, "loss": mean, "members": world})
