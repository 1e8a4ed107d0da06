"""The groups of a pipeline, which no rank waits for in vain: torch's own, and that of a stage's ranks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from evermoe.comm.courier import UNLIMITED, Courier
from evermoe.comm.membership import Membership
from evermoe.comm.tags import CONNECTED
from evermoe.comm.task import Task
from evermoe.comm.torch_groups import WatchedStore, quick_groups
from evermoe.errors import PeerLost
from evermoe.experts import Experts


class TorchConnections:
    """Makes the groups anew after each recovery.

    Args:
        membership: all ranks, agreed and connected.
        courier: waits for the next rank's message meanwhile.
        rank: of the pipeline.
        size: number of ranks.
        hang_limit: seconds that a wait may last.
    """

    def __init__(self, membership: Membership, courier: Courier, rank: int, size: int, hang_limit: float) -> None:
        self._membership, self._courier, self._group = membership, courier, membership.trainer_group
        self._rank, self._size, self._hang_limit = rank, size, hang_limit
        self._watching: Task[None] | None = None
        """Whether the next rank lives while torch connects its groups."""
        self._store: WatchedStore | None = None

    @contextmanager
    def made(self) -> Iterator[None]:
        """See `PipelineSession.connecting`."""
        lost, limit = threading.Event(), timedelta(seconds=self._hang_limit)
        watch = self._watching = self._courier.submit(functools.partial(self._watch, lost))
        self._store = WatchedStore(self._membership.store, lost, limit)
        try:
            with quick_groups(limit):
                dist.init_process_group("gloo", store=self._store, rank=self._rank, world_size=self._size)
                yield
            self._all_connected(watch)
        except BaseException as error:
            self._group.drop(f"torch's groups were not made: {error}")  # which the others see at once
            raise

    def connect_peers(self, layers: Iterable[Experts], stage: int, peers: int) -> None:
        """Connects this rank with the others of its stage, between which the tokens of MoE layers travel.

        Args:
            layers: of the stage.
            stage: its number.
            peers: its ranks.

        Raises:
            PeerLost: one is gone.
        """
        group, limit = self._membership.side_group, timedelta(seconds=self._hang_limit)
        store = dist.PrefixStore(f"stage {stage}", self._membership.store)
        try:
            group.rebuild(store, self._rank - stage * peers, peers, torch.device("cpu"), limit)
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            reason = f"the ranks of stage {stage} were not connected: {error}"
            self._group.drop(reason)
            raise PeerLost(reason) from None
        for layer in layers:
            layer.group = group

    def interrupt(self) -> None:
        """Waits until nothing is under way, which is at once in a dropped group."""
        if self._watching is not None:
            self._courier.wait(self._watching, self._group)
            self._watching = None

    def _watch(self, lost: threading.Event) -> None:
        """Ends with the next rank's message, or when that rank is lost or has dropped its groups. For the courier."""
        try:
            message = self._membership.transport.receive(torch.empty(1), (self._rank + 1) % self._size, CONNECTED)
            message.wait(UNLIMITED)
        except PeerLost:
            lost.set()
            raise

    def _all_connected(self, watch: Task[None]) -> None:
        """The vote that torch's groups are there, on all ranks."""
        transport = self._membership.transport
        if transport.broken is not None:
            raise PeerLost(f"a rank was lost while torch's groups were made: {transport.broken}")
        self._group.all_reduce(torch.zeros(1))
        transport.send(torch.zeros(1), (self._rank - 1) % self._size, CONNECTED).wait()
        if not self._courier.wait(watch, self._group):
            raise PeerLost(f"a rank was lost when torch's groups were made: {watch.lost}")
