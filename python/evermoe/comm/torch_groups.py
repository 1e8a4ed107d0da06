"""Groups of `torch.distributed` among processes of which any may die: no wait for a lost one is long."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from evermoe.comm.group import has_given_up
from evermoe.comm.task import Task
from evermoe.comm.waits import end_waits
from evermoe.errors import PeerLost

T = TypeVar("T")
_FIRST_LOOK, _LAST_LOOK = 1e-3, 5e-2
"""Seconds from one look for a key to the next one: soon at first, as most are there at once."""
_BATCH_SECONDS = 1.0
"""How long a thread may take to ask NCCL for all sends and receives of a batch."""


class WatchedStore(dist.Store):
    """A store in which no rank waits for the key of a lost rank, nor for a lost rank that has the keys.

    Keep it as long as groups that were made with it are used.

    Args:
        store: the one that all ranks share.
        lost: is set when it is in vain to wait.
        limit: how long it waits, whatever it is asked to.
    """

    def __init__(self, store: dist.Store, lost: threading.Event, limit: timedelta) -> None:
        super().__init__()
        self._store, self._lost, self._limit = store, lost, limit.total_seconds()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are there.

        Raises:
            PeerLost: they never may be, or are not within the limit.
        """
        deadline = time.monotonic() + self._limit
        pause = _FIRST_LOOK
        while not self.check(keys):
            if self._lost.wait(pause):
                raise PeerLost("torch's groups cannot be connected, as a rank is lost")
            if time.monotonic() > deadline:
                raise PeerLost(f"torch's groups are not connected: nothing from some rank for {self._limit:.0f} s")
            pause = min(2 * pause, _LAST_LOOK)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._ask(lambda: self._store.check(keys))

    def get(self, key: str) -> bytes:
        """The key's value, once it is there."""
        self.wait([key])
        return self._ask(lambda: self._store.get(key))

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """What torch's groups tell each other are bytes."""
        self._ask(lambda: self._store.set(key, value))  # type: ignore[arg-type]

    def add(self, key: str, value: int) -> int:
        """The sum of all that was added."""
        return self._ask(lambda: self._store.add(key, value))

    def _ask(self, question: Callable[[], T]) -> T:
        """Ask the store in a thread: torch's stores wait without a limit for a server that hangs."""
        return _in_thread(question, self._limit, None, "no answer from their store")


def _in_thread(work: Callable[[], T], limit: float, lost: threading.Event | None, silence: str) -> T:
    """Return the result of work that no other thread can end; the thread is left behind with it if it takes too long.

    Args:
        work: what the thread calls.
        limit: seconds to wait for it.
        lost: set once the work cannot end well any more, or None.
        silence: why torch's groups cannot be connected if the limit passes.

    Raises:
        PeerLost: `lost` was set, or the limit has passed.
    """
    task = Task(work)
    threading.Thread(target=task.run, name="evermoe-torch-groups", daemon=True).start()
    deadline = time.monotonic() + limit
    while not task.is_over_within(_LAST_LOOK):
        if lost is not None and lost.is_set():
            raise PeerLost("torch's groups cannot be connected, as a rank is lost")
        if time.monotonic() > deadline:
            raise PeerLost(f"torch's groups are not connected: {silence} for {limit:.0f} s")
    task.wait()
    return cast(T, task.result)


@contextmanager
def quick_groups(limit: timedelta, lost: threading.Event) -> Iterator[None]:
    """Connect the gloo groups that are made in the block as soon as all their ranks have come, or fail.

    Args:
        limit: of each connection, and of the waits in groups that are given no time limit.
        lost: set once a rank is lost: the connections fail with `PeerLost`.
    """

    class Gloo(dist.ProcessGroupGloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
            # Gloo itself would wait for one rank after the other, for five times its time limit, and no call ends that
            # wait. A smaller limit while it connects is no way out: gloo keeps it for sends and receives.
            store.set(f"rank {rank}", "is here")
            store.wait([f"rank {each}" for each in range(size)])
            connect = functools.partial(super().__init__, store, rank, size, timeout=timeout, **more)
            _in_thread(connect, limit.total_seconds(), lost, "gloo has not connected their ranks")

    before = c10d.ProcessGroupGloo, c10d.default_pg_timeout
    c10d.ProcessGroupGloo, c10d.default_pg_timeout = Gloo, limit  # type: ignore[misc]
    try:
        yield
    finally:
        c10d.ProcessGroupGloo, c10d.default_pg_timeout = before  # type: ignore[misc]


def interrupt_torch_groups() -> None:
    """Ends all waits in groups of `torch.distributed` in this process, and at the peers; in any thread."""
    abort_nccl()
    for group in list(c10d._world.pg_map):
        if group.size() > 1:
            end_waits(group, group.rank(), group.size())


def end_torch_groups() -> None:
    """Ends all groups of `torch.distributed` in this process, so that peers that wait in one fail at once.

    Gloo's sockets would stay open while a schedule or an exception still refers to them; a wait that times out closes
    them.
    """
    close_batches()
    if not dist.is_initialized():
        c10d._world.group_count = 0  # groups are named by number, and a first one that failed has taken its own
        return
    interrupt_torch_groups()
    dist.destroy_process_group()


def abort_nccl() -> None:
    """Aborts the NCCL communicators of all groups of `torch.distributed`: kernels that wait for a peer end.

    Not while another thread is asking for a batch of sends and receives, which NCCL would then begin in a communicator
    that is gone.
    """
    deadline = time.monotonic() + _BATCH_SECONDS
    while c10d._world.pg_coalesce_state and time.monotonic() < deadline:
        time.sleep(_FIRST_LOOK)
    found = _nccl_groups()
    if found:
        found[0]._group_start()  # in one NCCL group, or the aborts of two communicators wait for each other
        try:
            for nccl in found:
                with suppress(RuntimeError):  # the others are to end all the same
                    nccl.abort()
        finally:
            found[0]._group_end()


def close_batches() -> None:
    """Ends the batches of sends and receives that have failed in this thread while it asked NCCL for them.

    Torch leaves them open, and whatever else the thread asks NCCL for would wait for their end: in groups that are made
    later, too.
    """
    for group in list(c10d._world.pg_coalesce_state):
        for nccl in _nccl_parts([group]):
            with suppress(RuntimeError):  # its communicator is gone
                nccl._group_end()
        del c10d._world.pg_coalesce_state[group]


def is_group_error(error: BaseException | None) -> bool:
    """Whether a group of `torch.distributed` has failed with an error, or with one that it was raised from.

    Gloo raises a plain RuntimeError that names its source file.
    """
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def has_nccl_failed() -> bool:
    """Whether NCCL has failed in some group of `torch.distributed`."""
    return any(map(has_given_up, _nccl_groups()))


def _nccl_groups() -> list[Any]:
    """The NCCL part of each group that has one, in torch's order of ending them: the newest group first."""
    names = dict(c10d._world.pg_names)
    return _nccl_parts(sorted(names, key=lambda each: names[each], reverse=True))


def _nccl_parts(groups: Iterable[dist.ProcessGroup]) -> list[Any]:
    """The NCCL part of each group that has one."""
    if not dist.is_nccl_available():
        return []
    found = []
    for group in groups:
        with suppress(RuntimeError):  # no backend for GPUs
            found.append(group._get_backend(torch.device("cuda")))
    return [each for each in found if isinstance(each, dist.ProcessGroupNCCL)]
