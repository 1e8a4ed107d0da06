"""Gradients and weights of all that is not an expert, between the ranks of a step.

    replicated   backward ─ all-reduce ─ VOTE ─ update everywhere
    sharded      backward ─ reduce to owners ─ VOTE ─ update at owners ─ weights to all

Who is lost while weights are sent takes nothing away that others do not keep: the owner's unit is protected as an expert's,
and all get the weights again in the recovery that follows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evermoe.comm.collectives import reduce_dense, reduce_to_owners, send_from_owners
from evermoe.comm.group import Group
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
        owners = self._state.owners
        owned_R = [
            [tensor for tensor in tensors if tensor.grad is not None] for tensors in owners.tensors_R(self._group.size)
        ]
        owned = {id(tensor) for tensors in owned_R for tensor in tensors}
        reduce_dense([parameter for parameter in self._state.dense if id(parameter) not in owned], self._group)
        reduce_to_owners([[tensor.grad for tensor in tensors] for tensors in owned_R], self._group)
        for rank, tensors in enumerate(owned_R):
            for tensor in tensors if rank != self._group.rank else ():
                tensor.grad = None
        self._stepped_R = owned_R

    @torch.no_grad()
    def send_updated(self) -> None:
        """Sends the weights that the update of the latest `reduce` has changed; collective."""
        stepped_R, self._stepped_R = self._stepped_R, []
        if stepped_R:
            send_from_owners(stepped_R, self._group)

    @torch.no_grad()
    def send_all(self) -> None:
        """Sends the weights and buffers of all units that have owners; collective."""
        send_from_owners(self._state.owners.tensors_R(self._group.size), self._group)
