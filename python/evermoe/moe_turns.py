"""Evaluation in which each member runs as many forwards as it needs, of whatever layers.

A forward of a layer with experts is an exchange among all members. In a step all of them run the same forwards, so no
member has to ask. In an evaluation they do not: the last batch is missing on some, and generation ends at a different
token on each. So before each exchange of an evaluation all members gather what each of them wants to run next. All
choose the same of these wishes. Members that wished for it bring their tokens. All others serve it: they run the same
layer on no tokens, which computes what their experts are asked for, and then ask again. A member that is through
with its own work serves until all are.

Tried first and given up: padding every member to the same number of forwards. The script would have to know that number
before it begins, and generation does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from evermoe.comm.group import Group
from evermoe.errors import UnequalForwards

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types in which tokens travel, by the number that stands for each."""


class Manner(NamedTuple):
    """What changes the messages of a forward, besides the layer: members that serve it need the same."""

    top_k: int
    """Experts per token."""
    dtype: int
    """Index in `DTYPES` of the type in which tokens travel."""
    is_autocast: int
    """1 under `torch.autocast`."""
    in_graph: int
    """1 inside `torch.compile`."""

    @classmethod
    def of(cls, x_TH: Tensor, ids_TK: Tensor, *, in_graph: bool) -> Manner:
        """Describe a forward by the properties that all members must share.

        Args:
            x_TH: tokens in the type in which they travel.
            ids_TK: the experts of each.
            in_graph: whether it is inside `torch.compile`.
        """
        is_autocast = torch.is_autocast_enabled(x_TH.device.type)
        return cls(ids_TK.shape[1], DTYPES.index(x_TH.dtype), int(is_autocast), int(in_graph))


class Served(Protocol):
    """A layer whose forward is an exchange."""

    turns: Turns | None
    hidden: int
    weights: nn.Parameter

    def run(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, in_graph: bool) -> Tensor:
        """Run a forward; collective."""
        ...


Wish = tuple[int, ...]
"""Number of a layer from 1, then its `Manner`."""
NOTHING: Wish = (0,) * (1 + len(Manner._fields))
"""Wish of a member that is through with its own work."""
TOGETHER: Wish = (1 << 31, *NOTHING[1:])
"""Wish of a member that needs all others at the same point of their scripts; larger than any layer's."""

FOLLOWING: Wish = (1 << 32, *NOTHING[1:])
"""Wish of a member without work of its own, which does what the others do."""


class Turns:
    """The turns of one evaluation.

    Args:
        layers: all layers with experts, in the same order on all members.
        group: the members.
    """

    def __init__(self, layers: Sequence[Served], group: Group) -> None:
        self._layers, self._group = list(layers), group
        self._numbers = {id(layer): number for number, layer in enumerate(self._layers, 1)}
        self._is_serving = False

    def begin(self) -> None:
        """Make forwards of the layers wait for their turn."""
        for layer in self._layers:
            layer.turns = self

    def end(self) -> None:
        """Let forwards of the layers run at once again."""
        for layer in self._layers:
            layer.turns = None

    def take(self, layer: Served, manner: Manner) -> None:
        """Serve other members until it is this layer's turn. Collective.

        Raises:
            PeerLost: a member is gone.
        """
        if not self._is_serving:
            self._serve_until((self._numbers[id(layer)], *manner))

    def serve_all(self) -> None:
        """Serve other members until all are through with their own work. Collective.

        Raises:
            PeerLost: a member is gone. UnequalForwards: some wait for all others at a point that this one has passed.
        """
        self._check_together(self._serve_until(NOTHING))

    def meet(self) -> bool:
        """Serve other members until all have come to this call, or follow. Collective.

        Returns:
            Whether a member follows.

        Raises:
            PeerLost: a member is gone. UnequalForwards: some have left the evaluation without such a call.
        """
        wishes = self._serve_until(TOGETHER)
        self._check_together(wishes)
        return FOLLOWING in wishes

    def follow(self) -> bool:
        """Serve other members until all that do not follow are through, or have come to `meet`. Collective.

        Returns:
            Whether they have come to `meet`.

        Raises:
            PeerLost: a member is gone. UnequalForwards: some of them are through, and others have come to `meet`.
        """
        wishes = self._serve_until(FOLLOWING)
        self._check_together(wishes)
        return TOGETHER in wishes

    def _serve_until(self, mine: Wish) -> list[Wish]:
        while True:
            wishes = [tuple(wish) for wish in self._group.all_gather(torch.tensor(mine, device="cpu")).tolist()]
            # The smallest lets members that are behind in their model catch up with those that are ahead.
            number, *manner = chosen = min(
                (wish for wish in wishes if wish not in (NOTHING, FOLLOWING)), default=NOTHING
            )
            if chosen in (NOTHING, TOGETHER, mine):
                return wishes
            self._is_serving = True
            try:
                _serve(self._layers[number - 1], Manner(*manner))
            finally:
                self._is_serving = False

    def _check_together(self, wishes: list[Wish]) -> None:
        waiting = [str(rank) for rank, wish in enumerate(wishes) if wish == TOGETHER]
        others = [str(rank) for rank, wish in enumerate(wishes) if wish not in (TOGETHER, FOLLOWING)]
        if waiting and others:
            raise UnequalForwards(
                f"rank {', '.join(waiting)} asked for the complete model or for alone() inside an evaluation, and rank "
                f"{', '.join(others)} left that evaluation without doing so: all members must, at the same point"
            )


def _serve(layer: Served, manner: Manner) -> None:
    """Run a forward without tokens, so that the forwards of other members can complete."""
    dtype, device = DTYPES[manner.dtype], layer.weights.device
    x_TH = torch.zeros(0, layer.hidden, dtype=dtype, device=device)
    ids_TK = torch.zeros(0, manner.top_k, dtype=torch.int64, device=device)
    weights_TK = torch.zeros(0, manner.top_k, device=device)
    with torch.no_grad(), torch.autocast(device.type, dtype, enabled=bool(manner.is_autocast)):
        layer.run(x_TH, ids_TK, weights_TK, in_graph=bool(manner.in_graph))
