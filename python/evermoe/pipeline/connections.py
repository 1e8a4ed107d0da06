"""The groups of a pipeline, whose waits end when a rank is lost: torch's own, and that of a stage's ranks."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from evermoe.comm.courier import UNLIMITED, Courier
from evermoe.comm.group import share_a_gpu
from evermoe.comm.membership import MembershipManager
from evermoe.comm.tags import CONNECTED
from evermoe.comm.task import Task
from evermoe.comm.torch_groups import (
    WatchedStore,
    has_nccl_failed,
    interrupt_torch_groups,
    is_group_error,
    keep_alive_after_nccl_failure,
    quick_groups,
)
from evermoe.errors import PeerLost
from evermoe.moe.experts import Experts
from evermoe.pipeline.pipeline_config import PipelineConfig

logger = logging.getLogger(__name__)

NOTICE_MARGIN = 1.0
"""Seconds after the heartbeat timeout within which a lost rank is noticed."""
LOOK_SECONDS = 0.01
"""Pause between two checks for a lost rank."""


class TorchConnections:
    """Makes the groups again after each recovery.

    Stages on GPUs exchange over NCCL; if ranks share a GPU, which NCCL does not support by default, over gloo through
    host memory.

    Args:
        options: of the pipeline.
        membership: all ranks, agreed and connected. Waits in torch's groups end when its group is dropped.
        device: of this rank's stage.
    """

    def __init__(self, options: PipelineConfig, membership: MembershipManager, device: torch.device) -> None:
        self._options, self._membership, self._device = options, membership, device
        self._group = membership.trainer_group
        self._courier = Courier(membership.transport, None, "evermoe-connections")
        """Waits for the next rank's message; the other courier may be sending copies."""
        self.pipeline_group: dist.ProcessGroup | None = None
        """The ranks of one data-parallel coordinate, stage by stage; None before the first connection."""
        self.data_parallel_group: dist.ProcessGroup | None = None
        """The ranks of this stage; None if it has one rank."""
        self.uses_host = False
        """Whether stages exchange through host memory."""
        self._is_dropped = False
        self._lost = threading.Event()
        """Set once a rank is lost, so that waits in the store of torch's groups end."""
        self._links = self._group.linked, membership.side_group.linked
        for linked in self._links:
            linked.append(self)
        self._watching: Task[None] | None = None
        """Watches the next rank while torch connects its groups."""
        self._store: WatchedStore | None = None

    @property
    def uses_nccl(self) -> bool:
        """Whether stages exchange over NCCL, whose failures no call on the host waits for."""
        return self._device.type == "cuda" and not self.uses_host

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Make torch's default group and those of the pipeline; the caller makes its own inside. Collective.

        The default group is of gloo; for stages on GPUs, of NCCL as well. Groups that are given no time limit have
        `hang_timeout`. Once a rank is lost, no rank waits for it any more.

        Raises:
            PeerLost: a rank is lost, or was late. RuntimeError: of torch, for the same reason.
        """
        lost, limit = threading.Event(), timedelta(seconds=self._options.membership.hang_timeout)
        self._lost = lost
        backend = self._backend()
        watch = self._watching = self._courier.submit(functools.partial(self._watch, lost))
        self._store = WatchedStore(self._membership.store, lost, limit)
        with quick_groups(limit, lost):
            dist.init_process_group(backend, store=self._store, rank=self._options.rank, world_size=self._options.size)
            self._divide()
            yield
        self._all_connected(watch)

    def _divide(self) -> None:
        """Make the groups of each stage's ranks, and of each data-parallel coordinate's."""
        self.pipeline_group, self.data_parallel_group = dist.group.WORLD, None
        size, peers = self._options.size, self._options.data_parallel_size
        if peers == 1:
            return
        of_stages = [dist.new_group([*range(first, first + peers)]) for first in range(0, size, peers)]
        of_peers = [dist.new_group([*range(peer, size, peers)]) for peer in range(peers)]
        self.data_parallel_group = of_stages[self._options.stage]
        self.pipeline_group = of_peers[self._options.data_parallel]

    def is_connection_loss(self, error: BaseException) -> bool:
        """Whether an error is the consequence of a lost rank, and not the script's own.

        That is an error of torch's groups, or a RuntimeError soon after which this session notices a lost rank: code of
        the script, or a kernel, may fail for data that never came. An error that torch's groups raise in each attempt
        ends the job after `MAX_RECOVERIES` of the protocol.
        """
        if isinstance(error, PeerLost) or (isinstance(error, Exception) and is_group_error(error)):
            return True
        if not isinstance(error, RuntimeError):
            return False
        deadline = time.monotonic() + self._options.membership.heartbeat_timeout + NOTICE_MARGIN
        while self._group.broken is None and self._membership.transport.broken is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def _backend(self) -> str:
        """Name of torch's backends, the same on all ranks; collective."""
        self._is_dropped = False
        if self._device.type == "cpu":
            return "gloo"
        torch.cuda.set_device(self._device)
        self.uses_host = share_a_gpu(self._group, self._device)
        if self.uses_host:
            if self._options.rank == 0:
                logger.warning(
                    "several ranks share a GPU, which NCCL allows only with NCCL_MULTI_RANK_GPU_ENABLE=1: stages "
                    "exchange through host memory"
                )
            return "gloo"
        keep_alive_after_nccl_failure()
        return "cpu:gloo,cuda:nccl"

    def drop_alone(self, reason: str) -> None:
        """End all waits in torch's groups, since a rank is lost; in any thread."""
        self._lost.set()
        self._is_dropped = dist.is_initialized()
        interrupt_torch_groups()

    def check(self) -> None:
        """Check that no kernel continued without a lost rank's data, once the host has read this rank's gradients.

        Raises:
            PeerLost: NCCL has failed since these groups were made.
        """
        if self._device.type == "cuda" and (self._is_dropped or has_nccl_failed()):
            self._group.drop("NCCL has failed")
            raise PeerLost(f"a step among {self._options.size} ranks failed: {self._group.broken}")

    def leave(self) -> None:
        """End the watch of torch's groups."""
        for linked in self._links:
            linked.remove(self)
        self._courier.close()

    def connect_peers(self, layers: Iterable[Experts]) -> None:
        """Connect this rank with the others of its stage, between which the tokens of its MoE layers travel.

        Raises:
            PeerLost: one is lost.
        """
        group, options = self._membership.side_group, self._options
        store = dist.PrefixStore(f"stage {options.stage}", self._membership.store)
        limit = timedelta(seconds=options.membership.hang_timeout)
        try:
            group.rebuild(store, options.data_parallel, options.data_parallel_size, self._device, limit)
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            reason = f"the ranks of stage {options.stage} were not connected: {error}"
            self._group.drop(reason)
            raise PeerLost(reason) from None
        for layer in layers:
            layer.group = group

    def interrupt(self) -> None:
        """Wait until the watch has ended, which is at once in a dropped group."""
        if self._watching is not None:
            self._courier.wait_for_task(self._watching, self._group)
            self._watching = None

    def _watch(self, lost: threading.Event) -> None:
        """Wait for the next rank's message, until that rank is lost or has dropped its groups. For the courier."""
        try:
            following = (self._options.rank + 1) % self._options.size
            self._membership.transport.receive(torch.empty(1), following, CONNECTED).wait(UNLIMITED)
        except PeerLost:
            lost.set()
            raise

    def _all_connected(self, watch: Task[None]) -> None:
        """Agree with all ranks that torch's groups are connected."""
        transport = self._membership.transport
        if transport.broken is not None:
            raise PeerLost(f"a rank was lost while torch's groups were made: {transport.broken}")
        self._group.all_reduce(torch.zeros(1))
        transport.send(torch.zeros(1), (self._options.rank - 1) % self._options.size, CONNECTED).wait()
        if not self._courier.wait_for_task(watch, self._group):
            raise PeerLost(f"a rank was lost when torch's groups were made: {watch.lost}")
