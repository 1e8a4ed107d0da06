"""Collectives among the GPUs of a job's members, by NCCL communicators that any thread can abort at any time."""

from __future__ import annotations

import atexit
import functools
import os
import uuid
from datetime import timedelta

import torch

from evermoe import _native

TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""`ncclDataType_t` of the types that can be summed."""
EXIT_SECONDS = 2.0
"""Time that the end of a process gives to aborts under way: CUDA must not end under them."""


@functools.cache
def _await_aborts_at_exit() -> None:
    atexit.register(_native.wait_for_nccl_aborts, EXIT_SECONDS)


def gpu_identity(device: torch.device) -> torch.Tensor:
    """Return the UUID of a GPU, as int64 `[2]`."""
    identity = uuid.UUID(str(torch.cuda.get_device_properties(device).uuid))
    return torch.frombuffer(bytearray(identity.bytes), dtype=torch.int64)


def may_share_a_gpu() -> bool:
    """Whether NCCL is set to let several processes use one GPU, which its versions from 2.30 can do."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def new_name() -> torch.Tensor:
    """Return the name of a new communicator, as bytes `[128]`; NCCL then waits for its ranks in this process."""
    return torch.frombuffer(bytearray(_native.nccl_unique_id()), dtype=torch.uint8)


def no_name() -> torch.Tensor:
    """Return what the other members send instead of a name."""
    return torch.zeros(_native.NCCL_NAME_BYTES, dtype=torch.uint8)


def check_environment() -> None:
    """Check that NCCL's settings allow an abort while other processes of the node still run.

    Raises:
        ValueError: NCCL_CUMEM_ENABLE=0. GPUs of a node then share memory that one process may free while a kernel of
            another still uses it.
    """
    if os.environ.get("NCCL_CUMEM_ENABLE") == "0" and os.environ.get("NCCL_P2P_DISABLE") != "1":
        raise ValueError(
            "NCCL_CUMEM_ENABLE=0: processes of a node would share memory that a member frees when it leaves a group, "
            "while kernels of others may still use it. Unset it, or set NCCL_P2P_DISABLE=1 as well."
        )


class Nccl:
    """This member's end of a communicator among GPUs; collectives run on the current stream.

    Members must call the same collectives in the same order, one thread at a time. After `abort`, collectives end
    with arbitrary results: ask `failure` once the host has read one.

    Args:
        name: of the communicator, from `new_name` of one member.
        rank: of this member.
        size: number of members.
        limit: longest wait for other members: of the host, while it connects or launches, and of the GPU in a
            collective. Then the communicator is aborted.

    Raises:
        RuntimeError: this process has no NCCL, or NCCL refuses.
        ValueError: see `check_environment`.
    """

    def __init__(self, name: torch.Tensor, rank: int, size: int, limit: timedelta) -> None:
        check_environment()
        device = torch.cuda.current_device()
        self._own = _native.NcclCommunicator(name.numpy().tobytes(), rank, size, device, limit.total_seconds())
        _await_aborts_at_exit()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor by its sum over all members."""
        if tensor.dtype not in TYPES or not tensor.is_contiguous():
            layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
            raise ValueError(f"all_reduce: expected a contiguous tensor of numbers, got {tensor.dtype}, {layout}")
        self._own.all_reduce(tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype], _stream())

    def all_gather(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        """Gather a tensor of each member into the rows of `into`; both are contiguous."""
        self._own.all_gather(tensor.data_ptr(), into.data_ptr(), tensor.nbytes, _stream())

    def all_to_all(
        self, into: torch.Tensor, rows: torch.Tensor, receive_counts: list[int], send_counts: list[int]
    ) -> None:
        """Send rows to each member and receive rows from it, both contiguous and by rank."""
        width = rows.stride(0) * rows.element_size() if rows.dim() else 0
        sent, received = ([count * width for count in counts] for counts in (send_counts, receive_counts))
        self._own.all_to_all(rows.data_ptr(), sent, into.data_ptr(), received, _stream())

    def mark(self) -> None:
        """Note that the host may wait from now on for what the current stream has to do."""
        self._own.mark(_stream())

    def has_waited(self, seconds: float) -> bool:
        """Whether the GPU has waited longer than `seconds` in the latest collective; it calls no driver."""
        return self._own.has_waited(seconds)

    def has_timed_out(self) -> bool:
        """Whether the communicator was aborted as the GPU had waited for the limit."""
        return self._own.has_timed_out()

    def end(self) -> str | None:
        """Return why the communicator was aborted, or None; it calls neither NCCL nor the driver."""
        return self._own.end()

    def failure(self) -> str | None:
        """Return why results cannot be trusted, or None; it does not wait for the GPU."""
        return self._own.failure()

    def abort(self) -> None:
        """End all collectives and waits, and return at once; for any thread."""
        self._own.abort()


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
