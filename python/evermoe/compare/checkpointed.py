"""Training that goes on from periodic checkpoints: `torch.distributed.checkpoint.async_save`, the papers' "DS"."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from evermoe.compare.expert_parallel import ExpertParallel
from evermoe.compare.program import Program
from evermoe.demo.train import Reporter


class Checkpoints:
    """A folder of checkpoints, written beside training by all ranks of a group; the newest two stay.

    Args:
        folder: that all ranks share.
        every: steps between two.
        group: of the ranks that train, for this alone: its collectives run beside those of training.
    """

    def __init__(self, folder: Path, every: int, group: Any) -> None:
        self._folder, self._every, self._group = folder, every, group
        self._pending: Future[Any] | None = None

    def save_if_due(self, step: int, entries: dict[str, Tensor]) -> None:
        """Begins to save, after the one before has ended; the state is copied before this returns."""
        if step % self._every:
            return
        self.wait()
        self._pending = dcp.async_save(  # type: ignore[assignment]
            {**entries, "step": torch.tensor(step)}, checkpoint_id=self._folder / name(step), process_group=self._group
        )

    def wait(self) -> None:
        """Waits for the checkpoint that is being written, and removes those of before the last two."""
        if self._pending is None:
            return
        self._pending.result()
        self._pending = None
        if dist.get_rank() == 0:
            for old in complete(self._folder)[:-2]:
                shutil.rmtree(self._folder / name(old))

    def load(self, entries: dict[str, Tensor], step: int) -> None:
        """Reads a checkpoint into these tensors; collective."""
        dcp.load(
            {**entries, "step": torch.tensor(0)}, checkpoint_id=self._folder / name(step), process_group=self._group
        )


def name(step: int) -> str:
    """Folder of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def complete(folder: Path) -> list[int]:
    """Steps of the checkpoints that were written completely, in order: DCP writes `.metadata` last."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/.metadata"))


def newest(folder: Path, store: dist.Store, rank: int) -> int:
    """The step of the newest checkpoint as rank 0 sees it, the same on all ranks; 0 where there is none."""
    if rank == 0:
        store.set("resume", str(max(complete(folder), default=0)))
    return int(store.get("resume"))


def train(program: Program, reporter: Reporter, store: dist.Store, rank: int, world: int, group: Any) -> None:
    """Trains to the end from the newest checkpoint, on ranks that all are here; collective.

    Args:
        program: just made.
        reporter: of this worker.
        store: holds a prefix that no other set of ranks uses.
        rank: of this worker.
        world: ranks that train, a multiple of `--expert-parallel`.
        group: of these, for checkpoints.

    Raises:
        PeerLost: a rank is gone.
    """
    options = program.options
    parallel = ExpertParallel(program.model, program.optimizer, options.expert_parallel, options.hang_timeout)
    parallel.hold(rank % options.expert_parallel)
    parallel.connect(store, rank, world)
    checkpoints = Checkpoints(Path(options.checkpoint_dir), options.checkpoint_interval, group)
    step = newest(Path(options.checkpoint_dir), store, rank)
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
    """Takes one step and reports it; collective. `notes`: as for `ExpertParallel.step`."""
    share = program.share(step, rank, world)
    reporter.write("begin", {"step": step})

    def loss_of() -> Tensor:
        loss = program.loss(share)
        reporter.strike(step, "step")
        return loss

    mean = parallel.step(loss_of, share.weight, torch.zeros(0, dtype=torch.float64) if notes is None else notes)
    reporter.write("taken", {"step": step, "loss": mean, "members": world})
