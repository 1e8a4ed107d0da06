"""Collectives among the members of a job, and their failures: on the CPU by `comm.mesh`, on GPUs by NCCL.

A member that sees an error closes its own sockets *before* it waits for others, or its peers would wait for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch

from evermoe.comm.begun import Begun
from evermoe.comm.endpoint import Endpoint
from evermoe.comm.mesh import LOCAL, Mesh
from evermoe.comm.nccl import Nccl, gpu_identity, may_share_a_gpu, new_name, no_name
from evermoe.comm.plain_reason import plain_reason
from evermoe.comm.transport import Transport
from evermoe.errors import PeerLost
from evermoe.options import count

logger = logging.getLogger(__name__)


def _ignore(name: str, on_stream: bool) -> None:
    pass


class OnWait(Protocol):
    """Callback before and after a wait for other members."""

    def __call__(self, begins: bool, has_succeeded: bool = True) -> None:
        """`begins`: True before the wait, False after it. `has_succeeded`: after it, whether the wait succeeded."""


def _ignore_wait(begins: bool, has_succeeded: bool = True) -> None:
    pass


def share_a_gpu(group: Group, device: torch.device) -> bool:
    """Return whether several members of a group share a GPU, which NCCL does not support by default. Collective.

    Args:
        group: the members.
        device: the GPU of this member.

    Raises:
        PeerLost: a member is lost.
    """
    return len(group.all_gather(gpu_identity(device)).unique(dim=0)) < group.size and not may_share_a_gpu()


class Linked(Protocol):
    """An object that is dropped together with a group."""

    def drop_alone(self, reason: str) -> None:
        """Drop this object from any thread, without the objects linked to it."""


class Group:
    """The current members and the collectives among them; `rank` and `size` change with the membership.

    A new `Group()` has one member and needs no network. When a peer fails, this member's sockets are closed and
    `PeerLost` is raised; from then on every call raises `PeerLost` until the group is rebuilt. Tensors on the CPU
    travel over TCP, tensors on a GPU over NCCL. If several members share a GPU, which NCCL does not support by
    default, all travel over TCP.

    One thread may drop the group while others wait in it.

    Args:
        endpoint: address by which others reach this member, and the one on which it listens.
    """

    def __init__(self, endpoint: Endpoint = LOCAL) -> None:
        self.rank = 0
        self.size = 1
        self.is_alone = True
        """Whether `size` is 1; compiled graphs depend on this alone."""
        self._mesh = Mesh(endpoint)
        self.nccl: Nccl | None = None
        """Communicator of the members' GPUs; None if their tensors travel over TCP."""
        self.broken: str | None = None
        self.finishes_steps = False
        """Whether a step that loses a member runs to its end; see `evermoe.comm.step_exchanges`."""
        self.begun = Begun()
        """Collectives begun since the group was connected, or since a reader replaced the counter."""
        self.timed_out = False
        """Whether a collective has timed out; reset by the failure detector."""
        self.waiting: float | None = None
        """When the collective that this member waits for began, by `time.monotonic`; None outside collectives."""
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
        return self._call(
            "all_reduce", tensor, lambda: self._mesh.all_reduce(tensor), lambda nccl: nccl.all_reduce(tensor)
        )

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of each member, by rank: `[size, *tensor.shape]`. Shapes must agree."""
        if self.size == 1 and self.broken is None:
            return tensor.unsqueeze(0).clone()
        gathered, tensor = tensor.new_empty((self.size, *tensor.shape)), tensor.contiguous()
        self._call(
            "all_gather",
            tensor,
            lambda: self._mesh.all_gather(gathered, tensor),
            lambda nccl: nccl.all_gather(gathered, tensor),
        )
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
        self._call(
            "all_to_all",
            rows,
            lambda: self._mesh.all_to_all(received, rows, receive_counts, send_counts),
            lambda nccl: nccl.all_to_all(received, rows, receive_counts, send_counts),
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

        Between two members, messages of a tag pair up in the order in which each side lists them. The tensors must be
        contiguous and on the CPU.

        Args:
            sends: tensors and their destination ranks.
            receives: tensors and their source ranks.
            tag: tag of these messages; see `comm.tags`.
            limit: time to wait for a silent member; None: that of a collective.
        """
        if not sends and not receives:
            return
        wait = limit or self._mesh.timeout
        first = (sends or receives)[0][0]
        self._call("exchange", first, lambda: self._mesh.exchange(tag, sends, receives, wait), is_timed=limit is None)

    def post(self, tensor: torch.Tensor, ranks: Iterable[int], tag: int) -> None:
        """Begin to send a tensor on the CPU to ranks that receive it by `exchange`, without waiting for them.

        The ranks must have received the messages of the previous call.
        """
        failure = self._mesh.post(tensor, ranks, tag) if self.broken is None and self.size > 1 else None
        if failure is not None:
            self.drop(failure)

    def _call(
        self,
        name: str,
        tensor: torch.Tensor,
        run: Callable[[], str | None],
        launch: Callable[[Nccl], None] | None = None,
        *,
        is_timed: bool = True,
    ) -> torch.Tensor:
        """Run a collective: `run` returns its failure, or None; `launch` puts it on the GPU's stream by NCCL."""
        if self.broken is None and self.size == 1:
            return tensor
        failure = self.broken
        if failure is None:
            self.begun.add(name, tensor)
            nccl = self.nccl if tensor.is_cuda and launch is not None else None
            on_stream = nccl is not None
            self.on_begin(name, on_stream)
            self.on_wait(True)
            self.waiting = time.monotonic() if is_timed else None
            try:
                failure = run() if nccl is None or launch is None else self._launch(nccl, launch)
            finally:  # a signal handler may raise while this member waits
                self.waiting = None
            if failure is not None:
                failure = self.broken or failure
                self.timed_out = self.timed_out or failure.startswith("timed out")
                self.drop(failure)
            self.on_wait(False, failure is None)
            self.on_end(name, on_stream)
        if failure is not None:  # outside any `except`: the collective's exception must not live on as a context
            raise PeerLost(f"{name} among {count(self.size, 'member')} failed: {failure}")
        return tensor

    def _launch(self, nccl: Nccl, launch: Callable[[Nccl], None]) -> str | None:
        try:
            launch(nccl)
        except RuntimeError as error:
            return self.broken or plain_reason(error)
        return None

    @property
    def gives_zeros(self) -> bool:
        """Whether exchanges of the step give zeros, as a member is lost and the step runs to its end."""
        return self.finishes_steps and self.broken is not None

    @property
    def is_elastic(self) -> bool:
        """Whether the group belongs to a job, whose members may change."""
        return self.on_wait is not _ignore_wait

    @property
    def limit_seconds(self) -> float:
        """Seconds that a collective waits for a silent member."""
        return self._mesh.timeout.total_seconds()

    def wait_for_collectives(self) -> bool:
        """Wait for the GPU; return whether all collectives have succeeded, as those of NCCL only order the stream."""
        if self.nccl is None:
            return True
        self.nccl.mark()
        torch.cuda.current_stream().synchronize()
        return self.broken is None and self.nccl.failure() is None

    def check_nccl(self) -> None:
        """Check that NCCL has not failed. Call it after the host has read the result of a collective on a GPU.

        After a failure the result holds arbitrary values.

        Raises:
            PeerLost: NCCL has failed.
        """
        if self.nccl is None:
            return
        failure = self.broken or self.nccl.failure()
        if failure is not None:
            self.drop(failure)
            raise PeerLost(f"a collective among {count(self.size, 'member')} failed: {self.broken}")

    def drop(self, reason: str) -> None:
        """Close this member's sockets, so that peers that wait for it fail at once. Idempotent."""
        self.drop_alone(reason)
        if self.transport is not None:
            self.transport.drop(reason)
        for other in self.linked:  # last: torch's own groups may make an abort wait
            other.drop_alone(reason)

    def drop_alone(self, reason: str) -> None:
        """Close this member's sockets of this group alone, not those of linked objects."""
        if self.broken is None and self.nccl is not None and self.nccl.has_timed_out():
            self.timed_out = True
        self.broken = self.broken or reason
        if self.nccl is not None:
            self.nccl.abort()
        self._mesh.close()

    def rebuild(self, store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
        """Connect the members of a new epoch. `store` has a prefix that no other epoch uses."""
        self.drop_alone("the group is being rebuilt")
        self.nccl, self._mesh.timeout = None, timeout
        self.rank, self.size = rank, size
        self.is_alone = size == 1
        self.begun = Begun()
        if size > 1:
            self._mesh.connect(store, rank, size)
            if device.type == "cuda":
                self._connect_gpus(device)
        self.broken = None

    def _connect_gpus(self, device: torch.device) -> None:
        """Connect the members' GPUs by NCCL, unless some share one."""
        torch.cuda.set_device(device)
        self.broken = None
        if share_a_gpu(self, device):
            if self.rank == 0:
                logger.warning(
                    "several members share a GPU, which NCCL allows only with NCCL_MULTI_RANK_GPU_ENABLE=1: their "
                    "tensors travel over TCP"
                )
            return
        names = self.all_gather(new_name() if self.rank == 0 else no_name())
        self.nccl = Nccl(names[0], self.rank, self.size, self._mesh.timeout)
