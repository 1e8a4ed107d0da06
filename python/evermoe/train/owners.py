"""Gradients and weights of all that is not an expert, between the ranks of a step.

    replicated   backward ─ all-reduce ─ VOTE ─ update everywhere
    sharded      backward ─ reduce to owners ─ VOTE ─ update at owners ─ weights to all

An owner that is lost while it sends weights takes nothing with it: its units are protected as experts are, and in the
recovery that follows all get the weights again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evermoe.comm.collectives import reduce_dense, reduce_to_owners, send_from_owners
from evermoe.comm.group import Group
from evermoe.errors import PeerLost
from evermoe.state.training_state import TrainingState


class DenseExchange:
    """The collectives of the parameters that are not experts'.

    Args:
        state: whose parameters they are, and who owns them.
        group: all that train.
    """

    def __init__(self, state: TrainingState, group: Group) -> None:
        self._state, self._group = state, group
        self._stepped_R: list[list[Tensor]] = []
        """Parameters with a gradient that each rank owns: those that the update changes."""

    def reduce(self) -> None:
        """Sums the gradients over all ranks, which have gradients of the same parameters; collective.

        Those that have an owner are left to it: the others have none any more, and their optimizers skip them.
        """
        every_R = self._state.owners.tensors_R(self._group.size)
        owned = {id(tensor) for tensors in every_R for tensor in tensors}
        reduce_dense([parameter for parameter in self._state.dense if id(parameter) not in owned], self._group)
        reduce_to_owners([[t.grad for t in tensors if t.grad is not None] for tensors in every_R], self._group)
        self._stepped_R = [[tensor for tensor in tensors if tensor.grad is not None] for tensors in every_R]
        for rank, tensors in enumerate(self._stepped_R):
            for tensor in tensors if rank != self._group.rank else ():
                tensor.grad = None

    @torch.no_grad()
    def send_updated(self) -> None:
        """Sends the weights that the update of the latest `reduce` has changed; collective.

        The step itself is taken: where a member is lost, the group is dropped, and no error raised.
        """
        stepped_R, self._stepped_R = self._stepped_R, []
        try:
            send_from_owners(stepped_R, self._group)
        except PeerLost as lost:
            self._group.drop(str(lost))

    @torch.no_grad()
    def send_all(self) -> None:
        """Sends the weights and buffers of all units that have owners; collective."""
        send_from_owners(self._state.owners.tensors_R(self._group.size), self._group)
