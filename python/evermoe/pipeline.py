"""Keeps a pipeline of `torch.distributed.pipelining` safe: copies in its bubbles, and the way back after a failure.

    step n   schedule ─ reduce over data-parallel peers ─ commit: copies of n whole? ─ VOTE ─ update ─ n + 1 is copied
    failure  PeerLost or torch's own error ─ recover: torch's groups end ─ all seats taken again ─ newest whole version

Version n is kept until version n + 1 is whole on all nodes, so whoever dies, one of the two can be put together again.
"""

from __future__ import annotations

import functools
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from evermoe.config import SessionConfig
from evermoe.copies import MOST_TRIES, CopyStore, Round
from evermoe.courier import UNLIMITED, Courier, Errand, Pacer
from evermoe.elastic import Identity, Membership
from evermoe.errors import CorruptCopy, JoinTimeout, PeerLost
from evermoe.pacing import COPIES
from evermoe.profile import Profiler
from evermoe.profile.recorder import OpenSpan
from evermoe.recovery import Outcome
from evermoe.stages import PipelinePreset, Seat, StagePacing, StageRecovery, StageState, stage_bundles
from evermoe.torch_groups import WatchedStore, end_torch_groups, quick_groups
from evermoe.versions import generation_of, step_of, version_of

logger = logging.getLogger(__name__)

_CONNECTED = 0x7FFF_FFFD
"""Tag of the message that says that all of torch's groups are there."""


class PipelineCopies:
    """Copies of a pipeline stage's units on other nodes, made in the bubbles of the schedule.

        copies = evermoe.PipelineCopies(module, optimizer, stage=s, stages=2, data_parallel=d, data_parallel_size=2,
                                        preset="baft", lighthouse=address, job="big")
        step, schedule = 0, None
        while step < steps:
            try:
                if schedule is None:                   # at the start, and after a failure
                    step = copies.recover()            # waits for all ranks
                    with copies.connecting():          # torch's groups: the default one, and those made here
                        schedule = build_schedule(module)
                copies.begin()
                schedule.step(*batch(step))
                average_gradients(module)              # over the data-parallel peers
                step = copies.commit()                 # instead of optimizer.step()
            except (evermoe.PeerLost, RuntimeError):
                schedule = None
        copies.close()

    Every rank holds its stage's modules with their optimizer state; ranks of one stage hold the same and share the work
    of copying it. With several virtual stages on each rank (interleaved schedules), the stage is an `nn.ModuleList` of
    them, and its number the rank's place in the pipeline. A process that died is replaced by another one with the same
    `stage` and `data_parallel`. For gloo and stages on the CPU. While it lives, it has the process's one
    `evermoe.profile.Profiler`.

    A RuntimeError of the script itself is repeated for ever.

    Args:
        stage_module: this rank's stage, the same on all its ranks, on the CPU.
        optimizer: elementwise, over the parameters of the stage alone; stepped by `commit`.
        stage: number of this rank's stage.
        stages: how many there are, 2 or more; virtual ones do not count.
        data_parallel: this rank's data-parallel coordinate.
        data_parallel_size: how many ranks each stage has.
        preset: `baft` copies all units to the stage before, of stage 0 to the last one; `moetion` only what fewer than
            `copies` nodes hold anyway.
        copies: nodes that are to hold each unit, those that train on it included (`moetion`; `baft` has one beside).
        lighthouse: address of the job's Lighthouse.
        job: names the job, the same for all ranks.
        node: the machine whose memory dies as one; default: the host's name.
        memory_dir: where named shared memory lives.
        copy_buffer_bytes: bytes that travel at once, at most.
        profile_steps: steps that are recorded to find the bubbles; until then, and with 0, copies travel at any time.
        profile_every: steps between two such profiles; another one follows each recovery.
        hang_limit: seconds that a vote, and any wait in torch's groups, may last: more than a rank is ever idle.
        agree_limit: seconds that `recover` waits for all ranks to be there.

    Raises:
        ValueError: an argument that is out of range.
        UnsupportedState: the optimizer keeps state that cannot be divided into units.
    """

    def __init__(
        self,
        stage_module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        stage: int,
        stages: int,
        data_parallel: int,
        data_parallel_size: int,
        lighthouse: str,
        job: str,
        preset: PipelinePreset = "baft",
        copies: int = 2,
        node: str | None = None,
        memory_dir: str = "/dev/shm",
        copy_buffer_bytes: int = 1 << 20,
        profile_steps: int = 20,
        profile_every: int = 1000,
        hang_limit: float = 30.0,
        agree_limit: float = 300.0,
    ) -> None:
        _check(preset, stage, stages, data_parallel, data_parallel_size, stage_module)
        self.stage, self.data_parallel, self.data_parallel_size = stage, data_parallel, data_parallel_size
        self.rank, self.size = stage * data_parallel_size + data_parallel, stages * data_parallel_size
        self.preset: PipelinePreset = preset
        self.optimizer, self.state = optimizer, StageState(stage_module, optimizer, stage)
        self.config = SessionConfig(
            lighthouse=lighthouse,
            job=job,
            preset=preset,
            copies=copies,
            copy_buffer_bytes=copy_buffer_bytes,
            profile_steps=profile_steps,
            profile_every=profile_every,
            hang_limit=hang_limit,
            agree_limit=agree_limit,
        )
        node = node or socket.gethostname()
        shape = f"a pipeline of {stages} stages with {data_parallel_size} ranks each"
        self.membership = Membership(
            lighthouse=lighthouse,
            identity=Identity(job, shape, self.config.shared()),
            node=node,
            device=torch.device("cpu"),
            hang_limit=hang_limit,
            agree_limit=agree_limit,
        )
        self.membership.id = f"{self.rank:06d}-{self.membership.id}"  # ranks follow the order of ids
        self.store = CopyStore(Path(memory_dir) / f"evermoe-{job}" / node, self.state)
        self.membership.generation = self.store.newest_generation()
        self.group = self.membership.group
        self.pacer = Pacer()
        self.courier = Courier(self.membership.background, self.pacer, "evermoe-snapshots")
        self.pacing = StagePacing(self.pacer, self.courier, self.store, self.membership, self.config)
        self.profiler = self._new_profiler()
        self.outcome = Outcome()
        """What the latest recovery did."""
        self._torch_store: WatchedStore | None = None
        self._seats: list[Seat] = []
        self._round: Round | None = None
        self._watching: Errand[None] | None = None
        """Whether the next rank lives while torch connects its groups."""
        self._is_established = False
        """Whether this rank got through a recovery."""
        self._version = 0
        self._pending: int | None = None
        """The version that this rank has voted to step from, while it does not know the result."""
        self._taken: tuple[int, int] | None = None
        """Versions before and after the latest step."""

    @property
    def step(self) -> int:
        """Steps that were taken."""
        return step_of(self._version)

    # ---- a step

    def begin(self) -> None:
        """A step begins: no gradients are left of the one before."""
        self.optimizer.zero_grad(set_to_none=True)
        self.pacer.begin_forward()

    def commit(self) -> int:
        """All of this rank's gradients are whole: votes, takes `optimizer.step()`, and begins to copy the new version.

        Returns:
            The steps taken: the number of the next one.

        Raises:
            PeerLost: a rank is gone. The step may have been taken or not, which `recover` finds out: leave the
                gradients as they are until then.
        """
        self.pacer.hurry()
        with self.profiler.span(COPIES, "collective", "network"):
            is_whole = self._is_round_whole()
            self._pending = self._version if is_whole else None
            votes = float(self.group.all_reduce(torch.tensor([float(is_whole)])))
        if votes != self.size:
            self._pending = None
            self.group.drop("a copy is not whole")
            raise PeerLost(f"{votes:.0f} of {self.size} ranks voted for step {self.step}")
        self._take(version_of(self.membership.generation, self.step + 1))
        try:
            self.pacing.after(self.step)
        except PeerLost as lost:  # the step itself is taken; the next vote finds the group broken
            self.group.drop(str(lost))
        return self.step

    def _is_round_whole(self) -> bool:
        if self._round is None:
            return True
        is_done = self.courier.wait(self._round.errand, self.group)
        return is_done and bool(self._round.errand.result)

    def _take(self, version: int) -> None:
        """The step that all have voted for."""
        if self._round is not None:
            self._round.wait_captured()
        self.optimizer.step()
        self._pending, self._taken, self._version = None, (self._version, version), version
        self.pacer.begin_step()
        self.profiler.step()
        self._round = Round(self.store, version, self.courier) if self.group.broken is None else None

    # ---- failures

    def recover(self) -> int:
        """Waits until there is a process for every stage and coordinate, and brings all to one version. Collective.

        Ends all groups of `torch.distributed` in this process; make them anew afterwards, in `connecting`.

        Returns:
            The step to go on from, the same on all ranks.

        Raises:
            JoinTimeout: some rank did not come within `agree_limit` seconds.
            LostExperts: of some units no copy is left.
            ValueError: ranks of a stage differ in their model or optimizer, or in what they were started with.
        """
        end_torch_groups()
        self.group.drop("this rank recovers")
        self._settle()
        deadline = time.monotonic() + self.config.agree_limit
        while time.monotonic() < deadline:
            self.membership.agree(expected=self.size, on_quorum=self._settle)
            try:
                self._meet()
                self._complete_vote()
                self._restore()
                self._protect()
            except PeerLost as lost:
                self.group.drop(str(lost))
                self._settle()
                continue
            self._is_established = True
            return self.step
        raise JoinTimeout(f"the {self.size} ranks did not recover within {self.config.agree_limit:.0f} s")

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Makes the default group of `torch.distributed`, over gloo; make all other groups inside. Collective.

        Global ranks are `rank` of `size`. Groups that are given no time limit have `hang_limit`. Once a rank is lost
        nobody waits for it any more; for one that hangs, as long as `hang_limit`.

        Raises:
            PeerLost: a rank is gone, or did not get here in time: `recover`.
            RuntimeError: of torch, for the same reason.
            ValueError: there was no `recover` before.
        """
        if not self._seats:
            raise ValueError("PipelineCopies: connecting() is for after recover(), as ranks meet there")
        lost, limit = threading.Event(), timedelta(seconds=self.config.hang_limit)
        watch = self._watching = self.courier.go(functools.partial(self._watch, lost))
        self._torch_store = WatchedStore(self.membership.store, lost, limit)
        try:
            with quick_groups(limit):
                dist.init_process_group("gloo", store=self._torch_store, rank=self.rank, world_size=self.size)
                yield
            self._all_connected(watch)
        except BaseException as error:
            self.group.drop(f"torch's groups were not made: {error}")  # which the others see at once
            raise

    def _watch(self, lost: threading.Event) -> None:
        """Ends with the next rank's message, or when that rank is lost or has dropped its groups. For the courier."""
        try:
            message = self.membership.background.receive(torch.empty(1), (self.rank + 1) % self.size, _CONNECTED)
            message.wait(UNLIMITED)
        except PeerLost:
            lost.set()
            raise

    def _all_connected(self, watch: Errand[None]) -> None:
        """The vote that torch's groups are there, on all ranks."""
        background = self.membership.background
        if background.broken is not None:
            raise PeerLost(f"a rank was lost while torch's groups were made: {background.broken}")
        self.group.all_reduce(torch.zeros(1))
        background.send(torch.zeros(1), (self.rank - 1) % self.size, _CONNECTED).wait()
        if not self.courier.wait(watch, self.group):
            raise PeerLost(f"a rank was lost when torch's groups were made: {watch.lost}")

    def _settle(self) -> None:
        """Until nothing is under way, which is at once in a dropped group."""
        self.pacer.hurry()
        if self._round is not None:
            self._round.wait_captured()
            self.courier.wait(self._round.errand, self.group)
            self._round = None
        if self._watching is not None:
            self.courier.wait(self._watching, self.group)
            self._watching = None

    def _meet(self) -> None:
        """Who sits where."""
        units = [(unit.name, unit.nbytes) for unit in self.state.own_units]
        node, layout = self.membership.node, self.state.own_layout
        mine = Seat(self.stage, self.data_parallel, node, layout, units)
        seats = [Seat.from_bytes(each) for each in self.group.all_gather_bytes(mine.to_bytes())]
        taken = [seat.stage * self.data_parallel_size + seat.data_parallel for seat in seats]
        if taken != list(range(self.size)):
            raise PeerLost(f"the ranks are {taken}, not 0 to {self.size - 1}: some are missing or twice")
        self._seats = seats
        self.state.learn(seats)
        self.store.check_model()

    def _complete_vote(self) -> None:
        """Takes a step that others have seen pass, when this rank lost a peer before it knew. Collective."""
        mine = json.dumps(self._taken).encode()
        everyone = [json.loads(each) for each in self.group.all_gather_bytes(mine)]
        for before, after in (taken for taken in everyone if taken is not None):
            if self._pending == before == self._version:
                self.optimizer.step()
                self._taken, self._version = (before, after), after
        self._pending = None

    def _restore(self) -> None:
        self.outcome = self._recovery().run()
        self._version, self._taken = self.outcome.version, None
        self.membership.generation = max(self.membership.generation, generation_of(self._version) + 1)
        if not self._version:  # which is that of any process that has just come, and as good as nothing
            self._version = version_of(self.membership.generation, 0)

    def _recovery(self) -> StageRecovery:
        return StageRecovery(
            self.state,
            self.store.stored(),
            self.group,
            self.config,
            seats=self._seats,
            version=self._version,
            established=self._is_established,
        )

    def _protect(self) -> None:
        """All copies of this version; returns when they are whole everywhere."""
        bundles = stage_bundles(self.preset, self._seats, self.config.copies)
        self.store.arrange(bundles, self.membership.generation, self.membership.id, self.rank)
        for _ in range(MOST_TRIES):
            self._round = Round(self.store, self._version, self.courier)
            if not self.courier.wait(self._round.errand, self.group):
                raise PeerLost(self._round.errand.lost or "the group was dropped")
            is_whole = float(bool(self._round.errand.result))
            if float(self.group.all_reduce(torch.tensor([is_whole]))) == self.size:
                break
        else:
            raise CorruptCopy("copies arrive with other bytes than were sent, three times in a row: check the network")
        self._round = None
        self.store.prune(self.membership.generation)
        self.profiler.detach()
        self.profiler = self._new_profiler()
        self.profiler.attach()
        self.pacing.restart(self.step, True)
        self.pacer.begin_step()

    def _new_profiler(self) -> Profiler:
        """Every recovery begins a new profile, as all ranks must have recorded the same steps."""
        profiler = Profiler(device="cpu", keep=max(1, self.config.profile_steps), rank=self.rank)
        profiler.follow_network(self._transfer_begins, self._transfer_ends)
        self.pacing.profiler = profiler
        return profiler

    def _transfer_begins(self, span: OpenSpan) -> None:
        if span.kind == "send":  # a receive waits for its sender, and meanwhile the network is idle
            self.pacer.transfer_begins()

    def _transfer_ends(self, span: OpenSpan) -> None:
        assert isinstance(span.end, int)  # on the CPU it is a time
        self.pacer.transfer_ends(span.name, span.end)

    def verify(self) -> tuple[int, list[str]]:
        """Compares all ranks' units and copies of this version, once they are whole, by digest. Collective.

        Returns:
            How many were compared, and the units of which some differ.

        Raises:
            PeerLost: a rank is gone.
        """
        self._settle()
        return self._recovery().verify()

    def write_trace(self, path: str | Path) -> None:
        """Writes this rank's latest steps, its windows and its copies for Perfetto; `evermoe trace` merges the ranks'.

        Raises:
            ValueError: no step is over since the last recovery.
        """
        self.profiler.write_trace(path, windows=self.pacing.windows, sent=list(self.courier.sent))

    def close(self) -> None:
        """The job is over here: waits until the copies of the last step are whole, and leaves."""
        self._settle()
        with suppress(PeerLost):
            self.group.all_reduce(torch.zeros(1))
        self.profiler.detach()
        self.membership.close()
        self.courier.close()
        self.store.close(self.membership.id)


def _check(
    preset: str, stage: int, stages: int, data_parallel: int, data_parallel_size: int, module: nn.Module
) -> None:
    if preset not in ("baft", "moetion"):
        raise ValueError(f"PipelineCopies: expected preset to be baft or moetion, got {preset!r}")
    if stages < 2 or not 0 <= stage < stages:
        raise ValueError(f"PipelineCopies: expected 2 stages or more and 0 <= stage < {stages}, got stage {stage}")
    if not 0 <= data_parallel < data_parallel_size:
        raise ValueError(f"PipelineCopies: expected 0 <= data_parallel < {data_parallel_size}, got {data_parallel}")
    devices: Sequence[str] = sorted({parameter.device.type for parameter in module.parameters()})
    if devices != ["cpu"]:
        raise ValueError(f"PipelineCopies: expected a stage with parameters, all on the CPU, got some on {devices}")
