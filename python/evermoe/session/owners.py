"""Sums of gradients and exchange of weights of all parameters outside experts, between the ranks of a step.

    replicated   backward ─ all-reduce ─ VOTE ─ update everywhere
    sharded      backward ─ reduce to owners ─ VOTE ─ update at owners ─ weights to all
                   │ in buckets, on CPUs, as soon as their gradients exist: see `evermoe.session.early_sums`
                   └ with "overlap" the weights are sent during the next forward: `evermoe.session.late_weights`

Nothing is lost with an owner that dies while it sends weights: its units are protected as experts are, and in the
recovery all get the weights again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from evermoe.comm.collectives import complete_gradients, reduce_dense, reduce_to_owners, send_from_owners
from evermoe.comm.membership import MembershipManager
from evermoe.errors import PeerLost
from evermoe.session.early_sums import EarlySums
from evermoe.session.late_weights import LateWeights
from evermoe.state.training_state import TrainingState


class DenseExchange:
    """The collectives of the parameters that are not experts'.

    Args:
        state: whose parameters they are, and who owns them.
        membership: has the groups of all that train.
        overlaps_gather: whether updated weights are sent during the next forward.
    """

    def __init__(self, state: TrainingState, membership: MembershipManager, *, overlaps_gather: bool = False) -> None:
        self._state, self._group = state, membership.trainer_group
        self.early = EarlySums(membership.side_group, membership.trainer_group)
        """Sums that run while the script computes."""
        self.late: LateWeights | None = None
        """Sends weights while the script computes; None where training waits for them."""
        if overlaps_gather:
            self.late = LateWeights(membership.side_group, membership.trainer_group)
        self._is_changed: list[bool] = []
        """Whether a member has other gradients now, for each sum."""
        self._stepped_R: list[list[Tensor]] = []
        """Parameters with a gradient that each rank owns: those that the update changes."""

    def complete(self, weights: Sequence[nn.Parameter]) -> None:
        """Make all ranks agree on the parameters with a gradient, including the experts' in `weights`; collective."""
        changed = self.early.send_rest()
        self._is_changed = complete_gradients([*self._state.dense, *weights], self._group, changed)

    def reduce(self) -> None:
        """Sum the gradients over all ranks, which must have agreed in `complete`; collective.

        The owner keeps a sum. The other members drop their gradients, and their optimizers skip those parameters.
        """
        every_R = self._state.owners.tensors_R(self._group.size)
        owned = {id(tensor) for tensors in every_R for tensor in tensors}
        reduce_dense([parameter for parameter in self._state.dense if id(parameter) not in owned], self._group)
        self._stepped_R = [[tensor for tensor in tensors if tensor.grad is not None] for tensors in every_R]
        summed = self.early.finish(self._is_changed)
        rest_R = [
            [t.grad for t in tensors if t.grad is not None and id(t) not in summed] for tensors in self._stepped_R
        ]
        reduce_to_owners(rest_R, self._group)
        self.early.plan(self._stepped_R)
        for rank, tensors in enumerate(self._stepped_R):
            for tensor in tensors if rank != self._group.rank else ():
                tensor.grad = None

    @torch.no_grad()
    def send_updated(self) -> None:
        """Send the weights that the update of the latest `reduce` has changed; collective.

        The step itself is taken: where a member is lost, the group is dropped, and no error raised.
        """
        stepped_R, self._stepped_R = self._stepped_R, []
        if self.late is not None:
            self.late.begin(stepped_R)
            return
        try:
            send_from_owners(stepped_R, self._group)
        except PeerLost as lost:
            self._group.drop(str(lost))

    @torch.no_grad()
    def send_all(self) -> None:
        """Send the weights and buffers of all units that have owners, after a change of owners; collective."""
        self.early.forget()
        self.end()
        send_from_owners(self._state.owners.tensors_R(self._group.size), self._group)

    def await_weights(self) -> None:
        """Wait for the weights that are still on their way; where a member is lost, the group is dropped."""
        if self.late is not None:
            try:
                self.late.wait()
            except PeerLost as lost:
                self._group.drop(str(lost))

    def begin_backward(self) -> None:
        """The script begins to backpropagate a loss.

        Raises:
            PeerLost: a member is gone.
        """
        if self.late is not None:
            self.late.wait()
        self.early.begin_backward()

    def end(self) -> None:
        """Wait until nothing is under way; if something is, the group must have been dropped."""
        self.early.end()
        if self.late is not None:
            self.late.end()

    def close(self) -> None:
        """End all threads and remove all hooks."""
        self.early.forget()
        if self.late is not None:
            self.late.close()
