"""The groups of a pipeline, which no rank waits for in vain: torch's own, and that of a stage's ranks."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from evermoe.comm.courier import UNLIMITED, Courier
from evermoe.comm.group import leave_failures_to_us, share_a_gpu
from evermoe.comm.membership import MembershipManager
from evermoe.comm.tags import CONNECTED
from evermoe.comm.task import Task
from evermoe.comm.torch_groups import WatchedStore, has_nccl_failed, interrupt_torch_groups, quick_groups
from evermoe.errors import PeerLost
from evermoe.experts import Experts

logger = logging.getLogger(__name__)


class TorchConnections:
    """Makes the groups anew after each recovery.

    Stages on GPUs exchange over NCCL; where ranks share a GPU, which NCCL refuses, over gloo, through host memory.

    Args:
        membership: all ranks, agreed and connected. What waits in torch's groups ends when its group is dropped.
        rank: of the pipeline.
        size: number of ranks.
        hang_timeout: seconds that a wait may last.
        device: of this rank's stage.
    """

    def __init__(
        self,
        membership: MembershipManager,
        rank: int,
        size: int,
        hang_timeout: float,
        device: torch.device,
    ) -> None:
        self._membership, self._group = membership, membership.trainer_group
        self._courier = Courier(membership.transport, None, "evermoe-connections")
        """Waits for the next rank's message meanwhile; copies may be on their way in the other one."""
        self._rank, self._size, self._hang_timeout, self._device = rank, size, hang_timeout, device
        self.uses_host = False
        """Whether what stages exchange goes through host memory."""
        self._is_dropped = False
        self._lost = threading.Event()
        """Whether nobody is to wait for a rank in the store of torch's groups."""
        self._links = self._group.linked, membership.side_group.linked
        for linked in self._links:
            linked.append(self)
        self._watching: Task[None] | None = None
        """Whether the next rank lives while torch connects its groups."""
        self._store: WatchedStore | None = None

    @property
    def uses_nccl(self) -> bool:
        """Whether what stages exchange travels over NCCL, for whose failures no call on the host waits."""
        return self._device.type == "cuda" and not self.uses_host

    @contextmanager
    def made(self) -> Iterator[None]:
        """See `PipelineSession.connecting`."""
        lost, limit = threading.Event(), timedelta(seconds=self._hang_timeout)
        self._lost = lost
        backend = self._backend()
        watch = self._watching = self._courier.submit(functools.partial(self._watch, lost))
        self._store = WatchedStore(self._membership.store, lost, limit)
        try:
            with quick_groups(limit):
                dist.init_process_group(backend, store=self._store, rank=self._rank, world_size=self._size)
                yield
            self._all_connected(watch)
        except BaseException as error:
            self._group.drop(f"torch's groups were not made: {error}")  # which the others see at once
            raise

    def _backend(self) -> str:
        """Name of torch's backends, the same on all ranks; collective."""
        self._is_dropped = False
        if self._device.type == "cpu":
            return "gloo"
        torch.cuda.set_device(self._device)
        self.uses_host = share_a_gpu(self._group, self._device)
        if self.uses_host:
            if self._rank == 0:
                logger.warning("several ranks share a GPU: stages exchange through host memory, as NCCL refuses that")
            return "gloo"
        leave_failures_to_us()
        return "cpu:gloo,cuda:nccl"

    def drop_alone(self, reason: str) -> None:
        """A rank is lost: ends all waits in torch's groups; in any thread."""
        self._lost.set()
        self._is_dropped = dist.is_initialized()
        interrupt_torch_groups()

    def check(self) -> None:
        """To be called when the host has read what this rank has computed: of a lost rank it had nothing.

        Raises:
            PeerLost: NCCL has given up since these groups were made.
        """
        if self._device.type == "cuda" and (self._is_dropped or has_nccl_failed()):
            self._group.drop("NCCL has given up")
            raise PeerLost(f"a step among {self._size} ranks failed: {self._group.broken}")

    def leave(self) -> None:
        """Leaves torch's groups to the script."""
        for linked in self._links:
            linked.remove(self)
        self._courier.close()

    def connect_peers(self, layers: Iterable[Experts], stage: int, peers: int) -> None:
        """Connects this rank with the others of its stage, between which the tokens of MoE layers travel.

        Args:
            layers: of the stage.
            stage: its number.
            peers: its ranks.

        Raises:
            PeerLost: one is gone.
        """
        group, limit = self._membership.side_group, timedelta(seconds=self._hang_timeout)
        store = dist.PrefixStore(f"stage {stage}", self._membership.store)
        try:
            group.rebuild(store, self._rank - stage * peers, peers, self._device, limit)
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
