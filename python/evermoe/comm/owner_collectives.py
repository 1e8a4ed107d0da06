"""Collectives of tensors with one owner each, in buckets of which every owner has an equal part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from evermoe.comm.group import Group
from evermoe.planning.footprint import BUCKET_BYTES


def reduce_to_owners(gradients_R: Sequence[Sequence[Tensor]], group: Group) -> None:
    """Sum each gradient over all ranks at its owner, in rank order and at least in float32. Collective.

    Gradients on other ranks keep their values.

    Args:
        gradients_R: the gradients that each rank owns; the same shapes and types on all ranks.
        group: the ranks.

    Example: rank 0 owns a gradient [2], rank 1 one [1]. Rank 0 sends one element to rank 1, gets two, and adds them to
    its own.
    """
    if group.size == 1:
        return
    flat_R = [[gradient.detach().reshape(-1) for gradient in gradients] for gradients in gradients_R]
    for pieces_R in _rounds(flat_R):
        some = next(piece for pieces in pieces_R for piece in pieces)
        mine, pieces_R[group.rank] = pieces_R[group.rank], []
        own = torch.cat([some[:0], *mine])
        send = [sum(len(piece) for piece in pieces) for pieces in pieces_R]
        receive = [len(own) * (rank != group.rank) for rank in range(group.size)]
        outgoing = torch.cat([some[:0], *(piece for pieces in pieces_R for piece in pieces)])
        parts = list(group.all_to_all(outgoing, send, receive).split(receive))
        parts[group.rank] = own
        total = parts[0].to(torch.promote_types(own.dtype, torch.float32), copy=True)
        for part in parts[1:]:
            total += part
        _fill(mine, total)
    _write_back(gradients_R[group.rank], flat_R[group.rank])


def send_from_owners(tensors_R: Sequence[Sequence[Tensor]], group: Group) -> None:
    """Copy tensors of any types from the rank that owns each to all others, in place. Collective.

    Args:
        tensors_R: the tensors that each rank owns; the same shapes and types on all ranks.
        group: the ranks.
    """
    if group.size == 1:
        return
    flat_R = [[tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors] for tensors in tensors_R]
    for pieces_R in _rounds(flat_R):
        some = next(piece for pieces in pieces_R for piece in pieces)
        mine = torch.cat([some[:0], *pieces_R[group.rank]])
        pieces_R[group.rank] = []  # an owner's tensors stay untouched: replicas repeat only what its steps have written
        receive = [sum(len(piece) for piece in pieces) for pieces in pieces_R]
        send = [len(mine) * (rank != group.rank) for rank in range(group.size)]
        incoming = group.all_to_all(mine.repeat(group.size - 1), send, receive)
        for pieces, part in zip(pieces_R, incoming.split(receive), strict=True):
            _fill(pieces, part)
    for rank, (tensors, flat) in enumerate(zip(tensors_R, flat_R, strict=True)):
        if rank != group.rank:
            _write_back(tensors, flat)


def _rounds(flat_R: Sequence[Sequence[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Yield rounds: for each rank pieces `[n]` of one type that it owns, together up to a bucket.

    Args:
        flat_R: tensors `[n]` that each rank owns.

    Example, with room for two elements of each rank: a tensor of 3 elements on rank 0 and one of 1 element on rank 1
    give pieces of 2 and 1 elements, then of 1 on rank 0 alone.
    """
    for dtype, device in dict.fromkeys((tensor.dtype, tensor.device) for flat in flat_R for tensor in flat):
        room = max(1, BUCKET_BYTES // dtype.itemsize // len(flat_R))
        queues = (_pieces([t for t in flat if (t.dtype, t.device) == (dtype, device)], room) for flat in flat_R)
        yield from map(list, zip_longest(*queues, fillvalue=[]))


def _pieces(flat: Sequence[Tensor], room: int) -> Iterator[list[Tensor]]:
    """Yield lists of pieces, each of `room` elements in all but the last."""
    pieces: list[Tensor] = []
    left = room
    for tensor in flat:
        start = 0
        while start < len(tensor):
            piece = tensor[start : start + left]
            pieces.append(piece)
            start, left = start + len(piece), left - len(piece)
            if not left:
                yield pieces
                pieces, left = [], room
    if pieces:
        yield pieces


def _fill(pieces: Sequence[Tensor], values: Tensor) -> None:
    """Copy values into pieces `[n]` of one type, on a GPU in one launch."""
    if pieces:
        parts = values.to(pieces[0].dtype).split([len(piece) for piece in pieces])
        torch._foreach_copy_(list(pieces), list(parts))


def _write_back(tensors: Sequence[Tensor], flat: Sequence[Tensor]) -> None:
    """Copy the values of tensors that are not contiguous back into them: `flat` holds copies of those."""
    for tensor, values in zip(tensors, flat, strict=True):
        if not tensor.is_contiguous():
            tensor.detach().copy_(values.view(tensor.dtype).view(tensor.shape))
