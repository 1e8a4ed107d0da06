"""Collectives of training: the differentiable all-to-all and the reduction of gradients.

There is no communicator per expert, as placements change. Uneven all-to-alls over the world group reduce expert
gradients, in rank order, so that all replicas get the same bits. The two hosts of an expert exchange its gradient. With
more hosts, each owns a shard: it receives that shard from all other hosts, and returns the sum in a second all-to-all.
Other gradients use bucketed all-reduce, or those of `comm.owner_collectives`.

Gradients of 16 bits are summed in float32 and rounded once; those of experts travel with 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evermoe.comm import step_exchanges
from evermoe.comm.group import Group
from evermoe.planning.footprint import BUCKET_BYTES


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return step_exchanges.all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rows = gradients[0].contiguous()
        return step_exchanges.all_to_all(rows, ctx.receive, ctx.send, ctx.group), None, None, None


def all_to_all(rows: Tensor, sent_R: list[int], received_R: list[int], group: Group) -> Tensor:
    """Exchange rows like `Group.all_to_all`, differentiably: `sent_R[r]` go to rank r, `received_R[r]` come from it."""
    found: Tensor = _AllToAll.apply(rows, sent_R, received_R, group)
    return found


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return step_exchanges.all_reduce(values, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return step_exchanges.all_reduce(gradients[0], ctx.group), None


def all_reduce(values: Tensor, group: Group) -> Tensor:
    """Return the sum over all members, differentiably. The backward is collective and sums the gradient over them.

    Each member thus gets the gradient of all members' losses with respect to its own values.
    """
    found: Tensor = _AllReduce.apply(values, group)
    return found


@dataclass(frozen=True)
class Slice:
    """A part of some local experts' gradients: `weights[layer].grad[row : row + rows, start:stop]`."""

    layer: int
    row: int
    start: int
    stop: int
    rows: int = 1

    @property
    def elements(self) -> int:
        """Number of its elements."""
        return self.rows * (self.stop - self.start)

    def of(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the part, `[rows, n]`, as a view."""
        return gradients[self.layer][self.row : self.row + self.rows, self.start : self.stop]

    def joined(self, other: Slice) -> Slice | None:
        """Return both as one if `other` is the same part of the following row."""
        following = replace(self, row=self.row + self.rows, rows=1)
        return replace(self, rows=self.rows + 1) if other == following else None


@dataclass
class _Round:
    """Parts of gradients that are summed together."""

    pairs: list[list[Slice]]
    """Per rank: rows of experts that it and this rank alone host, which both sum."""
    mine: list[tuple[Slice, list[int]]]
    """Shards that this rank sums, each with all hosts of the expert."""
    theirs: list[list[Slice]]
    """Per rank: the shards of local gradients that it sums."""
    has_shards: bool = False
    """Whether any rank sums shards."""


class ExpertReducer:
    """Sums expert gradients over all hosts of each expert; every replica ends with the same bits.

    It needs memory for one bucket of gradients at a time on each rank.

    Args:
        matrices: per MoE layer, int `[R, E]`: replicas of each expert on each rank; the same on all ranks.
        row_sizes: per layer, elements of one expert's flat weights.
        rank: this rank.
        bucket_bytes: bytes of float32 gradients that a rank sums with others at a time.

    Example: expert 0 of 10 elements is hosted by ranks 1, 2 and 4. Rank 1 owns elements 0–3, rank 2 4–6, rank 4 7–9.
    Rank 2 sends elements 0–3 to rank 1 and 7–9 to rank 4, receives 4–6 from both, sums them in the order 1, 2, 4,
    and sends the sum to both. Expert 1, hosted by ranks 1 and 2 alone, travels once: each sends all to the other, which
    is as many bytes as a half and the sum of the other half, in one exchange instead of two.
    """

    def __init__(
        self,
        matrices: Sequence[np.ndarray],
        row_sizes: Sequence[int],
        rank: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._rank, self._size = rank, len(matrices[0]) if matrices else 1
        self._rounds: list[_Round] = []
        self._room = room = max(1, bucket_bytes // 4)
        self._left_R = np.zeros(self._size, np.int64)
        """Elements of each rank that still fit into the latest round; all ranks compute the same counts."""
        for layer, (matrix, length) in enumerate(zip(matrices, row_sizes, strict=True)):
            rows_RE = np.cumsum(matrix > 0, axis=1) - 1
            for expert in np.flatnonzero((matrix > 0).sum(0) > 1):
                hosts = np.flatnonzero(matrix[:, expert]).tolist()
                for start in range(0, length, room):
                    self._add(layer, int(rows_RE[rank, expert]), start, min(length, start + room), hosts)

    def _add(self, layer: int, row: int, start: int, stop: int, hosts: list[int]) -> None:
        if self._left_R[hosts].min() < stop - start:
            self._rounds.append(_Round([[] for _ in range(self._size)], [], [[] for _ in range(self._size)]))
            self._left_R[:] = self._room
        self._left_R[hosts] -= stop - start
        now, is_pair = self._rounds[-1], len(hosts) == 2
        now.has_shards = now.has_shards or not is_pair
        if self._rank not in hosts:
            return
        if is_pair:
            _append(now.pairs[sum(hosts) - self._rank], Slice(layer, row, start, stop))
            return
        bounds = [start + (stop - start) * i // len(hosts) for i in range(len(hosts) + 1)]
        for i, host in enumerate(hosts):
            part = Slice(layer, row, bounds[i], bounds[i + 1])
            if host != self._rank:
                _append(now.theirs[host], part)
                continue
            mine = now.mine
            joined = mine[-1][0].joined(part) if mine and mine[-1][1] == hosts else None
            mine[-1 if joined else len(mine) :] = [(joined or part, hosts)]

    @property
    def is_empty(self) -> bool:
        """Whether no rank shares an expert with another, so that nothing is summed."""
        return not self._rounds

    def reduce(self, gradients: Sequence[Tensor], group: Group) -> None:
        """Replace each layer's gradient `[e, row]` by the sum over all hosts, in place. Collective."""
        for each in self._rounds if group.size > 1 else ():
            write_parts(self._sum_round(each, gradients, group, in_place=True), gradients)

    def sums(self, gradients: Sequence[Tensor], group: Group) -> Iterator[list[tuple[Slice, Tensor]]]:
        """Yield the parts of each round and their sums over all hosts, in the gradients' type. Collective.

        Args:
            gradients: `[e, row]` of each layer.
            group: the ranks.
        """
        for each in self._rounds if group.size > 1 else ():
            yield self._sum_round(each, gradients, group, in_place=False)

    def _sum_round(
        self, each: _Round, gradients: Sequence[Tensor], group: Group, *, in_place: bool
    ) -> list[tuple[Slice, Tensor]]:
        """Return the sums that are not written, as they may be `in_place`."""
        pairs, theirs = _elements(each.pairs), _elements(each.theirs)
        mine = [0] * group.size
        for part, hosts in each.mine:
            for host in hosts:
                mine[host] += part.elements * (host != group.rank)
        wire = functools.reduce(torch.promote_types, (gradient.dtype for gradient in gradients))
        sent = [part for parts_R in zip(each.pairs, each.theirs, strict=True) for parts in parts_R for part in parts]
        outgoing = _joined([part.of(gradients) for part in sent], gradients[0].new_empty(0)).to(wire)
        send, receive = ([a + b for a, b in zip(pairs, other, strict=True)] for other in (theirs, mine))
        incoming = group.all_to_all(outgoing, send, receive).split(receive)
        sums = _sum_pairs(each.pairs, outgoing.split(send), incoming, gradients if in_place else None)
        if not each.has_shards:
            return sums
        totals, back = self._sum(
            each.mine, [values[n:] for values, n in zip(incoming, pairs, strict=True)], gradients, group.rank
        )
        shards = [part for parts in each.theirs for part in parts]
        returned = group.all_to_all(back, mine, theirs).split([part.elements for part in shards])
        return [*sums, *totals, *zip(shards, returned, strict=True)]

    @staticmethod
    def _sum(
        mine: Sequence[tuple[Slice, list[int]]], incoming: Sequence[Tensor], gradients: Sequence[Tensor], rank: int
    ) -> tuple[list[tuple[Slice, Tensor]], Tensor]:
        """Sum the shards of this rank in rank order, at least in float32; return them, and what each rank is to get.

        The launches on a GPU do not grow with the number of shards: first shares are summed with second ones, then
        with third ones, all shards together. Shards with many hosts come first, so that those left are a prefix.
        """
        cursor = [0] * len(incoming)
        shares: list[list[Tensor]] = []
        for part, hosts in mine:
            shares.append([])
            for host in hosts:
                at, cursor[host] = cursor[host], cursor[host] + part.elements * (host != rank)
                shares[-1].append(part.of(gradients) if host == rank else incoming[host][at : cursor[host]])
        order = sorted(range(len(mine)), key=lambda each: -len(shares[each]))
        none = incoming[0][:0]
        total = _joined([shares[each][0] for each in order], none)
        total = total.to(torch.promote_types(total.dtype, torch.float32))
        for number in range(1, len(shares[order[0]]) if order else 0):
            more = _joined([shares[each][number] for each in order if len(shares[each]) > number], none)
            total[: len(more)].add_(more)
        rounded = total.to(none.dtype).split([mine[each][0].elements for each in order])
        sums = dict(zip(order, rounded, strict=True))
        receivers = [host for host in range(len(incoming)) if host != rank]
        back = [sums[each] for host in receivers for each, (_, hosts) in enumerate(mine) if host in hosts]
        return [(part, sums[each]) for each, (part, _) in enumerate(mine)], _joined(back, none)


def _sum_pairs(
    pairs: Sequence[Sequence[Slice]],
    sent: Sequence[Tensor],
    incoming: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
) -> list[tuple[Slice, Tensor]]:
    """Sum what two ranks host, on a GPU in one launch; return the sums that are not written.

    Args:
        pairs: parts that this rank shares with each rank.
        sent: to each rank this rank's values of these parts, `[n]`, and maybe more.
        incoming: from each rank its values of them, in the same way.
        gradients: `[e, row]` of each layer, to be replaced by the sums; None: they are not written.
    """
    parts = [part for some in pairs for part in some]
    if not parts:
        return []
    others = _split(incoming, pairs)
    if gradients is not None:
        own = [part.of(gradients) for part in parts]
        torch._foreach_add_(own, [values.view_as(each) for values, each in zip(others, own, strict=True)])
        return []
    # Of values as they were sent: if the gradients have changed since, the two ranks would get different sums.
    return list(zip(parts, torch._foreach_add(_split(sent, pairs), others), strict=True))


def _split(values: Iterable[Tensor], pairs: Iterable[Iterable[Slice]]) -> list[Tensor]:
    """Return the values of each part, `[n]`, of those sent to or received from each rank, which begin with them."""
    found: list[Tensor] = []
    for some, lengths in zip(values, ([part.elements for part in parts] for parts in pairs), strict=True):
        found += some[: sum(lengths)].split(lengths)
    return found


def _elements(parts_R: Iterable[Iterable[Slice]]) -> list[int]:
    """Return the number of elements in each rank's parts."""
    return [sum(part.elements for part in parts) for parts in parts_R]


def _joined(tensors: Sequence[Tensor], none: Tensor) -> Tensor:
    """Return the elements of tensors one after the other, `[n]`; `none` if there are none."""
    return torch.cat([each.reshape(-1) for each in tensors]) if tensors else none


def write_parts(sums: Iterable[tuple[Slice, Tensor]], gradients: Sequence[Tensor]) -> None:
    """Write sums of parts into the gradients `[e, row]` of their layers; on a GPU in one launch."""
    pairs = [(part.of(gradients), total) for part, total in sums]
    targets = [target.reshape(-1) if target.is_contiguous() else target for target, _ in pairs]
    if pairs:
        torch._foreach_copy_(targets, [total.view_as(to) for to, (_, total) in zip(targets, pairs, strict=True)])


def _append(parts: list[Slice], part: Slice) -> None:
    joined = parts[-1].joined(part) if parts else None
    parts[-1 if joined else len(parts) :] = [joined or part]


def sum_flat(flat: Tensor, group: Group) -> None:
    """Replace `flat` `[n]` by its sum over all ranks, in place; collective.

    Numbers of 16 bits are summed in float32 and rounded once. On GPUs NCCL sums them as float32; on CPUs they travel as
    they are.
    """
    if flat.is_cuda and flat.dtype in (torch.bfloat16, torch.float16):
        flat.copy_(group.all_reduce(flat.float()))
    else:
        group.all_reduce(flat)
