"""Messages of a group that travel over gloo, through torchft's process group, whose sockets another thread may close.

No `Work` outlives its call, because it keeps sockets open.

Each kind of collective must be one of gloo's own, with its own slots. If members' scripts differ, so that they meet in
different collectives, they then wait, and are named; gloo ends a process that gets a message of another size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evermoe.comm._torchft import torchft
from evermoe.comm.plain_reason import plain_reason
from evermoe.comm.waits import Wait, end_waits

CONNECT_SECONDS = 3.0
"""Time to connect, per hundred members. All were alive moments ago, so one that takes longer has failed."""


def connect_timeout(size: int) -> timedelta:
    """Return the time that gloo gets to connect `size` ranks that are all running."""
    return timedelta(seconds=CONNECT_SECONDS * (1 + size // 100))


def _process_group(address: str | None, timeout: timedelta) -> Any:
    """Return a gloo group that can be aborted, bound to the interface of an address."""
    base = torchft().process_group.ProcessGroupGloo
    if address is None:
        return base(timeout=timeout)

    class Bound(base):  # type: ignore[misc, valid-type]
        def _create_pg(self, store: Any, rank: int, size: int) -> Any:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = self._timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            group, cpu = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType.GLOO
            group._set_default_backend(cpu)
            backend = dist.ProcessGroupGloo(store, rank, size, options)
            for device in ("cpu", "cuda"):
                group._register_backend(torch.device(device), cpu, backend)
            return group

    return Bound(timeout=timeout)


class Gloo:
    """Connections of the members for tensors on the CPU.

    Args:
        address: name or address whose interface gloo uses; None: by GLOO_SOCKET_IFNAME or the host's name.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._group: Any = None
        """torchft's process group; None before the first `connect`."""
        self.timeout = timedelta(0)
        """Time that a collective waits for a silent member."""
        self._waits: set[Wait] = set()
        """Waits for messages in flight."""
        self._posted: list[Any] = []
        """Messages of the latest `post`."""

    def connect(self, store: dist.Store, rank: int, size: int) -> None:
        """Connect the members of a new epoch; the previous connections are closed."""
        group = self._group = self._group or _process_group(self._address, self.timeout)
        group.set_timeout(min(connect_timeout(size), self.timeout))
        group._pg = group._create_pg(dist.PrefixStore("cpu", store), rank, size)
        group._pg._get_backend(torch.device("cpu")).set_timeout(self.timeout)

    def run(self, start: Callable[[Any], Any], limit: timedelta | None, broken: Callable[[], str | None]) -> str | None:
        """Wait for a collective, or for messages; return the failure, or None.

        Args:
            start: begins it in a process group, and returns its work or list of works.
            limit: time to wait for each message; None: `timeout`.
            broken: returns why the group was dropped, or None.
        """
        try:
            works = start(self._group.parent)  # torch's own, to which torchft adds nothing
            if not isinstance(works, list):
                works.wait()
                return None
            waits = [Wait(works.pop(0)) for _ in range(len(works))]
        except (RuntimeError, AssertionError) as error:  # torchft asserts that a group was not aborted
            return plain_reason(error)
        for wait in waits:
            failure = self._finish(wait, limit or self.timeout, broken)
            if failure is not None:
                return failure
        return None

    def _finish(self, wait: Wait, limit: timedelta, broken: Callable[[], str | None]) -> str | None:
        """Wait for a message or until the group is dropped; return the failure, or None."""
        self._waits.add(wait)
        try:
            failure = broken() or wait.run(limit)
            return failure and (broken() or failure)
        finally:
            self._waits.discard(wait)

    def post(self, tensor: torch.Tensor, ranks: Iterable[int], tag: int) -> str | None:
        """Begin to send a tensor without waiting for its receivers; return the failure, or None."""
        try:
            self._posted = [self._group.send([tensor], rank, tag) for rank in ranks]
        except (RuntimeError, AssertionError) as error:
            return plain_reason(error)
        return None

    def close(self, rank: int, size: int) -> None:
        """Close the connections to the other members, and end all waits, from any thread. The group is broken by now.

        Args:
            rank: this member's, when they were connected.
            size: number of members then.
        """
        self._posted = []
        if self._group is not None:
            if size > 1 and self._group._pg is not None:
                end_waits(self._group, rank, size)
            self._group.abort(errored=False)
        for wait in list(self._waits):
            wait.end_wait()
