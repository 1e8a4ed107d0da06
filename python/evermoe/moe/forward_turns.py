"""Evaluation in which members run different numbers of forwards, of any layers.

A forward of a layer with experts is an exchange among all members. In a step all of them run the same forwards, so no
coordination is needed. In an evaluation they do not: some members lack the last batch, and generation ends at a
different token on each. So before each exchange of an evaluation all members gather their requests: the layer that each
wants to run next. All choose the same request. Members that made it run the layer on their tokens. All others serve it:
they run the same layer on no tokens, which computes their experts' outputs for the other members' tokens, and then
repeat their own request. A member that has finished its own work serves until all have.

Why not pad all members to the same number of forwards: the script would have to know that number in advance, and
generation does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from evermoe.comm.group import Group
from evermoe.errors import PeerLost, UnequalForwards

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes in which tokens are sent; members exchange the index."""


class Manner(NamedTuple):
    """Properties of a forward that change its messages, besides the layer: members that serve it need the same."""

    top_k: int
    """Experts per token."""
    dtype: int
    """Index in `DTYPES` of the dtype in which tokens are sent."""
    is_autocast: int
    """1 under `torch.autocast`."""
    in_graph: int
    """1 inside `torch.compile`."""

    @classmethod
    def of(cls, x_TH: Tensor, ids_TK: Tensor, *, in_graph: bool) -> Manner:
        """Return the manner of a forward.

        Args:
            x_TH: tokens in the dtype in which they are sent.
            ids_TK: experts of each token.
            in_graph: whether the forward is inside `torch.compile`.
        """
        is_autocast = torch.is_autocast_enabled(x_TH.device.type)
        return cls(ids_TK.shape[1], DTYPES.index(x_TH.dtype), int(is_autocast), int(in_graph))


class Served(Protocol):
    """A layer whose forward is an exchange."""

    turns: Turns | None
    weights: nn.Parameter

    @property
    def hidden(self) -> int:
        """H."""
        ...

    def run(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, launch: Callable[[], None] | None, *, in_graph: bool
    ) -> Tensor:
        """Run a forward; collective."""
        ...


Request = tuple[int, ...]
"""Number of a layer from 1, then its `Manner`."""
NOTHING: Request = (0,) * (1 + len(Manner._fields))
"""Request of a member that has finished its own work."""
TOGETHER: Request = (1 << 31, *NOTHING[1:])
"""Request of a member that waits for all others at the same point of their scripts; larger than any layer's."""

FOLLOWING: Request = (1 << 32, *NOTHING[1:])
"""Request of a member without work of its own, which follows the others."""


class Turns:
    """Order of the members' forwards in one evaluation.

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
            PeerLost: a member is lost, and the group does not finish steps.
        """
        if self._is_serving:
            return
        try:
            self._serve_until((self._numbers[id(layer)], *manner))
        except PeerLost:
            if not self._group.finishes_steps:
                raise

    def serve_all(self) -> None:
        """Serve other members until all have finished their own work. Collective.

        Raises:
            PeerLost: a member is lost. UnequalForwards: some wait for all others at a point that this one has passed.
        """
        self._check_together(self._serve_until(NOTHING))

    def meet(self) -> bool:
        """Serve other members until each has reached this call or follows. Collective.

        Returns:
            Whether a member follows.

        Raises:
            PeerLost: a member is lost. UnequalForwards: some have left the evaluation without such a call.
        """
        requests = self._serve_until(TOGETHER)
        self._check_together(requests)
        return FOLLOWING in requests

    def follow(self) -> bool:
        """Serve other members until all that do not follow have finished, or have reached `meet`. Collective.

        Returns:
            Whether they have reached `meet`.

        Raises:
            PeerLost: a member is lost. UnequalForwards: some of them have finished, and others have reached `meet`.
        """
        requests = self._serve_until(FOLLOWING)
        self._check_together(requests)
        return TOGETHER in requests

    def _serve_until(self, mine: Request) -> list[Request]:
        while True:
            gathered = self._group.all_gather(torch.tensor(mine, device="cpu"))
            requests = [tuple(request) for request in gathered.tolist()]
            # With the smallest one, members that are behind in their model catch up with those that are ahead.
            number, *manner = chosen = min(
                (request for request in requests if request not in (NOTHING, FOLLOWING)), default=NOTHING
            )
            if chosen in (NOTHING, TOGETHER, mine):
                return requests
            self._is_serving = True
            try:
                _serve(self._layers[number - 1], Manner(*manner))
            finally:
                self._is_serving = False

    def _check_together(self, requests: list[Request]) -> None:
        waiting = [str(rank) for rank, request in enumerate(requests) if request == TOGETHER]
        others = [str(rank) for rank, request in enumerate(requests) if request not in (TOGETHER, FOLLOWING)]
        if waiting and others:
            raise UnequalForwards(
                f"rank {', '.join(waiting)} asked for the complete model or for alone() inside an evaluation, and rank "
                f"{', '.join(others)} left that evaluation without doing so: all members must, at the same point"
            )


def _serve(layer: Served, manner: Manner) -> None:
    """Run a forward on no tokens, to compute on other members' tokens."""
    dtype, device = DTYPES[manner.dtype], layer.weights.device
    x_TH = torch.zeros(0, layer.hidden, dtype=dtype, device=device)
    ids_TK = torch.zeros(0, manner.top_k, dtype=torch.int64, device=device)
    weights_TK = torch.zeros(0, manner.top_k, device=device)
    with torch.no_grad(), torch.autocast(device.type, dtype, enabled=bool(manner.is_autocast)):
        layer.run(x_TH, ids_TK, weights_TK, None, in_graph=bool(manner.in_graph))
