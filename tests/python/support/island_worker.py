"""One process of an island, as a real process: the protocol and the groups of members, around a state of a few numbers.

The state of a position is the list of the sums that its processes have formed, one for each step.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from evermoe._native import VersionSchedule
from evermoe.comm.gather import gather_json
from evermoe.comm.island import Island
from evermoe.comm.membership import MembershipManager
from evermoe.comm.messages import Identity
from evermoe.comm.vote import Ballot
from evermoe.config.membership import Membership
from evermoe.errors import PeerLost
from evermoe.session.commands import Driver, Event
from evermoe.session.protocol import CommitProtocol
from support.harness import Job, Worker


class Options(NamedTuple):
    """The place of a process, and its job."""

    name: str
    folder: str
    lighthouse: str
    island: Island
    job: str
    members: int
    steps: int


class Shards(Driver):
    """The state of one position."""

    def __init__(self, membership: MembershipManager, write: Any) -> None:
        self._membership, self._write = membership, write
        self._schedule = VersionSchedule(0)
        self.sums: list[float] = []
        self.found = 0.0
        """The sum of the current step."""

    def lag(self, step: int) -> int:
        return self._schedule.lag(step)

    def agreeing(self) -> None:
        self._write("phase", phase="agree")

    def take(self, before: int, after: int, sums: Ballot, *, is_recalled: bool) -> None:
        self.sums.append(self.found)

    def commit(self, step: int) -> None:
        self._write("committed", step=step)

    def restore(self, version: int, *, established: bool, saw_progress: bool) -> Event:
        everyone, island = self._membership.everyone, self._membership.island
        assert island is not None
        held = gather_json(everyone, [established, version, self.sums])
        newest = max(version for _, version, _ in held)
        [self.sums, *others] = [
            held[rank][2] for rank in island.position_ranks(everyone.size) if held[rank][1] == newest
        ]
        assert all(each == self.sums for each in others)
        return {"event": "restored", "version": newest, "is_stale": False}

    def protect(self, version: int, generation: int, *, waits: bool) -> Event:
        return {"event": "protected", "is_whole": True}

    def resume(self, version: int) -> None:
        islands = [each["island"]["name"] for each in self._membership.members.values()]
        place = self._membership.trainer_group.rank, self._membership.groups.position.size
        self._write("recovered", islands=islands, place=place, step=len(self.sums))

    def units_lost(self) -> NoReturn:
        raise AssertionError("this state is never lost")


def main(options: Options) -> None:
    """Train, as a child of the tests' fork server; what is printed goes to a file."""
    folder = Path(options.folder)
    log = os.open(folder / f"{options.name}.{os.getpid()}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    events = (folder / f"{options.name}.{os.getpid()}.jsonl").open("a", buffering=1)

    def write(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event} | fields) + "\n")

    joining = Membership(lighthouse=options.lighthouse, job=options.job, members=options.members)
    membership = MembershipManager(
        joining,
        lighthouse=options.lighthouse,
        identity=Identity(options.job, "layout"),
        node=options.island.name,
        device=torch.device("cpu"),
        island=options.island,
    )
    state = Shards(membership, write)
    on_record = lambda said, commands: write("protocol", said=said, commands=commands)  # noqa: E731
    protocol = CommitProtocol(state, membership, members=options.members, join_interval=1, on_record=on_record)
    try:
        while True:
            protocol.look(options.steps)
            if protocol.is_over:
                break
            write("gate", step=protocol.step)
            while int((folder / "gate").read_text()) <= protocol.step:
                time.sleep(0.01)
            try:
                mine = torch.tensor([1.0 + options.island.position])
                state.found = float(membership.groups.position.all_reduce(mine))
            except PeerLost as lost:
                protocol.lose(str(lost))
            else:
                protocol.vote(Ballot(votes=1.0))
        write("done", sums=state.sums)
    except Exception as error:
        write("failed", error=type(error).__name__, why=str(error))
        raise
    finally:
        membership.close()


class IslandWorker(Worker):
    """One process; what it writes is read as `Worker` does."""

    main = staticmethod(main)


def start_process(job: Job, island: str, position: int, *, size: int, members: int, steps: int) -> IslandWorker:
    """Start a process of an island."""
    place = Island(island, position, size)
    name = f"{island}{position}"
    worker = IslandWorker(Options(name, str(job.folder), job.address, place, job.name, members, steps))
    job.workers.append(worker)
    return worker
