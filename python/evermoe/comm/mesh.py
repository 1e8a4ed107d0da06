"""Connections of a group's members for tensors on the CPU, whose messages `src/mesh/` moves in the calling thread.

A collective sends to all members at once, and waits for one message of each. Sums are made in the order of ranks, so
that all members get the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from evermoe import _native
from evermoe.comm.endpoint import LOOPBACK, Endpoint

CONNECT_SECONDS = 3.0
"""Time to connect, per hundred members. All were alive moments ago, so one that takes longer has failed."""
SMALL_BYTES = 16 << 10
"""Largest tensor that each member sums alone. Of a larger one each sums a part, so that fewer bytes travel."""
PART_BYTES = 256 << 10
"""Largest part that a member sums at a time. Its memory is used again for the next one, and stays in the cache."""
ALL_REDUCE, ALL_GATHER, ALL_TO_ALL = (_native.MESH_COLLECTIVE + kind for kind in range(3))
"""Tags of collectives: of members whose scripts differ, none takes the values of another kind for its own."""
_Memory = tuple[int, int]
"""Address and bytes; the tensor must live until the call returns."""
LOCAL = Endpoint(LOOPBACK, LOOPBACK)
"""Endpoint of members that are on one machine."""


def connect_timeout(size: int) -> timedelta:
    """Return the time for connecting `size` ranks that are all running."""
    return timedelta(seconds=CONNECT_SECONDS * (1 + size // 100))


class Mesh:
    """Connections of the members, none at first. Each call returns why it failed, or None.

    Args:
        endpoint: address by which others reach this member, and the one on which it listens.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._native: _native.Mesh | None = None
        self.timeout = timedelta(0)
        """Time for which a call waits while no member sends or receives anything."""
        self._rank, self._size = 0, 1

    def connect(self, store: dist.Store, rank: int, size: int) -> None:
        """Connect the members of a new epoch; the previous connections are closed.

        Raises:
            RuntimeError, ConnectionError: a member does not come within `connect_timeout`.
        """
        listening = _native.MeshListening(self._endpoint.address)
        host = self._endpoint.host
        name = f"[{host}]:{listening.name}" if ":" in host else f"{host}:{listening.name}"
        store.set(f"mesh{rank}", name.encode())  # type: ignore[arg-type]
        limit = min(connect_timeout(size), self.timeout)
        keys = [f"mesh{each}" for each in range(size)]
        store.wait(keys, limit)
        names = [store.get(key).decode() for key in keys]
        try:
            self._native = listening.connect(rank, names, limit.total_seconds())
        except OSError as error:
            raise ConnectionError(str(error)) from None
        self._rank, self._size = rank, size

    def all_reduce(self, tensor: Tensor) -> str | None:
        """Replace a tensor by its sum over all members; numbers of 16 bits are summed in float32 and rounded once."""
        flat = tensor.detach().to("cpu").reshape(-1).contiguous()
        if flat.nbytes <= SMALL_BYTES:
            rows = flat.new_empty((self._size, len(flat)))
            failure = self._all_to_all(ALL_REDUCE, [_memory(flat)] * self._size, self._rows(rows))
            if failure is None:
                tensor.detach().copy_(_sum(rows).view_as(tensor))
            return failure
        part = min(PART_BYTES // flat.itemsize, -(-len(flat) // self._size))
        rows = flat.new_empty((self._size, part))
        failure = None
        for piece in flat.split(self._size * part):
            failure = failure or self._sum_parts(piece.tensor_split(self._size), rows)
        if failure is None and flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view_as(tensor))
        return failure

    def _sum_parts(self, parts: Sequence[Tensor], memory: Tensor) -> str | None:
        """Replace each part by its sum over all members, of which each sums its own.

        Args:
            parts: one for each member, contiguous.
            memory: contiguous, for as many parts of the first one's size.
        """
        own = parts[self._rank]
        rows, places = memory.view(-1)[: self._size * len(own)].view(self._size, -1), [_memory(part) for part in parts]
        failure = self._all_to_all(ALL_REDUCE, places, self._rows(rows))
        if failure is None:
            total = _sum(rows)
            failure = self._all_to_all(ALL_REDUCE, [_memory(total)] * self._size, places)
        return failure

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> str | None:
        """Gather the contiguous tensor of each member into `[size, *tensor.shape]`."""
        rows, own = _on_cpu(gathered), tensor.detach().to("cpu")
        failure = self._all_to_all(ALL_GATHER, [_memory(own)] * self._size, self._rows(rows))
        return _copy_back(gathered, rows, failure)

    def all_to_all(self, received: Tensor, rows: Tensor, receive: list[int], send: list[int]) -> str | None:
        """Exchange rows as `Group.all_to_all` does; both tensors are contiguous."""
        into, own = _on_cpu(received), rows.detach().to("cpu")
        failure = self._all_to_all(ALL_TO_ALL, _split(own, send), _split(into, receive))
        return _copy_back(received, into, failure)

    def _all_to_all(self, tag: int, sends: Sequence[_Memory], receives: Sequence[_Memory]) -> str | None:
        native = self._native
        if native is None:
            return "the group was dropped"
        return native.all_to_all(tag, sends, receives, self.timeout.total_seconds())

    def _rows(self, rows: Tensor) -> list[_Memory]:
        """Return the memory of each row of `[size, ...]`."""
        return _split(rows, [1] * self._size)

    def exchange(
        self, tag: int, sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]], limit: timedelta
    ) -> str | None:
        """Exchange contiguous tensors as `Group.exchange` does."""
        native = self._native
        if native is None:
            return "the group was dropped"
        out, into = ([(rank, _memory(tensor)) for tensor, rank in each] for each in (sends, receives))
        return native.exchange(tag, out, into, limit.total_seconds())

    def post(self, tensor: Tensor, ranks: Iterable[int], tag: int) -> str | None:
        """Begin to send a tensor without waiting for its receivers."""
        native = self._native
        if native is None:
            return "the group was dropped"
        return native.post(tag, tensor.numpy().tobytes(), list(ranks))

    def close(self) -> None:
        """Close the connections to the other members, which ends all waits, from any thread."""
        native, self._native = self._native, None
        if native is not None:
            native.close()


def _memory(tensor: Tensor) -> _Memory:
    if tensor.is_cuda or not tensor.is_contiguous():
        raise ValueError(
            f"expected a contiguous tensor on the CPU, got one on {tensor.device} of shape {tuple(tensor.shape)} and "
            f"strides {tensor.stride()}"
        )
    return tensor.data_ptr(), tensor.nbytes


def _split(tensor: Tensor, counts: Iterable[int]) -> list[_Memory]:
    """Return the memory of consecutive numbers of rows of a contiguous tensor."""
    address, each = tensor.data_ptr(), tensor.nbytes // max(1, len(tensor))
    sizes = [count * each for count in counts]
    return list(zip(itertools.accumulate(sizes, initial=address), sizes, strict=False))


def _sum(rows: Tensor) -> Tensor:
    """Return the sum of rows `[size, n]` in their order, `[n]`."""
    total, *others = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
    for row in others:
        total += row
    return total.to(rows.dtype)


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor, or memory for its values if it is on a GPU."""
    return torch.empty_like(tensor, device="cpu") if tensor.is_cuda else tensor


def _copy_back(tensor: Tensor, on_cpu: Tensor, failure: str | None) -> str | None:
    if tensor.is_cuda and failure is None:
        tensor.copy_(on_cpu)
    return failure
