"""Gradients of a step after they are reduced: their norm over all ranks, and clipping."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from evermoe.comm.vote import Ballot
from evermoe.errors import NonFiniteLoss
from evermoe.optim.combined import each_of
from evermoe.optim.masters import takes_factor
from evermoe.state.training_state import TrainingState

NORM_ELEMENTS = 4096
"""Elements whose squares are summed in float32."""
PIECE_ELEMENTS = 256 * NORM_ELEMENTS
"""Elements of bfloat16 or float16 that are made float32 at a time."""


def of_experts(state: TrainingState) -> list[Tensor]:
    """Per MoE layer [e, row]; zeros for one that is frozen or was not used on any rank, whose weights have none."""
    weights = [layer.weights for layer in state.layers.values()]
    return [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]


class Flats(NamedTuple):
    """Sums of gradients `[n]` that are stored one after the other."""

    replicated: Sequence[Tensor]
    """Of those that all ranks step."""
    divided: Sequence[tuple[Tensor, int]] = ()
    """Of those that the ranks of a position in an island step, and the positions that have the same ones."""


class SquareSum:
    """This rank's part of the square of the global gradient's norm.

    It has the squares of the local experts' gradients, each divided by its number of hosts; of the gradients that
    this rank owns; and of its part of the others, which are the same on all ranks.

    Args:
        state: whose gradients are reduced.
        rank: of this member.
        size: number of members that train.
        of: the parameters whose gradients count; None for all.
        copies: number of members that each train all experts of the placement.
        flats: the gradients that several ranks step, if they are stored one after the other; each of these ranks counts
            a part of each. None: it counts every n-th gradient.

    Attributes:
        norms: float64 `[n]`, of the gradients of which it is made, on their device.
    """

    def __init__(
        self,
        state: TrainingState,
        rank: int,
        size: int,
        of: Collection[Tensor] | None = None,
        copies: int = 1,
        flats: Flats | None = None,
    ) -> None:
        wanted = None if of is None else {id(parameter) for parameter in of}
        owned = {id(tensor) for tensor in state.owners.tensors()}  # of others' units it has no gradients any more
        width = 1 if state.shards is None else state.shards.island.size
        island, islands = rank // width, max(1, size // width)
        copies_of = {} if state.shards is None else state.shards.copies
        every = state.dense if owned or flats is None else []  # the flats have all others
        counted = [n % islands == island if id(p) in copies_of else n % size == rank for n, p in enumerate(every)]
        dense = [p for p, is_mine in zip(every, counted, strict=True) if id(p) in owned or (flats is None and is_mine)]
        dense = [p for p in dense if p.grad is not None and (wanted is None or id(p) in wanted)]
        parts = [p.grad for p in dense if p.grad is not None]
        self._hosts = [copies_of.get(id(p), 1) for p in dense]
        if flats is not None:
            parts += [flat.tensor_split(size)[rank] for flat in flats.replicated]
            parts += [flat.tensor_split(islands)[island] for flat, _ in flats.divided]
            self._hosts += [1] * len(flats.replicated) + [copies for _, copies in flats.divided]
        stacks = []
        for layer in state.layers.values():
            if layer.weights.grad is not None and (wanted is None or id(layer.weights) in wanted):
                stacks.append(layer.weights.grad)
                hosts = np.count_nonzero(layer.matrix_RE[:, layer.ids], axis=0)
                self._hosts += (copies * hosts).tolist()
        self.norms = norms(parts, stacks)

    def value(self, norms: Sequence[float]) -> float:
        """Return the sum for the norms as the host has read them."""
        return sum((norm * norm / hosts for norm, hosts in zip(norms, self._hosts, strict=True)), 0.0)


def norms(gradients: Sequence[Tensor], stacks: Sequence[Tensor] = ()) -> Tensor:
    """Return Euclidean norms of gradients, and of each row of `stacks` `[e, row]`: float64 `[n]`, on their device.

    On a CPU the squares of 4096 elements at a time are summed in float32, and these sums in float64: four times
    as fast as in float64 alone, with a difference below 1e-6. Where float32 is too small for a square, as with a
    large loss scale, all is done in float64, and so it is for few elements.
    """
    every = [*gradients, *stacks]
    if any(each.is_cuda for each in every):  # in one launch
        rows = itertools.chain.from_iterable(stacks)
        return torch.stack(torch._foreach_norm([*gradients, *rows], 2, torch.float64))
    return torch.cat(_row_norms([*(each.reshape(1, -1) for each in gradients), *stacks])) if every else torch.zeros(0)


def _row_norms(stacks: Sequence[Tensor]) -> list[Tensor]:
    """Return the norms of the rows of each stack, `[e, row]`, on a CPU."""
    # Each op is called for all stacks in a row: large reads displace its code from the processor's caches.
    large = [each for each in stacks if each.dtype == torch.float32 and each.shape[1] >= NORM_ELEMENTS]
    cut = [each.tensor_split([each.shape[1] // NORM_ELEMENTS * NORM_ELEMENTS], 1) for each in large]
    pieces = [torch.linalg.vector_norm(start.unflatten(1, (-1, NORM_ELEMENTS)), dim=2) for start, _ in cut]
    rests = [torch.linalg.vector_norm(rest, dim=1, keepdim=True) for _, rest in cut]
    sums = [torch.cat(both, 1) for both in zip(pieces, rests, strict=True)]
    quick = [torch.linalg.vector_norm(each, dim=1, dtype=torch.float64) for each in sums]
    are_finite = not quick or bool(torch.cat(quick).isfinite().all())
    found = {id(each): norm for each, norm in zip(large, quick, strict=True) if are_finite or norm.isfinite().all()}
    return [found[id(each)] if id(each) in found else _exact_row_norms(each) for each in stacks]


def _exact_row_norms(stack: Tensor) -> Tensor:
    """Return the norms of rows `[e, row]`, on a CPU, without a square that float32 does not hold."""
    if stack.dtype in (torch.bfloat16, torch.float16) and stack.shape[1] > NORM_ELEMENTS and len(stack):
        pieces_e = [[norms([piece.float()]) for piece in row.split(PIECE_ELEMENTS)] for row in stack]
        found = torch.stack([torch.linalg.vector_norm(torch.cat(pieces)) for pieces in pieces_e])
        if found.isfinite().all():  # faster than a norm of the other type
            return found
    return torch.linalg.vector_norm(stack, dim=1, dtype=torch.float64)


def read(*tensors: Tensor) -> list[list[float]]:
    """Return the elements of each tensor, as float64; a GPU is waited for once."""
    kinds: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault(tensor.device, {}).setdefault(tensor.dtype, []).append(number)
    found: list[list[float]] = [[] for _ in tensors]
    for by_type in kinds.values():  # on a GPU few launches, however many tensors there are
        parts = [torch.cat([tensors[each].detach().reshape(-1) for each in some]).double() for some in by_type.values()]
        values = iter((parts[0] if len(parts) == 1 else torch.cat(parts)).tolist())
        for each in itertools.chain.from_iterable(by_type.values()):
            found[each] = list(itertools.islice(values, tensors[each].numel()))
    return found


def extremes(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return numbers that are all finite exactly if all elements are, as tensors, so that nothing waits for a GPU.

    One pass over the gradients, which copies nothing: extremes keep NaN and infinity. The fastest op differs: on a CPU
    a norm takes 30 times as long as `aminmax`; on a GPU it is one launch for all.
    """
    some = [gradient for gradient in gradients if gradient.numel()]
    if some and some[0].is_cuda:
        return list(torch._foreach_norm(some, torch.inf))
    return [extreme for gradient in some for extreme in torch.aminmax(gradient)]


def faults(loss: float, are_finite: bool, rank: int) -> dict[str, float]:
    """Return the fields of a ballot that say whether a member's loss and gradients are finite.

    Args:
        loss: of this member.
        are_finite: whether its gradients are.
        rank: of this member.
    """
    has_loss = math.isfinite(loss)
    return {
        "nonfinite": float(not (has_loss and are_finite)),
        "nonfinite_ranks": 0.0 if has_loss and are_finite else float(rank),
        "nonfinite_losses": float(not has_loss),
        "nonfinite_loss_ranks": 0.0 if has_loss else float(rank),
    }


def ballot_of(
    loss: Tensor | None,
    count: float | Tensor | None,
    extremes: Sequence[Tensor],
    norms: Tensor,
    square_sum: Callable[[list[float]], float],
    rank: int,
    scale: float,
) -> Ballot:
    """Read a member's part of a step's loss and of the gradients' squares.

    Args:
        loss: of this member; None if it computes none.
        count: of this member; None for a loss that is a mean.
        extremes: of its gradients before they were summed.
        norms: of its gradients.
        square_sum: returns its part of the square of the global norm, for these norms as the host has read them.
        rank: of this member.
        scale: factor of the losses.
    """
    has_loss, own_loss = loss is not None, torch.zeros(1) if loss is None else loss
    counted = torch.zeros(1) if count is None else torch.as_tensor(count, dtype=torch.float64)
    (value,), (terms,), found, *ends = read(own_loss, counted, norms, *extremes)
    are_finite = all(map(math.isfinite, itertools.chain.from_iterable(ends)))
    squares = square_sum(found)
    return Ballot(
        votes=0.0,
        loss=value,
        squares=squares,
        reduced_squares=squares,
        **faults(value, are_finite, rank),
        trainers=float(has_loss),
        scale=scale if has_loss else 0.0,
        counting=float(count is not None),
        counted=terms,
    )


def refuse_nonfinite(sums: Ballot, step: int, nodes: Sequence[str]) -> None:
    """Refuse a step whose losses or gradients are not all finite, by the sums of the ballots.

    Args:
        sums: of all members.
        step: number of the step.
        nodes: per rank, its machine.

    Raises:
        NonFiniteLoss: names the step and the member.
    """
    if sums.is_finite:
        return
    rank = sums.nonfinite_rank
    if sums.is_empty:
        source = "as all samples of its batch have raised exceptions and are left out"
    elif rank is not None:
        source = f"from rank {rank} on {nodes[rank]}"
    else:
        source = f"from {sums.nonfinite:.0f} members" if sums.nonfinite else "in the sums over the members"
    raise NonFiniteLoss(
        f"step {step}: the loss or a gradient is infinite or not a number, {source}. The state is that before the "
        "step, which is repeated with the same samples if the job is started again: fix the cause, or start "
        "all members with on_nonfinite='skip' to leave out the updates of such steps.",
        step,
        rank,
    )


def refuse_mixed(sums: Ballot) -> None:
    """Refuse a step for which some members gave `count`, and others did not.

    Raises:
        ValueError: says how many.
    """
    if sums.is_mixed:
        raise ValueError(
            f"{sums.counting:.0f} of {sums.trainers:.0f} members gave count, the others did not: the "
            "loss is a sum with a count on all members, or a mean on all"
        )


def factor_of(sums: Ballot, limit: float | None) -> float:
    """Return the factor that makes the reduced gradients those of the mean loss, with a norm of at most `limit`.

    The norm is clipped as `torch.nn.utils.clip_grad_norm_` does.
    """
    divisor = 1.0 if sums.divided else sums.divisor
    norm = sums.squares**0.5 / divisor
    clip = 1.0 if limit is None or norm <= limit else limit / (norm + 1e-6)
    return clip / divisor


def multiply(state: TrainingState, factor: float) -> None:
    """Multiply all gradients by a factor, in place: in float32, then rounded to the gradient's dtype."""
    if factor != 1:
        scale([*(p.grad for p in state.dense if p.grad is not None), *of_experts(state)], factor)


def step_optimizer(
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
    factor: float,
    *,
    has_own_code: bool,
    repeated: Collection[torch.optim.Optimizer] = (),
) -> None:
    """Step with all gradients multiplied by a factor: in an optimizer's own pass if it can, else in one before.

    Optimizers of `evermoe.optim` multiply in float32 and leave the gradients as they are. Members must choose the same
    way, since the product of a gradient in bfloat16 is rounded in the other one.

    Args:
        optimizer: of the state.
        state: whose gradients are reduced.
        factor: of `factor_of`.
        has_own_code: whether a script's code runs in the step on some member; it sees gradients that are multiplied.
        repeated: optimizers whose steps replicas repeat. No script's code runs in these.
    """
    # Torch's fused optimizers divide by their `grad_scale`, and write the quotients to the gradients. They keep the
    # pass: a replica learns the factor after the gradient, and would have to divide by the same rounded reciprocal, but
    # no record says so (fused SGD without momentum has the arithmetic of the plain one).
    optimizers = each_of(optimizer)
    own = [each for each in optimizers if takes_factor(each) and (not has_own_code or each in repeated)]
    if factor != 1 and len(own) < len(optimizers):
        left = {id(p) for each in own for group in each.param_groups for p in group["params"]}
        every = [*state.dense, *(layer.weights for layer in state.layers.values())]
        scale([p.grad for p in every if p.grad is not None and id(p) not in left], factor)
    for each in optimizers:
        if each in own:
            each.step(factor=factor)
        else:
            each.step()


def scale(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients by a factor, in place.

    On a CPU `_foreach_mul_` would round the factor to the gradients' type first, so those in bfloat16 and float16 are
    multiplied one by one.
    """
    is_alone = [each.dtype in (torch.bfloat16, torch.float16) and not each.is_cuda for each in gradients]
    together = [each for each, alone in zip(gradients, is_alone, strict=True) if not alone]
    if together:
        torch._foreach_mul_(together, factor)
    for each, alone in zip(gradients, is_alone, strict=True):
        if alone:
            each.mul_(factor)
