"""Groups of a job's members, which are connected and dropped together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evermoe.comm.common_start import CommonStart
from evermoe.comm.endpoint import Endpoint
from evermoe.comm.group import Group
from evermoe.comm.island_watch import IslandWatch
from evermoe.comm.transport import Transport


class MemberGroups:
    """Groups of the members; dropping one drops all, and the connections of `transport`.

    Args:
        endpoint: address by which others reach this member, and the one on which it listens.
        transport: transport for messages of other threads.
        timeout: time that a collective waits for a silent member.
        watch: of this process's island; None: it has none.
        device: device of the tensors that trainers exchange.
        side_device: device of the tensors that `side` takes; None: it is not needed.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        transport: Transport,
        timeout: timedelta,
        watch: IslandWatch | None,
        device: torch.device,
        side_device: torch.device | None,
    ) -> None:
        self.trainers = Group(endpoint)
        """Members that train; on a replica node it has one member."""
        self.with_replicas = Group(endpoint)
        """All members, if some are replica nodes."""
        self.side = Group(endpoint)
        """Second group of the trainers."""
        self.position = Group(endpoint)
        """Trainers with this one's position in their islands, in the order of ranks."""
        self.everyone = self.trainers
        """The group of all members."""
        self.device, self._side_device, self._timeout = device, side_device, timeout
        groups = [self.trainers, self.with_replicas, self.side, self.position]
        for group in groups:
            group.linked, group.transport = [other for other in groups if other is not group], transport
        self.start = CommonStart(0 if watch is None else watch.island.size, self.trainers)
        """Starts of steps, which the processes of this member's island make together."""
        self.watch = watch
        """Of this member's island; None without one."""
        if watch is not None:
            self.trainers.linked.append(watch)

    def close(self) -> None:
        """Stop to watch the island."""
        if self.watch is not None:
            self.watch.end()

    def rebuild(self, epoch: int, store: Any, members: list[tuple[str, str]], rank: int, num_trainers: int) -> None:
        """Connect the members of a new epoch.

        Args:
            epoch: unique name of the groups.
            store: store with a prefix that no other epoch uses.
            members: each member and the address of its probe server, in the order of ranks.
            rank: rank of this member.
            num_trainers: number of members that train; they have the first ranks.
        """
        self.trainers.drop("the group is being rebuilt")
        self.start.connect(epoch)
        cpu, device, limit, size = torch.device("cpu"), self.device, self._timeout, len(members)
        self.everyone = self.with_replicas if size > num_trainers else self.trainers
        if size > num_trainers:
            self.with_replicas.rebuild(dist.PrefixStore("everyone", store), rank, size, cpu, limit)
        if rank >= num_trainers:
            self.trainers.rebuild(store, 0, 1, cpu, limit)
            return
        self.trainers.rebuild(store, rank, num_trainers, device, limit)
        if self._side_device is not None:
            self.side.rebuild(dist.PrefixStore("side", store), rank, num_trainers, self._side_device, limit)
        if self.watch is not None:
            self.watch.connect(members, rank)
            island = self.watch.island
            ranks = island.position_ranks(num_trainers)
            prefix = dist.PrefixStore(f"position{island.position}", store)
            self.position.rebuild(prefix, ranks.index(rank), len(ranks), device, limit)
