"""Plan of a forward's exchange of tokens, on the host and on the layer's device: with one wait for a GPU, or none.

Shape suffixes: R ranks, E experts, e local experts, T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evermoe import ops
from evermoe.comm.collectives import all_to_all
from evermoe.comm.group import Group
from evermoe.errors import UnsupportedState
from evermoe.moe.expert import Weighted
from evermoe.ops.dispatch import invert_positions

PADDED_BYTES = 64 << 20
"""Largest buffer of a padded exchange; a larger one would cost more time than the wait that it saves."""
MAX_RANKS = 755
"""Maximum number of ranks over which a GPU can split tokens (`ops.split_tokens`)."""
ALIGNMENT = 16
"""Bytes to which parts of one copy are aligned, for tensors of any type."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of rows in one forward that the host knows."""

    sent_R: list[int]
    """Rows to each rank, padding included."""
    received_R: list[int]
    """Rows from each rank, padding included."""
    lengths_e: list[int] | None
    """Rows of each local expert; None if the host does not know them."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Numbers of rows from and to each rank and expert in one forward; R is 1 if all ranks keep their tokens."""

    share_E: Tensor
    """float64: fraction of all ranks' tokens that go to each expert."""
    send_ER: Tensor
    """int64: rows for each expert on each rank."""
    receive_Re: Tensor
    """int64: rows from each rank for each local expert; padding counts as rows of an additional last expert."""
    ends_e: Tensor
    """int32: ends of the local experts' rows in the order of experts."""
    read_sizes: Callable[[], Sizes]
    """Return the host's numbers; may wait for a GPU. Called once."""
    starts_R: Tensor | None = None
    """int64: start of each rank's part among the sent rows; None without padding."""

    @cached_property
    def sizes(self) -> Sizes:
        """Numbers of rows that the host knows. It may wait for them at the first use: launch all other work before."""
        return self.read_sizes()

    @staticmethod
    def of(
        device: torch.device, tokens_E: np.ndarray, send_ER: np.ndarray, receive_RE: np.ndarray, experts: Sequence[int]
    ) -> Exchange:
        """Create an exchange from a plan of the host.

        Args:
            device: of the layer.
            tokens_E: int64, all ranks' tokens of each expert.
            send_ER: int64, from `planning.split_tokens`.
            receive_RE: int64, from `planning.split_tokens`.
            experts: the local experts.
        """
        receive_Re = receive_RE[:, experts]
        lengths_e = receive_Re.sum(0)
        ends_e = lengths_e.cumsum().astype(np.int32)
        arrays = [tokens_E / max(tokens_E.sum(), 1), send_ER, receive_Re, ends_e]
        on_device = copy_to(arrays, device)
        sizes = Sizes(
            sent_R=send_ER.sum(0).tolist(), received_R=receive_RE.sum(1).tolist(), lengths_e=lengths_e.tolist()
        )
        return Exchange(
            share_E=on_device[0],
            send_ER=on_device[1],
            receive_Re=on_device[2],
            ends_e=on_device[3],
            read_sizes=lambda: sizes,
        )

    @staticmethod
    def alone(tokens_RE: Tensor, rows: int, host: HostMemory | None) -> Exchange:
        """Plan the exchange of a single rank.

        Args:
            tokens_RE: int64 on the layer's device, tokens of this rank for each expert.
            rows: number of choices, including those of no expert.
            host: memory for the rows of each expert, for which the host waits. None: it waits for nothing.
        """
        if host is not None:
            refuse_capture()
        tokens_E = tokens_RE.squeeze(0)
        read = None if host is None else host.begin_read(tokens_E)
        return Exchange(
            share_E=tokens_E.double() / tokens_E.sum().clamp(min=1),
            send_ER=tokens_E.unsqueeze(1),
            receive_Re=tokens_RE,
            ends_e=tokens_E.cumsum(0).to(torch.int32),
            read_sizes=lambda: Sizes(sent_R=[rows], received_R=[rows], lengths_e=read and read().tolist()),
        )

    @staticmethod
    def lost(counts_E: Tensor, ranks: int, lengths_e: Sequence[int]) -> Exchange:
        """Plan an exchange that gives zeros, as a member is lost: it fits this rank's tokens, and no other rank's plan.

        Args:
            counts_E: int64, this rank's tokens of each expert; all of them are sent to rank 0.
            ranks: R of the exchange, 1 if its first forward has sent none.
            lengths_e: number of rows of each local expert, which all come from rank 0.
        """
        send_ER, receive_Re = counts_E.new_zeros(len(counts_E), ranks), counts_E.new_zeros(ranks, len(lengths_e))
        send_ER[:, 0], receive_Re[0] = counts_E, counts_E.new_tensor(lengths_e)
        none, tokens = [0] * (ranks - 1), counts_E.sum()
        sizes = Sizes(sent_R=[int(tokens), *none], received_R=[sum(lengths_e), *none], lengths_e=list(lengths_e))
        return Exchange(
            share_E=counts_E.double() / tokens.clamp(min=1),
            send_ER=send_ER,
            receive_Re=receive_Re,
            ends_e=receive_Re[0].cumsum(0).to(torch.int32),
            read_sizes=lambda: sizes,
        )

    @staticmethod
    def padded(tokens_RE: Tensor, padding: Padding, rank: int) -> Exchange:
        """Plan a padded exchange on the device: the host waits for nothing, and no shape depends on a value.

        Replicas of an expert share its tokens evenly.

        As the host reads nothing, it cannot refuse the arbitrary counts that an aborted collective leaves. They result
        in arbitrary rows, but in no access out of range: after a failed assert the process could not use its GPU.

        Args:
            tokens_RE: int64 on the layer's device, tokens of each rank for each expert.
            padding: of the placement.
            rank: of this process.
        """
        received_R = [padding.most_R[rank]] * len(padding.most_R)
        tokens_RE = tokens_RE.clamp(0, max(padding.most_R))
        send_ER, receive_Re = padding.split(tokens_RE, rank)
        rest_R1 = padding.most_R[rank] - receive_Re.sum(1, keepdim=True)
        tokens_E = tokens_RE.sum(0)
        return Exchange(
            share_E=tokens_E.double() / tokens_E.sum().clamp(min=1),
            send_ER=send_ER,
            receive_Re=torch.cat([receive_Re, rest_R1], 1),
            ends_e=receive_Re.sum(0).cumsum(0).clamp_(max=sum(received_R)).to(torch.int32),
            read_sizes=lambda: Sizes(sent_R=padding.most_R, received_R=received_R, lengths_e=None),
            starts_R=padding.starts_R,
        )

    @staticmethod
    def plan_on_device(
        tokens_RE: Tensor,
        placed: Placed,
        rank: int,
        host: HostMemory,
        on_read: Callable[[NDArray[np.int64]], None],
    ) -> Exchange:
        """Plan an exchange with exact sizes on the device; the host waits once, when it needs the sizes.

        Replicas of an expert share its tokens evenly.

        Args:
            tokens_RE: int64 on the layer's device, tokens of each rank for each expert.
            placed: the placement.
            rank: of this process.
            host: memory for the sizes.
            on_read: called after the wait and before the sizes are used, with int64 `[E]`: all ranks' tokens of each
                expert, valid until the next read.
        """
        send_ER, receive_Re = placed.split(tokens_RE, rank)
        tokens_E, lengths_e = tokens_RE.sum(0), receive_Re.sum(0)
        parts = [tokens_E, send_ER.sum(0), receive_Re.sum(1), lengths_e]
        read = host.begin_read(torch.cat(parts))

        def read_sizes() -> Sizes:
            counted_E, sent_R, received_R, rows_e = np.split(read(), [*accumulate(map(len, parts[:-1]))])
            on_read(counted_E)
            return Sizes(sent_R=sent_R.tolist(), received_R=received_R.tolist(), lengths_e=rows_e.tolist())

        return Exchange(
            share_E=tokens_E.double() / tokens_E.sum().clamp(min=1),
            send_ER=send_ER,
            receive_Re=receive_Re,
            ends_e=lengths_e.cumsum(0).to(torch.int32),
            read_sizes=read_sizes,
        )

    def move(self, rows: Tensor, group: Group, *, is_return: bool = False) -> Tensor:
        """Send rows to their experts' ranks, or outputs back; return the received rows. Collective and differentiable.

        Rows after the sent ones, which are choices of no expert, are left out. The host waits for the sizes.
        """
        sent_R, received_R = self.sizes.sent_R, self.sizes.received_R
        if is_return:
            sent_R, received_R = received_R, sent_R
        rows = rows.narrow(0, 0, sum(sent_R))
        return rows if len(sent_R) == 1 else all_to_all(rows, sent_R, received_R, group)

    def by_expert(self, rows: Tensor) -> Tensor:
        """Reorder rows from (source rank, local expert) to (expert, source); differentiable."""
        return ops.regroup(rows, self.receive_Re) if self._is_mixed else rows

    def by_source(self, rows: Tensor) -> Tensor:
        """Invert `by_expert`."""
        return ops.regroup(rows, self.receive_Re, inverse=True) if self._is_mixed else rows

    @property
    def _is_mixed(self) -> bool:
        """Return whether the two orders differ: they are equal for a single source or a single expert."""
        return min(self.receive_Re.shape) > 1

    def pad(self, positions_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Pad a dispatch plan: each rank's rows are at the start of its part.

        Args:
            positions_TK: from `ops.dispatch_plan`.

        Returns:
            `row_ids` and `positions_TK`, as `ops.dispatch_plan` returns them.

        Example: with at most 3 rows per rank, 2 for rank 0 and 1 for rank 1: positions `[[0, 2], [1, -1]]` become
        `[[0, 3], [1, -1]]`, and row_ids are `[0, 2, -1, 1, -1, -1]`.
        """
        assert self.starts_R is not None, "the exchange is padded"
        rows_R = self.send_ER.sum(0)
        ends_R = rows_R.cumsum(0)
        shifts_R = (self.starts_R - ends_R + rows_R).to(positions_TK.dtype)
        # Without the last end, no position is beyond the last rank, whatever the counts are.
        ranks_TK = torch.searchsorted(ends_R[:-1].to(positions_TK.dtype), positions_TK, right=True)
        padded_TK = positions_TK + shifts_R.take(ranks_TK)
        return invert_positions(padded_TK, sum(self.sizes.sent_R)), padded_TK


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The placement on the layer's device, for exchanges that the device plans."""

    replicas_RE: Tensor
    """int64: replicas of each expert on each rank."""
    experts_e: Tensor
    """int64: the local experts."""

    @staticmethod
    def on(device: torch.device, matrix_RE: np.ndarray, experts: Sequence[int]) -> Placed:
        """Copy a placement to a device.

        Args:
            device: of the layer.
            matrix_RE: replicas of each expert on each rank.
            experts: the local experts.
        """
        arrays = [np.asarray(matrix_RE, np.int64), np.asarray(experts, np.int64)]
        replicas_RE, experts_e = copy_to(arrays, device)
        return Placed(replicas_RE=replicas_RE, experts_e=experts_e)

    def split(self, tokens_RE: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return `send_ER` and `receive_Re` of an `Exchange`, by Algorithm 1 of Lazarus and without a wait."""
        send_ER, receive_RE = ops.split_tokens(tokens_RE.t(), self.replicas_RE, rank)
        return send_ER, receive_RE.index_select(1, self.experts_e)


@dataclass(frozen=True, kw_only=True)
class Padding(Placed):
    """The placement on the layer's device, for exchanges that are padded to the worst case."""

    most_R: list[int]
    """Maximum number of rows that one rank can send to each rank."""
    starts_R: Tensor
    """int64: start of each rank's part, the sum of `most_R` of all previous ranks."""

    @staticmethod
    def of(matrix_RE: np.ndarray, experts: Sequence[int], max_tokens: int, top_k: int, device: torch.device) -> Padding:
        """Create the padding of a placement.

        Args:
            matrix_RE: replicas of each expert on each rank.
            experts: the local experts.
            max_tokens: maximum number of tokens of a rank.
            top_k: K.
            device: of the layer.
        """
        most_R = max_tokens * top_k * (np.count_nonzero(matrix_RE, axis=1) > 0)
        arrays = [most_R.cumsum() - most_R, np.asarray(matrix_RE, np.int64), np.asarray(experts, np.int64)]
        starts_R, replicas_RE, experts_e = copy_to(arrays, device)
        return Padding(most_R=most_R.tolist(), starts_R=starts_R, replicas_RE=replicas_RE, experts_e=experts_e)

    def fits(self, row_bytes: int) -> bool:
        """Return whether padding saves more than it costs, and a GPU can split the tokens; the same on all ranks."""
        ranks = len(self.most_R)
        return ranks <= MAX_RANKS and ranks * max(self.most_R) * row_bytes <= PADDED_BYTES


class HostMemory:
    """Page-locked memory into which the host reads a layer's values from its GPU, kept for the next read."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def begin_read(self, tensor: Tensor) -> Callable[[], NDArray[Any]]:
        """Begin to copy the values of a tensor on a GPU, on its current stream.

        Returns:
            A function that waits for the copy and returns an array of the tensor's shape and dtype. From a GPU it is
            valid until the next read; from the CPU it shares the tensor's memory.
        """
        if not tensor.is_cuda:
            return tensor.numpy
        if self._memory is None or self._memory.dtype != tensor.dtype or self._memory.numel() < tensor.numel():
            self._memory = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
        found = self._memory[: tensor.numel()].view(tensor.shape)
        found.copy_(tensor, non_blocking=True)
        copied = torch.cuda.current_stream(tensor.device).record_event()

        def read() -> NDArray[Any]:
            copied.synchronize()
            return found.numpy()

        return read


def permute_weighted(
    x_TH: Tensor, row_ids: Tensor, positions_TK: Tensor, weights_TK: Tensor, weighted: Weighted
) -> tuple[Tensor, Tensor]:
    """Return the rows for the experts, `[N, H]`, and the weights of their outputs.

    Args:
        x_TH: tokens.
        row_ids: from `ops.dispatch_plan` or `Exchange.pad`.
        positions_TK: from the same.
        weights_TK: of the router.
        weighted: tensors that the weights multiply; with `inputs` the outputs have weights of 1.
    """
    rows_NH = ops.permute(x_TH, row_ids, positions_TK)
    if weighted == "outputs":
        return rows_NH, weights_TK
    last = len(rows_NH)  # takes the weights of choices without an expert
    places = torch.where(positions_TK < 0, last, positions_TK).long().flatten()
    weights_N = weights_TK.new_zeros(last + 1).scatter(0, places, weights_TK.flatten())[:last]
    return rows_NH * weights_N.to(rows_NH.dtype).unsqueeze(1), torch.ones_like(weights_TK)


def refuse_capture() -> None:
    """Refuse to continue in the capture of a CUDA graph, where the host can read nothing."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedState(
            "Experts: expected no capture of a CUDA graph: the host must read how many tokens go where. Give "
            "max_tokens, and bfloat16 experts whose matrices have rows of a multiple of 16 bytes"
        )


def copy_to(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return the arrays as tensors on a device; to a GPU with one asynchronous copy."""
    arrays = [np.ascontiguousarray(array) for array in arrays]
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return tensors
    starts = [0, *accumulate(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for start, array in zip(starts, arrays, strict=False):
        # By NumPy: torch refuses to view empty arrays of a stride of 0 as bytes.
        host.numpy()[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    on_device = host.to(device, non_blocking=True)
    return [
        on_device.narrow(0, start, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=False)
    ]
