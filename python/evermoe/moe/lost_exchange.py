"""Plan of an exchange that has lost a member, in a step that runs to its end (`Group.finishes_steps`).

Activation checkpointing requires that a repeated forward saves tensors of the same shapes as the first one. If the loss
comes between the two, the number of rows that this rank receives is known only from the first one. So each forward
keeps its rows for its repeat: in the contexts of checkpointing that enclose it, as `evermoe.moe.checkpointing` does
with choices. A graph that repeats a part of itself in its backward has no such context. Its forwards keep their rows in
a stack of the layer, as autograd repeats the youngest forward first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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


def plan_or_lose(layer: Layer, counts_E: Tensor, plan: Callable[[], Exchange], *, is_recorded: bool) -> Exchange:
    """Return the plan of a forward's exchange; after a loss, one of an exchange that gives zeros.

    The host waits for the sizes here: after that, no exchange of the forward can fail in a way that changes a shape.

    Args:
        layer: of the forward.
        counts_E: int64, this rank's tokens of each expert.
        plan: plans the exchange from what the ranks have gathered.
        is_recorded: whether this forward is part of a graph whose backward may repeat it.
    """
    group, exchange = layer.group, None
    if group.size == 1 or group.broken is None:
        with suppress(PeerLost):
            exchange = plan()
            exchange.sizes  # noqa: B018
    lengths_e = [0] * len(layer.ids) if exchange is None else exchange.sizes.lengths_e
    assert lengths_e is not None, "the host knows the sizes of an exact exchange"
    kept_e = _keep(layer, lengths_e, is_recorded=is_recorded)
    return Exchange.lost(counts_E, group.size, kept_e) if exchange is None else exchange


def _keep(layer: Layer, lengths_e: list[int], *, is_recorded: bool) -> list[int]:
    """Keep the rows of a forward for its repeat; return them, in a repeat those of the first forward."""
    stack, is_enclosed = layer.count.received, checkpointing.is_enclosed()
    if checkpointing.is_recomputing() and not is_enclosed:
        return stack.pop() if stack else lengths_e
    kept_e = checkpointing.once(layer, "rows", lambda: lengths_e) if is_enclosed else lengths_e
    if is_recorded:
        stack.append(kept_e)
    return kept_e
