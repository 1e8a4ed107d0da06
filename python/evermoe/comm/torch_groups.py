"""Groups of `torch.distributed` among processes of which any may fail: waits for a lost one end soon."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from evermoe.comm.tags import NEVER_SENT
from evermoe.comm.task import Task, run_in_thread
from evermoe.errors import PeerLost

T = TypeVar("T")
ABORT_ALONE = "2"
"""Value of TORCH_NCCL_ASYNC_ERROR_HANDLING with which torch aborts a failed communicator and keeps the process alive.
Torch's default ends the process."""
DUMP_MILLISECONDS = "100"
"""Value of TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC: time in which torch may dump its record of NCCL calls after a failure.
No group can be left before. With torch's default, leaving one took more than 30 s with the emulated NCCL."""
_MIN_PAUSE, _MAX_PAUSE = 1e-3, 5e-2
"""First and last pause in seconds between two checks for a key: most keys exist at once."""
_ABORT_SECONDS = 2.0
"""Time that aborts may take. Kernels end at once; what an abort then waits for, such as a CUDA graph, may last."""
_BATCH_SECONDS = 1.0
"""Time that a thread may take to submit a batch of sends and receives to NCCL."""


class WatchedStore(dist.Store):
    """A store in which no rank waits for the key of a lost rank, nor for a lost rank that hosts the keys.

    Keep it as long as groups created with it are in use.

    Args:
        store: the store that all ranks share.
        lost: event that is set when a rank is lost.
        limit: longest wait, whatever timeout is requested.
    """

    def __init__(self, store: dist.Store, lost: threading.Event, limit: timedelta) -> None:
        super().__init__()
        self._store, self._lost, self._limit = store, lost, limit.total_seconds()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises:
            PeerLost: a rank is lost, or the keys do not exist within the limit.
        """
        deadline = time.monotonic() + self._limit
        pause = _MIN_PAUSE
        while not self.check(keys):
            if self._lost.wait(pause):
                raise PeerLost("torch's groups cannot be connected, as a rank is lost")
            if time.monotonic() > deadline:
                raise PeerLost(f"torch's groups are not connected: nothing from some rank for {self._limit:.0f} s")
            pause = min(2 * pause, _MAX_PAUSE)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self._ask(lambda: self._store.check(keys))

    def get(self, key: str) -> bytes:
        """Wait for the key, and return its value."""
        self.wait([key])
        return self._ask(lambda: self._store.get(key))

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Store a value."""
        self._ask(lambda: self._store.set(key, value))  # type: ignore[arg-type]

    def add(self, key: str, value: int) -> int:
        """Add to the key's number and return the sum."""
        return self._ask(lambda: self._store.add(key, value))

    def _ask(self, question: Callable[[], T]) -> T:
        """Call the store in a thread, as torch's stores wait without a limit for a server that hangs."""
        return _in_thread(question, self._limit, None, "no answer from their store")


def _in_thread(work: Callable[[], T], limit: float, lost: threading.Event | None, silence: str) -> T:
    """Run work that cannot be interrupted in a thread, and return its result.

    If the wait ends early, the thread continues until the work ends on its own.

    Args:
        work: function that the thread calls.
        limit: longest wait in seconds.
        lost: event that ends the wait once the work cannot succeed any more, or None.
        silence: reason to name in the error if the limit passes.

    Raises:
        PeerLost: `lost` was set, or the limit has passed.
    """
    task = Task(work)
    run_in_thread(task, "evermoe-torch-groups", ())
    deadline = time.monotonic() + limit
    while not task.is_over_within(_MAX_PAUSE):
        if lost is not None and lost.is_set():
            raise PeerLost("torch's groups cannot be connected, as a rank is lost")
        if time.monotonic() > deadline:
            raise PeerLost(f"torch's groups are not connected: {silence} for {limit:.0f} s")
    if not task.wait():  # the work has noticed the lost rank first
        raise PeerLost(str(task.lost))
    return cast(T, task.result)


@contextmanager
def quick_groups(limit: timedelta, lost: threading.Event) -> Iterator[None]:
    """Make gloo groups created in the block connect once all their ranks have arrived, or fail within the limit.

    Args:
        limit: longest wait for each connection; also the default timeout of these groups.
        lost: event that is set when a rank is lost: connections then fail with `PeerLost`.
    """

    class Gloo(dist.ProcessGroupGloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
            # Gloo itself would wait for one rank after the other, for five times its timeout, and no call interrupts
            # that wait. A shorter timeout while it connects does not help: gloo keeps it for sends and receives.
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


def end_waits(group: Any, rank: int, size: int) -> None:
    """End all threads' waits for messages of a gloo group, on this rank and its peers.

    Gloo has no call for that, and its sockets stay open while a thread waits. But a wait that times out closes them
    all. A wait for a peer that has closed its side fails at once instead, and ends no others, so the next is tried.
    """
    for step in range(1, size):
        if _times_out(group, (rank + step) % size):
            return


def _times_out(group: Any, peer: int) -> bool:
    try:
        never = group.recv([torch.empty(1)], peer, NEVER_SENT)
        never.wait(timedelta(milliseconds=1))
    except (RuntimeError, AssertionError) as error:
        return "timed out" in str(error).lower()
    return False


def interrupt_torch_groups() -> None:
    """End all waits in groups of `torch.distributed`, in this process and at the peers; callable from any thread."""
    abort_nccl()
    for group in list(c10d._world.pg_map):
        if group.size() > 1:
            end_waits(group, group.rank(), group.size())


def end_torch_groups() -> None:
    """Destroy all groups of `torch.distributed` in this process, so that peers that wait in one fail at once.

    Gloo's sockets would stay open while a schedule or an exception still refers to them. A wait that times out closes
    them.
    """
    close_batches()
    if not dist.is_initialized():
        c10d._world.group_count = 0  # groups are named by number, and a failed first one has used its number
        return
    interrupt_torch_groups()
    dist.destroy_process_group()


def abort_nccl() -> None:
    """Abort the NCCL communicators of all groups of `torch.distributed` together: kernels that wait for a peer end.

    It first waits until no other thread is submitting a batch of sends and receives, which NCCL would otherwise begin
    in an aborted communicator.
    """
    deadline = time.monotonic() + _BATCH_SECONDS
    while c10d._world.pg_coalesce_state and time.monotonic() < deadline:
        time.sleep(_MIN_PAUSE)
    tasks = [Task(nccl.abort) for nccl in _nccl_groups()]
    for task in tasks:  # a thread each: one waits for kernels that are behind those of another
        run_in_thread(task, "evermoe-torch-groups", ())
    deadline = time.monotonic() + _ABORT_SECONDS
    for task in tasks:
        task.is_over_within(max(0.0, deadline - time.monotonic()))


def close_batches() -> None:
    """Close the batches of sends and receives that failed in this thread while it submitted them to NCCL.

    Torch leaves them open, and all later NCCL calls of the thread would wait for their end, even in new groups.
    """
    for group in list(c10d._world.pg_coalesce_state):
        for nccl in _nccl_parts([group]):
            with suppress(RuntimeError):  # its communicator was aborted
                nccl._group_end()
        del c10d._world.pg_coalesce_state[group]


def is_group_error(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, is the failure of a group of `torch.distributed`.

    Gloo raises a plain RuntimeError that names its source file.
    """
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def keep_alive_after_nccl_failure() -> None:
    """Keep this process alive when an NCCL group of torch created later fails, unless the user has set otherwise."""
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1") == "1":  # torchrun sets torch's default
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = ABORT_ALONE
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", DUMP_MILLISECONDS)


def has_nccl_failed() -> bool:
    """Return whether NCCL has failed in some group of `torch.distributed`."""
    return any(nccl.get_error().name != "SUCCESS" for nccl in _nccl_groups())


def _nccl_groups() -> list[Any]:
    """Return the NCCL part of each group that has one, in torch's order of destruction: the newest group first."""
    names = dict(c10d._world.pg_names)
    return _nccl_parts(sorted(names, key=lambda each: names[each], reverse=True))


def _nccl_parts(groups: Iterable[dist.ProcessGroup]) -> list[Any]:
    """Return the NCCL part of each group that has one."""
    if not dist.is_nccl_available():
        return []
    found = []
    for group in groups:
        with suppress(RuntimeError):  # no backend for GPUs
            found.append(group._get_backend(torch.device("cuda")))
    return [each for each in found if isinstance(each, dist.ProcessGroupNCCL)]
