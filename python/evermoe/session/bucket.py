"""One bucket of parameters, and the sum of its gradients over the ranks of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from evermoe.comm.collectives import ExpertReducer, Slice, sum_flat, write_parts
from evermoe.comm.group import Group
from evermoe.comm.owner_collectives import reduce_to_owners
from evermoe.moe.experts import Experts
from evermoe.session.gradients import extremes
from evermoe.state.shards import Shards


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are summed together, the last ones of the model first."""

    replicated: list[list[Tensor]]
    """Those that all ranks step, by type and device."""
    divided: list[list[Tensor]]
    """Parts of those that an island divides, which the ranks of its position step, by copies, type and device."""
    copies: list[int]
    """Positions of an island that have the same parts, of each of `divided`."""
    owned_R: list[list[Tensor]]
    """Those that one rank steps, by their owner."""
    experts: list[Tensor]
    """Weights of MoE layers."""
    reducer: ExpertReducer
    """Sums the gradients of these layers."""

    @property
    def parameters(self) -> list[Tensor]:
        """All of them."""
        return [each for some in (*self.replicated, *self.divided, *self.owned_R, self.experts) for each in some]


def plan_buckets(
    parameters: Sequence[Tensor],
    layers: Sequence[Experts],
    owners: Mapping[int, int],
    rank: int,
    size: int,
    nbytes: int,
    shards: Shards | None = None,
) -> list[Bucket]:
    """Divide parameters into buckets, the same on all ranks: the last parameters first, as backward reaches them first.

    Args:
        parameters: of the model, in its order.
        layers: the MoE layers, with their placement.
        owners: rank that steps each parameter which has an owner, by the parameter's id.
        rank: of this member.
        size: number of members that train.
        nbytes: gradients of a bucket; its last parameter may exceed them.
        shards: the parts of parameters that an island divides; None without one.
    """
    layer_of = {id(layer.weights): layer for layer in layers}
    found: list[Bucket] = []
    taken: list[Tensor] = []
    copies = {} if shards is None else shards.copies
    left = nbytes
    for parameter in reversed(parameters):
        layer = layer_of.get(id(parameter))
        taken.append(parameter)
        if layer is not None:
            left -= _shared_bytes(layer)
        else:
            left -= parameter.nbytes if shards is None else shards.nbytes(parameter)
        if left <= 0:
            found.append(_bucket(taken, layer_of, owners, copies, rank, size))
            taken, left = [], nbytes
    if taken or not found:
        found.append(_bucket(taken, layer_of, owners, copies, rank, size))
    return found


def _shared_bytes(layer: Experts) -> int:
    """Return the most bytes of gradients that a rank has of experts which others train, too; the same on all ranks."""
    shared = (layer.matrix_RE > 0).sum(0) > 1
    rows = (layer.matrix_RE > 0)[:, shared].sum(1).max(initial=0)
    return int(rows) * layer.weights.shape[1] * 4  # sums are made in float32


def _bucket(
    parameters: Sequence[Tensor],
    layer_of: Mapping[int, Experts],
    owners: Mapping[int, int],
    copies: Mapping[int, int],
    rank: int,
    size: int,
) -> Bucket:
    replicated: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    of_position: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
    owned_R: list[list[Tensor]] = [[] for _ in range(size)]
    experts: list[Tensor] = []
    for each in parameters:
        if id(each) in layer_of:
            experts.append(each)
        elif id(each) in owners:
            owned_R[owners[id(each)]].append(each)
        elif id(each) in copies:
            of_position.setdefault((copies[id(each)], each.dtype, each.device), []).append(each)
        else:
            replicated.setdefault((each.dtype, each.device), []).append(each)
    layers = [layer_of[id(each)] for each in experts]
    matrices: list[np.ndarray] = [layer.matrix_RE for layer in layers]
    reducer = ExpertReducer(matrices, [layer.weights.shape[1] for layer in layers], rank)
    number = [copies for copies, *_ in of_position]
    return Bucket(list(replicated.values()), list(of_position.values()), number, owned_R, experts, reducer)


class BucketSum:
    """The sum of a bucket's gradients.

    Args:
        bucket: the bucket.
        gradients: of its parameters, by their ids; missing ones count as zeros.
        in_place: whether these tensors may be written before `put`.
    """

    def __init__(self, bucket: Bucket, gradients: Mapping[int, Tensor | None], *, in_place: bool) -> None:
        self._bucket, self._gradients, self._in_place = bucket, gradients, in_place
        self.flats: list[Tensor] = []
        """Sums `[n]` of the gradients that all ranks step, by type."""
        self.divided_flats: list[tuple[Tensor, int]] = []
        """Sums `[n]` of the gradients that the ranks of a position step, and positions that have the same ones."""
        self.extremes: list[Tensor] = []
        """Extremes of this member's gradients."""
        self.flags: Tensor | None = None
        """Sum of the flags."""
        self._owned: list[Tensor] = []
        self._experts: list[Tensor] = []
        self._parts: list[tuple[Slice, Tensor]] = []
        """Sums that are not written to the experts' gradients yet."""

    def _of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        found = [(each, self._gradients[id(each)]) for each in parameters]
        return [torch.zeros_like(each) if gradient is None else gradient for each, gradient in found]

    def sum_divided(self, group: Group) -> None:
        """Sum the gradients of the parts of parameters; collective.

        Args:
            group: the ranks of this member's position.
        """
        for parameters, copies in zip(self._bucket.divided, self._bucket.copies, strict=True):
            flat = _joined(self._of(parameters))
            self.extremes += extremes([flat])
            sum_flat(flat, group)
            self.divided_flats.append((flat, copies))

    def sum_dense(self, group: Group, flags: Tensor | None = None) -> None:
        """Sum the gradients of what is no expert's and not divided; collective.

        Args:
            group: the ranks.
            flags: any values `[n]`, summed with them, maybe in place; the same number on all ranks.
        """
        for parameters in self._bucket.replicated:
            pieces = self._of(parameters)
            flat = _joined(pieces if flags is None else [*pieces, _like(flags, parameters[0])])
            length = len(flat) - (0 if flags is None else len(flags))
            self.extremes += extremes([flat[:length]])
            sum_flat(flat, group)
            self.flats.append(flat[:length])
            if flags is not None:
                self.flags, flags = flat[length:], None
        if flags is not None:
            self.flags = group.all_reduce(flags)
        if any(self._bucket.owned_R):
            gradients_R = [self._of(parameters) for parameters in self._bucket.owned_R]
            self.extremes += extremes([each for gradients in gradients_R for each in gradients])
            self._owned = gradients_R[group.rank]
            if not self._in_place:
                self._owned = gradients_R[group.rank] = [each.clone() for each in self._owned]
            reduce_to_owners(gradients_R, group)

    def sum_experts(self, group: Group) -> None:
        """Sum the gradients of experts over their hosts; collective."""
        if self._bucket.reducer.is_empty:
            return
        self._experts = self._of(self._bucket.experts)
        if self._in_place:
            self._bucket.reducer.reduce(self._experts, group)
        else:
            self._parts = [each for sums in self._bucket.reducer.sums(self._experts, group) for each in sums]

    def put(self, present: set[int], rank: int) -> None:
        """Make the sums the gradients of the parameters that have one on any rank.

        Args:
            present: ids of these parameters.
            rank: of this member: it drops the gradients that others own.
        """
        of_position = [flat for flat, _ in self.divided_flats]
        sums = zip((*self._bucket.replicated, *self._bucket.divided), (*self.flats, *of_position), strict=True)
        for parameters, flat in sums:
            for each, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                if id(each) in present and each.is_contiguous():
                    each.grad = part if each.dim() == 1 else part.view_as(each)
                elif id(each) in present:
                    each.grad = self._of([each])[0].copy_(part.view_as(each))
        for each, total in zip(self._bucket.owned_R[rank], self._owned, strict=True):
            each.grad = total if id(each) in present else None
        for owner, parameters in enumerate(self._bucket.owned_R):
            for each in parameters if owner != rank else ():
                each.grad = None
        write_parts(self._parts, self._experts)
        for each, total in zip(self._bucket.experts if self._experts else [], self._experts, strict=True):
            if id(each) in present:
                each.grad = total
        self._gradients, self._parts, self._experts = {}, [], []


def _joined(tensors: list[Tensor]) -> Tensor:
    """Return a copy of all elements, `[n]`: without a view for each in Python, as there are many."""
    return _flatten_dense_tensors(tensors) if len(tensors) > 1 else torch.cat([tensors[0].reshape(-1)])


def _like(values: Tensor, other: Tensor) -> Tensor:
    """Return values of the host with the type and device of another tensor; the host waits for no GPU."""
    values = values.to(other.dtype)
    return values.pin_memory().to(other.device, non_blocking=True) if other.is_cuda else values
