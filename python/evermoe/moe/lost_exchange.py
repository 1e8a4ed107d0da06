"""Plan of an exchange that has lost a member, in a step that runs to its end (`Group.finishes_steps`).

Activation checkpointing requires that a repeated forward saves tensors of the same shapes as the first one. If the loss
comes between the two, the number of rows that this rank receives is known only from the first one, and whether ranks
exchange rows at all. So each forward keeps both for its repeat: in the contexts of checkpointing that enclose it, as
`evermoe.moe.checkpointing` does with choices. A graph that repeats a part of itself in its backward has no such
context. Its forwards keep both in a stack of the layer, as autograd repeats the youngest forward first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from torch import Tensor

from evermoe.comm.group import Group
from evermoe.errors import PeerLost
from evermoe.moe import checkpointing
from evermoe.moe.token_counts import TokenCount
from evermoe.moe.token_exchange import Exchange


class Layer(Protocol):
    """A layer with experts."""

    group: Group
    ids: list[int]
    count: TokenCount


def plan_or_lose(layer: Layer, counts_E: Tensor, plan: Callable[[], Exchange]) -> Callable[[], Exchange]:
    """Return a function that plans a forward's exchange with exact sizes, also after a loss.

    The plan is then that of an exchange that gives zeros if the step runs to its end. In such a step the function waits
    for the sizes, too: after that, no failure of an exchange changes a shape.

    Args:
        layer: of the forward.
        counts_E: int64, this rank's tokens of each expert.
        plan: plans the exchange if no member is lost; its collective has begun.
    """
    return partial(_plan_or_lose, layer, counts_E, plan) if layer.group.finishes_steps else plan


def _plan_or_lose(layer: Layer, counts_E: Tensor, plan: Callable[[], Exchange]) -> Exchange:
    group, exchange = layer.group, None
    if group.size == 1 or group.broken is None:
        with suppress(PeerLost):
            exchange = plan()
            exchange.sizes  # noqa: B018
    received = (group.size, [0] * len(layer.ids)) if exchange is None else _received(exchange)
    if checkpointing.is_enclosed():
        received = checkpointing.once(layer, "rows", lambda: received)
    elif _is_in_backward() and layer.count.received:
        received = layer.count.received.pop()
    return Exchange.lost(counts_E, *received) if exchange is None else exchange


def keep_for_backward(count: TokenCount, exchange: Exchange) -> None:
    """Keep the rows of a forward in a graph whose backward may repeat it."""
    if not _is_in_backward():
        count.received.append(_received(exchange))


def _is_in_backward() -> bool:
    """Return whether a graph's backward repeats a part of it, without a context of checkpointing."""
    return checkpointing.is_recomputing() and not checkpointing.is_enclosed()


def _received(exchange: Exchange) -> tuple[int, list[int]]:
    """Return the number of ranks that exchange rows, and the rows of each local expert."""
    lengths_e = exchange.sizes.lengths_e
    assert lengths_e is not None, "the host knows the sizes of an exact exchange"
    return len(exchange.sizes.sent_R), lengths_e
