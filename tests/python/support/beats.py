"""Collectives of a second group of processes in forwards and backwards, as FSDP2 has them in an island."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from evermoe.comm.group import Group


class Beats:
    """Each member's collectives, which it counts: a member that leaves a step leaves its peers in one of them."""

    def __init__(self) -> None:
        self.group, self.count = Group(), 0
        self.on_beat: Callable[[str], None] = lambda kind: None
        """Called before each of them: "forward", "repeat" (a forward in a backward), or "backward"."""

    def beat(self, kind: str) -> None:
        """Wait for the collective of the same number on all members.

        Raises:
            AssertionError: another member is in another one, or in another kind of pass.
        """
        self.on_beat(kind)
        self.count += 1
        mine = torch.tensor([self.count, KINDS.index(kind)])
        gathered = self.group.all_gather(mine)
        assert bool((gathered == mine).all()), f"members are in different collectives: {gathered.tolist()}"


KINDS = ("forward", "repeat", "backward")
BEATS = Beats()


@torch.library.custom_op("evermoe_tests::beat", mutates_args=())
def beat(x: Tensor) -> Tensor:
    """Return a copy, after a collective of the second group; the backward has one, too."""
    BEATS.beat("repeat" if torch._C._current_graph_task_id() >= 0 else "forward")
    return x.clone()


@torch.library.custom_op("evermoe_tests::beat_backward", mutates_args=())
def beat_backward(gradient: Tensor) -> Tensor:
    """Return a copy of the gradient, after a collective of the second group."""
    BEATS.beat("backward")
    return gradient.clone()


beat.register_fake(torch.empty_like)
beat_backward.register_fake(torch.empty_like)
beat.register_autograd(lambda ctx, gradient: beat_backward(gradient))
