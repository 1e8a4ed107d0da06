"""Groups of `torch.distributed` among processes of which any may die: nobody waits for long for one that is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from evermoe.errors import PeerLost

_NEVER_SENT = 0x7FFF_FFFE
"""Tag of no message."""
_LOOK_SECONDS = 0.05
"""How often one who waits for a key looks whether anybody is lost: the wait itself cannot be ended."""


class WatchedStore(dist.Store):
    """A store in which nobody waits for the key of a rank that is lost.

    Args:
        store: the one that all ranks share.
        lost: says why it is in vain to wait; None as long as it is not.
    """

    def __init__(self, store: dist.Store, lost: Callable[[], str | None]) -> None:
        super().__init__()
        self._store, self._lost = store, lost

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there.

        Raises:
            PeerLost: they may never be.
            DistStoreError: they are not within the time limit.
        """
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        while True:
            self._check()
            left = deadline - time.monotonic()
            try:
                return self._store.wait(keys, timedelta(seconds=max(1e-3, min(left, _LOOK_SECONDS))))
            except dist.DistStoreError:
                if left <= _LOOK_SECONDS:
                    raise

    def get(self, key: str) -> bytes:
        """The key's value, once it is there."""
        self.wait([key])
        return self._store.get(key)

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """What torch's groups tell each other are bytes."""
        self._check()
        self._store.set(key, value)  # type: ignore[arg-type]

    def add(self, key: str, value: int) -> int:
        """The sum of all that was added."""
        self._check()
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._store.check(keys)

    def _check(self) -> None:
        reason = self._lost()
        if reason is not None:
            raise PeerLost(f"torch's groups cannot be connected: {reason}")


@contextmanager
def default_timeout(timeout: timedelta) -> Iterator[None]:
    """The limit of all groups that are made meanwhile and are given none."""
    before = c10d.default_pg_timeout
    c10d.default_pg_timeout = timeout
    try:
        yield
    finally:
        c10d.default_pg_timeout = before


def end_torch_groups() -> None:
    """Ends all gloo groups of `torch.distributed` in this process, so that peers that wait in one fail at once.

    Their sockets would stay open while a schedule or an exception still refers to them; a wait that times out closes
    them.
    """
    if not dist.is_initialized():
        c10d._world.group_count = 0  # groups are named by number, and a first one that failed has taken its own
        return
    for group in list(c10d._world.pg_map):
        if group.size() > 1:
            with suppress(RuntimeError):
                never = group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _NEVER_SENT)
                never.wait(timedelta(milliseconds=1))
    dist.destroy_process_group()
