"""The experts to copy now, and the rank that saves each part of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evermoe import _native
from evermoe.planning._arguments import array, count, counts

Policy = Literal["sequential", "load-aware", "budget"]


def select_experts(
    policy: Policy,
    tokens: ArrayLike,
    checkpoint: int = 0,
    *,
    waiting: ArrayLike | None = None,
    experts_per_layer: int | None = None,
    budget_bytes: int | None = None,
    expert_bytes: int | None = None,
) -> list[list[int]]:
    """For each layer the experts to copy now, ascending.

    - `"sequential"` (PEC): in layer m at checkpoint t the K experts from `(m * K + t * K) mod E` on; any
      ceil(E / K) checkpoints in a row copy every expert. Of `tokens` only the shape counts.
    - `"load-aware"` (PEC Algorithm 1): of each layer the K experts with the most unsaved tokens, wherever they are;
      `select_per_rank` minds the shares of ranks, too. With `waiting`, experts that were passed over often go first, so
      that every expert with unsaved tokens is copied within 4 * ceil(E / K) checkpoints; without it load alone decides.
    - `"budget"` (MoEtion): capacity is shared in proportion to tokens at risk; leftovers go by largest remainder;
      never more than a layer's experts at risk. Each layer chooses its experts with the most.
      No bound on waiting.

    The capacity of `"budget"` for all layers together is `experts_per_layer * L`, or what fits in a budget:
    `budget_bytes // expert_bytes`, where the budget is bandwidth times the time of a step. A budget below one expert
    chooses nothing. Separate local and remote budgets are two calls, each with the ledger of its own copies. An expert
    without tokens at risk is chosen by `"sequential"` only. Ties go to the lower index.

        >>> tokens = [[7, 2, 3], [1, 5, 0]]
        >>> select_experts("sequential", tokens, checkpoint=1, experts_per_layer=2)
        [[0, 2], [1, 2]]
        >>> select_experts("load-aware", tokens, experts_per_layer=1)
        [[0], [1]]
        >>> select_experts("budget", tokens, budget_bytes=350, expert_bytes=100)  # 3 * 12 / 18 and 3 * 6 / 18
        [[0, 2], [1]]

    Args:
        policy: one of the three.
        tokens: [L, E] tokens since each expert was last copied: `TokenLedger.at_risk`.
        checkpoint: number of this checkpoint, from 0: `TokenLedger.checkpoint`.
        waiting: [L, E] checkpoints that passed an expert over: `TokenLedger.waiting`; `"load-aware"` only.
        experts_per_layer: K, 1 or more; only `"budget"` does without it.
        budget_bytes: bytes that may be copied now; with `expert_bytes`, in place of `experts_per_layer`.
        expert_bytes: size of the state of one expert.

    Raises:
        ValueError: an argument is missing, not of this policy, negative, or of the wrong shape.
    """
    tokens_LE = array("tokens", tokens, np.int64, 2)
    if policy not in ("sequential", "load-aware", "budget"):
        raise ValueError(f'policy: expected "sequential", "load-aware" or "budget", got {policy!r}')
    if waiting is not None and policy != "load-aware":
        raise ValueError(f'waiting: only "load-aware" reads it; leave it out for "{policy}"')
    if policy == "budget":
        return _native.select_by_budget(tokens_LE, _capacity(tokens_LE, experts_per_layer, budget_bytes, expert_bytes))
    if experts_per_layer is None or budget_bytes is not None or expert_bytes is not None:
        raise ValueError(f'experts_per_layer: "{policy}" needs it, and takes no budget_bytes or expert_bytes')
    each, at = count("experts_per_layer", experts_per_layer), count("checkpoint", checkpoint)
    if policy == "sequential":
        layers, experts = tokens_LE.shape
        return _native.select_sequential(layers, experts, each, at)
    waiting_LE = None if waiting is None else array("waiting", waiting, np.int64, 2)
    return _native.select_load_aware(tokens_LE, waiting_LE, None, each, at)


def select_per_rank(
    tokens: ArrayLike, checkpoint: int, waiting: ArrayLike, rank_LE: ArrayLike, *, experts_per_layer: int
) -> list[list[int]]:
    """Return for each layer the K experts to copy now, `"load-aware"`, shared out among ranks (PEC Algorithm 1).

    Each layer gets K experts, or all that have unsaved tokens. Of all such choices those count in which no rank copies
    more than its share of ⌈K * L / ranks⌉ experts, or the least to which all ranks can be held. Of these it is the one
    with the most urgent experts: first those that were passed over by 2 * ceil(E / K) checkpoints or more, then those
    with the most unsaved tokens of each layer, where another layer comes first at each checkpoint. An expert that was
    passed over by 3 * ceil(E / K) is copied whatever its rank's share is, so that every expert with unsaved tokens is
    copied within 4 * ceil(E / K) checkpoints.

        >>> tokens, waiting = [[7, 2, 3], [1, 5, 6]], [[0, 0, 0], [0, 0, 0]]
        >>> select_per_rank(tokens, 0, waiting, [[0, 0, 1], [0, 0, 1]], experts_per_layer=1)
        [[0], [2]]
        >>> select_per_rank(tokens, 0, waiting, [[0, 0, 1], [1, 1, 0]], experts_per_layer=1)  # rank 0 has its share
        [[0], [1]]

    Args:
        tokens: [L, E] tokens since each expert was last copied: `TokenLedger.at_risk`.
        checkpoint: number of this checkpoint, from 0: `TokenLedger.checkpoint`.
        waiting: [L, E] checkpoints that passed an expert over: `TokenLedger.waiting`.
        rank_LE: [L, E] the rank that copies each expert; negative for what is none.
        experts_per_layer: K, 1 or more.

    Raises:
        ValueError: a wrong shape, a negative count, or K is 0.
    """
    tokens_LE, waiting_LE = array("tokens", tokens, np.int64, 2), array("waiting", waiting, np.int64, 2)
    ranks_LE, each = array("rank_LE", rank_LE, np.int64, 2), count("experts_per_layer", experts_per_layer)
    return _native.select_load_aware(tokens_LE, waiting_LE, ranks_LE, each, count("checkpoint", checkpoint))


def _capacity(
    tokens_LE: NDArray[np.int64], experts_per_layer: int | None, budget_bytes: int | None, expert_bytes: int | None
) -> int:
    """Experts that may be chosen in all layers together, at most all there are."""
    if experts_per_layer is not None and budget_bytes is None and expert_bytes is None:
        each = count("experts_per_layer", experts_per_layer)
        if each == 0:
            raise ValueError("experts_per_layer: expected 1 or more, got 0; nothing would ever be copied")
        return min(each * tokens_LE.shape[0], tokens_LE.size)
    if experts_per_layer is None and budget_bytes is not None and expert_bytes is not None:
        each = count("expert_bytes", expert_bytes)
        if each == 0:
            raise ValueError("expert_bytes: expected 1 or more, got 0")
        return min(count("budget_bytes", budget_bytes) // each, tokens_LE.size)
    raise ValueError("experts_per_layer: expected either it, or budget_bytes and expert_bytes")


def shard_modules(
    nbytes: Sequence[int], ranks: int, expert_bytes: Sequence[int] | None = None, alignment: int = 64
) -> list[list[tuple[int, int, int]]]:
    """For each rank the parts (module, start, end) of the non-expert state that it saves.

    PEC's equal (EDPS) and, with `expert_bytes`, adaptive (ADPS) sharding: the rank that saves the most, experts
    included, saves as little as possible. The papers hand out complete modules to the least loaded rank; here a
    module is cut, at a multiple of `alignment`, where a rank is full, at most `ranks - 1` times in all. With
    the level up to which the modules fill the ranks like water, no rank that saves a part saves more than the
    level, rounded up, plus `alignment - 1` bytes. A module without bytes has no part.

        >>> shard_modules([40, 110], ranks=2, expert_bytes=[0, 50], alignment=4)  # both save 100 in all
        [[(0, 0, 40), (1, 0, 60)], [(1, 60, 110)]]

    Args:
        nbytes: size of each module.
        ranks: number of ranks.
        expert_bytes: bytes of experts that each rank saves already; None for the same everywhere.
        alignment: parts start at multiples of it.

    Raises:
        ValueError: no rank, no alignment, a negative size, or not one number in `expert_bytes` for each rank.
    """
    sizes = counts("nbytes", nbytes)
    number = count("ranks", ranks)
    if expert_bytes is None:
        if number > 1 << 24:
            raise ValueError(f"ranks: expected at most 2^24, got {number}")
        loads = [0] * number
    else:
        loads = counts("expert_bytes", expert_bytes)
    if len(loads) != number:
        raise ValueError(f"expert_bytes: expected one number for each of {number} ranks, got {len(loads)}")
    return _native.shard_modules(sizes, loads, count("alignment", alignment))
