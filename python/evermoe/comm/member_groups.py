"""Groups of a job's members, which are connected and dropped together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evermoe.comm.group import Group
from evermoe.comm.island import Island
from evermoe.comm.transport import Transport


class MemberGroups:
    """Groups of the members; dropping one drops all, and the connections of `transport`.

    Args:
        interface: name or address whose interface gloo uses; None: by GLOO_SOCKET_IFNAME or the host's name.
        transport: transport for messages of other threads.
        timeout: time that a collective waits for a silent member.
        island: place of this process in its island; None: it has none.
        device: device of the tensors that trainers exchange.
        side_device: device of the tensors that `side` takes; None: it is not needed.
    """

    def __init__(
        self,
        interface: str | None,
        transport: Transport,
        timeout: timedelta,
        island: Island | None,
        device: torch.device,
        side_device: torch.device | None,
    ) -> None:
        self.trainers = Group(interface)
        """Members that train; on a replica node it has one member."""
        self.with_replicas = Group(interface)
        """All members, if some are replica nodes."""
        self.side = Group(interface)
        """Second group of the trainers."""
        self.position = Group(interface)
        """Trainers with this one's position in their islands, in the order of ranks."""
        self.everyone = self.trainers
        """The group of all members."""
        self._device, self._side_device, self._island, self._timeout = device, side_device, island, timeout
        groups = [self.trainers, self.with_replicas, self.side, self.position]
        for group in groups:
            group.linked, group.transport = [other for other in groups if other is not group], transport

    def rebuild(self, store: Any, rank: int, size: int, num_trainers: int) -> None:
        """Connect the members of a new epoch.

        Args:
            store: store with a prefix that no other epoch uses.
            rank: rank of this member.
            size: number of members.
            num_trainers: number of members that train; they have the first ranks.
        """
        self.trainers.drop("the group is being rebuilt")
        cpu, device, limit = torch.device("cpu"), self._device, self._timeout
        self.everyone = self.with_replicas if size > num_trainers else self.trainers
        if size > num_trainers:
            self.with_replicas.rebuild(dist.PrefixStore("everyone", store), rank, size, cpu, limit)
        if rank >= num_trainers:
            self.trainers.rebuild(store, 0, 1, cpu, limit)
            return
        self.trainers.rebuild(store, rank, num_trainers, device, limit)
        if self._side_device is not None:
            self.side.rebuild(dist.PrefixStore("side", store), rank, num_trainers, self._side_device, limit)
        if self._island is not None:
            ranks = self._island.position_ranks(num_trainers)
            prefix = dist.PrefixStore(f"position{self._island.position}", store)
            self.position.rebuild(prefix, ranks.index(rank), len(ranks), device, limit)
