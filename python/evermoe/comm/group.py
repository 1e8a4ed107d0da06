"""Collectives among the members of a job, and their failures: gloo and NCCL through torchft's process groups.

The code below keeps two rules:

* a member that sees an error closes its own sockets *before* it waits for others, or its peers would wait for it;
* no `Work` and no exception of a collective outlives the call, because both keep sockets open.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from evermoe.comm._torchft import torchft
from evermoe.comm.plain_reason import plain_reason
from evermoe.comm.transport import Transport
from evermoe.comm.waits import Clocks, Wait, end_waits
from evermoe.errors import PeerLost
from evermoe.options import count

logger = logging.getLogger(__name__)

ABORT_ALONE = "2"
"""Value of TORCH_NCCL_ASYNC_ERROR_HANDLING with which torch aborts a failed communicator and keeps the process alive.
Torch's default ends the process."""
DUMP_MILLISECONDS = "100"
"""Value of TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC: time in which torch may dump its record of NCCL calls after a failure.
No group can be left before. With torch's default, leaving one took more than 30 s with the emulated NCCL."""
CONNECT_SECONDS = 3.0
"""Time to connect, per hundred members. All were alive moments ago, so one that takes longer has failed."""


def connect_timeout(size: int) -> timedelta:
    """Return the time that gloo gets to connect `size` ranks that are all running."""
    return timedelta(seconds=CONNECT_SECONDS * (1 + size // 100))


def _ignore(name: str, on_stream: bool) -> None:
    pass


class OnWait(Protocol):
    """Callback before and after a wait for other members."""

    def __call__(self, begins: bool, has_succeeded: bool = True) -> None:
        """`begins`: True before the wait, False after it. `has_succeeded`: after it, whether the wait succeeded."""


def _ignore_wait(begins: bool, has_succeeded: bool = True) -> None:
    pass


def _gloo(address: str | None, timeout: timedelta) -> Any:
    """Return a gloo group that can be aborted, bound to the interface of an address."""
    base = torchft().process_group.ProcessGroupGloo
    if address is None:
        return base(timeout=timeout)

    class Gloo(base):  # type: ignore[misc, valid-type]
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

    return Gloo(timeout=timeout)


def _identity(device: torch.device) -> torch.Tensor:
    """Return the UUID of a GPU, as int64 `[2]`."""
    identity = uuid.UUID(str(torch.cuda.get_device_properties(device).uuid))
    return torch.frombuffer(bytearray(identity.bytes), dtype=torch.int64)


def share_a_gpu(group: Group, device: torch.device) -> bool:
    """Return whether several members of a group share a GPU, which NCCL does not support. Collective.

    Args:
        group: the members.
        device: the GPU of this member.

    Raises:
        PeerLost: a member is lost.
    """
    return len(group.all_gather(_identity(device)).unique(dim=0)) < group.size


def keep_alive_after_nccl_failure() -> None:
    """Keep this process alive when an NCCL group created from now on fails, unless the user has set otherwise."""
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1") == "1":  # torchrun sets torch's default
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = ABORT_ALONE
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", DUMP_MILLISECONDS)


def has_nccl_error(nccl: Any) -> bool:
    """Return whether torch's NCCL group has failed."""
    return bool(nccl.get_error().name != "SUCCESS")


def _has_failed(nccl: Any) -> bool:
    """Return whether NCCL has failed or was aborted. Its own `errored` would wait for all streams of the device."""
    return nccl._errored is not None or has_nccl_error(nccl._pg._get_backend(torch.device("cuda")))


class Linked(Protocol):
    """An object that is dropped together with a group."""

    def drop_alone(self, reason: str) -> None:
        """Drop this object from any thread, without the objects linked to it."""


@dataclass
class Begun:
    """Counter of collectives."""

    count: int = 0


class Group:
    """The current members and the collectives among them; `rank` and `size` change with the membership.

    A new `Group()` has one member and needs no network. When a peer fails, this member's sockets are closed and
    `PeerLost` is raised; from then on every call raises `PeerLost` until the group is rebuilt. Tensors on the CPU
    travel over gloo, tensors on a GPU over NCCL. If several members share a GPU, which NCCL does not support, all
    travel over gloo.

    One thread may drop the group while others wait in it.

    Args:
        address: name or address whose interface gloo uses; None: by GLOO_SOCKET_IFNAME or the host's name.
    """

    def __init__(self, address: str | None = None) -> None:
        self._address = address
        self.rank = 0
        self.size = 1
        self.is_alone = True
        """Whether `size` is 1; compiled graphs depend on this alone."""
        self._groups: dict[str, Any] = {}
        """Process groups by device type; a device without its own uses that of the CPU."""
        self._timeout = timedelta(0)
        self._waits: set[Wait] = set()
        """Waits for messages in flight."""
        self._posted: list[Any] = []
        """Messages of the latest `post`."""
        self.broken: str | None = None
        self.begun = Begun()
        """Collectives begun since the group was connected, or since a reader replaced the counter."""
        self.timed_out = False
        """Whether a collective has timed out; reset by the failure detector."""
        self.waiting: Clocks | None = None
        """When the collective that this member waits for began; None outside collectives."""
        self.on_wait: OnWait = _ignore_wait
        """Callback before and after each collective."""
        self.linked: list[Linked] = []
        """Objects that are dropped with this group, such as other groups."""
        self.transport: Transport | None = None
        """Transport for messages of other threads; its connections are dropped with this group."""
        self.on_begin: Callable[[str, bool], None] = _ignore
        """Callback before each collective: its name, and whether it runs on the GPU's stream."""
        self.on_end: Callable[[str, bool], None] = _ignore
        """Callback after each collective, or once it is enqueued on the stream; same arguments."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace `tensor` by its sum over all members, the same bits on every member, and return it."""
        return self._call("all_reduce", tensor, lambda pg: pg.allreduce([tensor], c10d.AllreduceOptions()))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of each member, by rank: `[size, *tensor.shape]`. Shapes must agree."""
        if self.size == 1 and self.broken is None:
            return tensor.unsqueeze(0).clone()
        gathered = tensor.new_empty((self.size, *tensor.shape))
        rows = list(gathered.unbind())
        self._call("all_gather", tensor, lambda pg: pg.allgather([rows], [tensor], c10d.AllgatherOptions()))
        return gathered

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of each member, by rank; lengths may differ."""
        lengths = self.all_gather(torch.tensor([len(data)], dtype=torch.int64)).flatten().tolist()
        if not any(lengths):
            return [b""] * len(lengths)
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        rows = self.all_gather(mine)
        return [rows[i, :length].numpy().tobytes() for i, length in enumerate(lengths)]

    def all_to_all(self, rows: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        """Exchange rows unevenly along dim 0: the first `send_counts[0]` rows go to rank 0, and so on.

        `rows` is `[sum(send_counts), ...]`, contiguous; the result is `[sum(receive_counts), ...]`, by source rank.
        """
        if len(send_counts) != self.size or len(receive_counts) != self.size or sum(send_counts) != rows.shape[0]:
            raise ValueError(
                f"all_to_all among {count(self.size, 'member')}: expected {self.size} counts each way and send counts "
                f"that sum to the {len(rows)} rows, got send_counts={send_counts}, receive_counts={receive_counts}"
            )
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        if self.size == 1 and self.broken is None:
            return received.copy_(rows)
        rows = rows.contiguous()
        options = c10d.AllToAllOptions()
        self._call(
            "all_to_all",
            rows,
            lambda pg: pg.alltoall_base(received, rows, receive_counts, send_counts, options),
        )
        return received

    def exchange(
        self,
        sends: list[tuple[torch.Tensor, int]],
        receives: list[tuple[torch.Tensor, int]],
        tag: int = 0,
        limit: timedelta | None = None,
    ) -> None:
        """Send each tensor to its rank and receive each tensor, in place, from its rank, at the same time.

        Between two members, messages of a tag pair up in the order in which each side lists them. CPU tensors only.

        Args:
            sends: tensors and their destination ranks.
            receives: tensors and their source ranks.
            tag: tag of these messages; see `comm.tags`.
            limit: time to wait for a silent member; None: that of a collective.
        """
        if not sends and not receives:
            return

        def start(pg: Any) -> list[Any]:
            works = [pg.recv([tensor], source, tag) for tensor, source in receives]
            return works + [pg.send([tensor], destination, tag) for tensor, destination in sends]

        self._call("exchange", (sends or receives)[0][0], start, limit)

    def post(self, tensor: torch.Tensor, ranks: Iterable[int], tag: int) -> None:
        """Begin to send a tensor on the CPU to ranks that receive it by `exchange`, without waiting for them.

        The ranks must have received the messages of the previous call.
        """
        if self.broken is not None:
            return
        try:
            self._posted = [self._groups["cpu"].send([tensor], rank, tag) for rank in ranks]
        except (RuntimeError, AssertionError) as error:
            self.drop(plain_reason(error))

    def _call(
        self, name: str, tensor: torch.Tensor, start: Callable[[Any], Any], limit: timedelta | None = None
    ) -> torch.Tensor:
        if self.broken is None and self.size == 1:
            return tensor
        failure = self.broken
        if failure is None:
            self.begun.count += 1
            on_stream = tensor.is_cuda and "cuda" in self._groups
            self.on_begin(name, on_stream)
            self.on_wait(True)
            began = Clocks.now()
            self.waiting = began if limit is None else None
            failure = self._wait(start, "cuda" if tensor.is_cuda else "cpu", limit or self._timeout)
            self.waiting = None
            if failure is not None:
                # No member is late if gloo gives up early because the wall clock was set forward.
                is_long = began.seconds() >= self.limit_seconds / 2
                self.timed_out = self.timed_out or (is_long and "timed out" in failure.lower())
                self.drop(failure)
            self.on_wait(False, failure is None)
            self.on_end(name, on_stream)
        if failure is not None:  # outside any `except`: the collective's exception must not live on as a context
            raise PeerLost(f"{name} among {count(self.size, 'member')} failed: {failure}")
        return tensor

    def _wait(self, start: Callable[[Any], Any], device: str, limit: timedelta) -> str | None:
        try:
            works = start(self._backend(device))
            if not isinstance(works, list):
                works.wait()
                return None
            waits = [Wait(works.pop(0)) for _ in range(len(works))]
        except (RuntimeError, AssertionError) as error:  # torchft asserts that a group was not aborted
            return plain_reason(error)
        for wait in waits:
            failure = self._finish(wait, limit)
            if failure is not None:
                return failure
        return None

    def _backend(self, device: str) -> Any:
        """Return the group that starts collectives: torch's own for gloo, to which torchft adds nothing."""
        return self._groups["cuda"] if device == "cuda" and "cuda" in self._groups else self._groups["cpu"].parent

    def _finish(self, wait: Wait, limit: timedelta) -> str | None:
        """Wait for a message or until the group is dropped; return the failure, or None."""
        self._waits.add(wait)
        try:
            failure = self.broken or wait.run(limit)
            return failure and (self.broken or failure)
        finally:
            self._waits.discard(wait)

    @property
    def is_elastic(self) -> bool:
        """Whether the group belongs to a job, whose members may change."""
        return self.on_wait is not _ignore_wait

    @property
    def limit_seconds(self) -> float:
        """Seconds that a collective waits for a silent member."""
        return self._timeout.total_seconds()

    def wait_for_collectives(self) -> bool:
        """Wait for the GPU; return whether all collectives have succeeded. NCCL's own waits only order streams."""
        nccl = self._groups.get("cuda") if self.size > 1 else None
        if nccl is None:
            return True
        torch.cuda.current_stream().synchronize()
        return self.broken is None and not _has_failed(nccl)

    def check_nccl(self) -> None:
        """Check that NCCL has not failed. Call it after the host has read the result of a collective on a GPU.

        After a failure the result holds arbitrary values.

        Raises:
            PeerLost: NCCL has failed.
        """
        nccl = self._groups.get("cuda") if self.size > 1 else None
        if nccl is not None and (self.broken is not None or _has_failed(nccl)):
            self.drop("NCCL has failed")
            raise PeerLost(f"a collective among {count(self.size, 'member')} failed: {self.broken}")

    def drop(self, reason: str) -> None:
        """Close this member's sockets, so that peers that wait for it fail at once. Idempotent."""
        self.drop_alone(reason)
        for other in self.linked:
            other.drop_alone(reason)
        if self.transport is not None:
            self.transport.drop(reason)

    def drop_alone(self, reason: str) -> None:
        """Close this member's sockets of this group alone, not those of linked objects."""
        self.broken = self.broken or reason
        self._posted = []
        for name, group in self._groups.items():
            if name == "cpu" and self.size > 1 and group._pg is not None:  # an abort ends NCCL's waits
                end_waits(group, self.rank, self.size)
            group.abort(errored=False)
        for wait in list(self._waits):
            wait.end_wait()

    def rebuild(self, store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
        """Connect the members of a new epoch. `store` has a prefix that no other epoch uses."""
        self.drop_alone("the group is being rebuilt")
        if not self._groups:
            self._groups["cpu"] = _gloo(self._address, timeout)
        self.rank, self.size, self._timeout = rank, size, timeout
        self.is_alone = size == 1
        self.begun = Begun()
        if size > 1:
            gloo = self._groups["cpu"]
            gloo.set_timeout(min(connect_timeout(size), timeout))
            gloo._pg = gloo._create_pg(dist.PrefixStore("cpu", store), rank, size)
            gloo._pg._get_backend(torch.device("cpu")).set_timeout(timeout)
            if device.type == "cuda":
                self._connect_gpus(store, device)
        self.broken = None

    def _connect_gpus(self, store: Any, device: torch.device) -> None:
        """Connect the members' GPUs by NCCL, unless some share one."""
        torch.cuda.set_device(device)
        self.broken = None
        if share_a_gpu(self, device):
            if self.rank == 0:
                logger.warning(
                    "several members share a GPU, which NCCL does not support: their tensors travel over gloo"
                )
            self._groups.pop("cuda", None)
            return
        keep_alive_after_nccl_failure()
        if "cuda" not in self._groups:
            self._groups["cuda"] = torchft().process_group.ProcessGroupNCCL(timeout=self._timeout)
        nccl = self._groups["cuda"]
        nccl._pg = nccl._create_pg(dist.PrefixStore("cuda", store), self.rank, self.size)
