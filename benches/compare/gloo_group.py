"""A group whose tensors travel over torch's gloo, as in most trainers that this project is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from evermoe.comm.group import Group
from evermoe.comm.mesh import LOCAL, Mesh, connect_timeout
from evermoe.comm.plain_reason import plain_reason
from evermoe.comm.torch_groups import end_waits


class _Gloo(Mesh):
    """Connections of gloo in place of those of `src/mesh/`."""

    _group: Any = None

    def connect(self, store: dist.Store, rank: int, size: int) -> None:
        """Connect the members of a new epoch."""
        self._rank, self._size = rank, size
        self._group = dist.ProcessGroupGloo(store, rank, size, timeout=min(connect_timeout(size), self.timeout))
        self._group.set_timeout(self.timeout)

    def all_reduce(self, tensor: Tensor) -> str | None:
        """Sum a tensor in a ring."""
        return self._run(lambda group: [group.allreduce([tensor], c10d.AllreduceOptions())])

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> str | None:
        """Gather a tensor in a ring."""
        return self._run(lambda group: [group.allgather([list(gathered)], [tensor], c10d.AllgatherOptions())])

    def all_to_all(self, received: Tensor, rows: Tensor, receive: list[int], send: list[int]) -> str | None:
        """Exchange rows."""
        options = c10d.AllToAllOptions()
        return self._run(lambda group: [group.alltoall_base(received, rows, receive, send, options)])

    def exchange(
        self, tag: int, sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]], limit: timedelta
    ) -> str | None:
        """Exchange tensors."""

        def start(group: Any) -> list[Any]:
            works = [group.recv([tensor], rank, tag) for tensor, rank in receives]
            return works + [group.send([tensor], rank, tag) for tensor, rank in sends]

        return self._run(start)

    def _run(self, start: Callable[[Any], list[Any]]) -> str | None:
        try:
            for work in start(self._group):
                work.wait()
        except (RuntimeError, AttributeError) as error:  # the group was dropped
            return plain_reason(error)
        return None

    def close(self) -> None:
        """Close the connections."""
        group, self._group = self._group, None
        if group is not None:
            end_waits(group, self._rank, self._size)


class GlooGroup(Group):
    """A group whose tensors travel over gloo."""

    def __init__(self) -> None:
        super().__init__()
        self._mesh = _Gloo(LOCAL)
