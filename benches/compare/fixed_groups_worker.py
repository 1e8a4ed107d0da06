"""Worker of "DS(FT)": fixed expert-parallel groups; a group that loses a worker is dropped."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benches.compare.checkpointed import Checkpoints, complete, take
from benches.compare.expert_parallel import ExpertParallel
from benches.compare.gloo_group import GlooGroup
from benches.compare.group_seats import Holding, Seating, seat
from benches.compare.program import Program, main
from evermoe.demo.train import Reporter
from evermoe.errors import PeerLost

POLL_SECONDS = 0.02
"""Seconds between two checks of the controller's store."""


class Epochs:
    """Epochs of the controller, which sees all processes: a new epoch each time that the set of live workers changes.

    Args:
        address: `host:port` of the controller's store.
    """

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self.store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        self.number = 0

    def is_over(self) -> bool:
        """Whether a newer epoch has begun."""
        return self.store.check([f"epoch/{self.number + 1}"])

    def next(self, worker: int) -> list[int] | None:
        """Wait for a newer epoch with this worker, and return its live workers; None if the job is finished."""
        members: list[int] = []
        while worker not in members:
            if self.is_over():
                self.number += 1
                members = json.loads(self.store.get(f"epoch/{self.number}")) if not self.is_over() else []
            elif self.store.check(["finished"]):
                return None
            else:
                time.sleep(POLL_SECONDS)
        return members

    def gather(self, mine: Holding, members: list[int]) -> list[Holding] | None:
        """Gather a value of all members; None if the epoch ends first."""
        self.store.set(f"{self.number}/holds/{mine.worker}", json.dumps(asdict(mine)))
        for member in members:
            while not self.store.check([f"{self.number}/holds/{member}"]):
                if self.is_over():
                    return None
                time.sleep(POLL_SECONDS)
        return [Holding(**json.loads(self.store.get(f"{self.number}/holds/{member}"))) for member in members]


class Member:
    """A worker, from epoch to epoch."""

    def __init__(self, program: Program, reporter: Reporter) -> None:
        self._options, self._program, self._reporter = program.options, program, reporter
        self._epochs = Epochs(program.options.store)
        self._folder = Path(program.options.checkpoints)
        self._step = 0
        self._group: str | None = None
        self._everybody = GlooGroup()
        self._begin(program)

    def _begin(self, program: Program) -> None:
        """Take the first weights."""
        options = self._options
        self._program, self._step = program, 0
        self._parallel = ExpertParallel(program.model, program.optimizer, options.expert_parallel, options.hang_timeout)

    def run(self) -> None:
        """Train until all steps are taken."""
        while (members := self._epochs.next(self._options.worker)) is not None:
            saved = max(complete(self._folder), default=0)
            mine = Holding(self._options.worker, self._step, self._parallel.position, self._group, saved)
            holdings = self._epochs.gather(mine, members)
            if holdings is None:
                continue
            try:
                self._take_part(seat(holdings, self._options.expert_parallel), members)
            except (PeerLost, RuntimeError) as error:  # torch raises the latter where a peer dies while all connect
                reason = str(error).split("\n", 1)[0]
                self._reporter.write("connection_lost", {"step": self._step, "reason": reason})
                self._parallel.drop(reason)
                self._everybody.drop(reason)
            if dist.is_initialized():
                dist.destroy_process_group()
        self._parallel.drop("finished")

    def _take_part(self, seating: Seating, members: list[int]) -> None:
        worker = self._options.worker
        rank = seating.ranks.index(worker) if worker in seating.ranks else None
        self._group = None if rank is None else f"{self._epochs.number}/{rank // self._options.expert_parallel}"
        if seating.step == 0 and self._parallel.position is not None:
            self._begin(Program(self._options))
        store = dist.PrefixStore(str(self._epochs.number), self._epochs.store)
        limit = timedelta(seconds=self._options.hang_timeout)
        everybody = dist.PrefixStore("everybody", store)
        self._everybody.rebuild(everybody, members.index(worker), len(members), torch.device("cpu"), limit)
        self._move(seating, members, rank)
        if rank is None:
            self._reporter.write("idle", {"step": self._step})
            return
        world = len(seating.ranks)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("dcp", store), rank=rank, world_size=world, timeout=limit
        )
        checkpoints = Checkpoints(self._folder, self._options.checkpoint_interval, None)
        self._parallel.connect(store, rank, world)
        if seating.from_checkpoint:
            checkpoints.load(self._parallel.entries(), seating.step)
        self._step = seating.step
        self._parallel.set_step(self._step)
        source = "checkpoint" if seating.from_checkpoint else "peers" if worker in seating.sources else "own"
        self._reporter.write("resumed", {"step": self._step, "members": world, "source": source})
        self._train(checkpoints, rank, world)

    def _move(self, seating: Seating, members: list[int], rank: int | None) -> None:
        """Send state to workers that lack it, and receive what this worker lacks."""
        sends: list[Any] = []
        for receiver, giver in seating.sources.items():
            if giver == self._options.worker:
                sends += [(tensor.clone(), members.index(receiver)) for tensor in self._state()]
        receives: list[Any] = []
        if rank is not None:
            self._parallel.hold(rank % self._options.expert_parallel)
            source = seating.sources.get(self._options.worker)
            if source is not None:
                receives = [(tensor, members.index(source)) for tensor in self._state()]
                self._step = -1  # until everything has arrived
        self._everybody.exchange(sends, receives)

    def _state(self) -> list[torch.Tensor]:
        return [*self._parallel.tensors(experts=False), *self._parallel.tensors(experts=True)]

    def _train(self, checkpoints: Checkpoints, rank: int, world: int) -> None:
        while self._step < self._options.steps:
            notes = torch.tensor([float(rank == 0 and self._epochs.is_over())], dtype=torch.float64)
            take(self._program, self._reporter, self._parallel, self._step, rank, world, notes)
            self._step += 1
            checkpoints.save_if_due(self._step, self._parallel.entries())
            if notes[0]:
                return  # a worker has joined
        self._reporter.write("final", {"loss": self._program.held_out_loss()})
        checkpoints.wait()
        if rank == 0:
            self._epochs.store.set("finished", "1")


def work(program: Program, reporter: Reporter) -> None:
    """Train in a fixed group as long as it is complete."""
    reporter.write("ready", {"pid": os.getpid()})
    Member(program, reporter).run()


if __name__ == "__main__":
    main(__doc__, work)
