"""Sums of gradients, and updated weights of their owners, in buckets between the ranks of a step.

    backward    ──head──second──first──embedding──┐
    concurrently    └ bucket 0 ── bucket 1 ───────┴ last bucket with flags ── VOTE ─ update

A bucket leaves as soon as backward has computed its gradients: see `evermoe.comm.arrivals`. The last one waits for the
end of the step. With it the ranks agree on the parameters that have a gradient, and on the buckets in which a gradient
has changed after it was sent: these are summed again.

    replicated   sums at all ranks ─ VOTE ─ update everywhere
    sharded      sums at owners ─ VOTE ─ update at owners ─ weights to all
                                                             └ with "overlap" during the next forward

Experts are summed over their hosts, with the bucket of their layer.

Nothing is lost with an owner that dies while it sends weights: its units are protected as experts are, and in the
recovery all get the weights again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from evermoe.comm.arrivals import Arrivals, Sent
from evermoe.comm.background_collectives import BackgroundCollectives, Pending
from evermoe.comm.group import Group
from evermoe.comm.island import Island
from evermoe.comm.membership import MembershipManager
from evermoe.comm.owner_collectives import send_from_owners
from evermoe.errors import PeerLost
from evermoe.planning.footprint import BUCKET_BYTES
from evermoe.session.bucket import Bucket, BucketSum, plan_buckets
from evermoe.session.gradients import Flats
from evermoe.session.late_weights import LateWeights
from evermoe.state.training_state import TrainingState


def needs_background(model: nn.Module, island: Island | None) -> bool:
    """Return whether a model's gradients fill several buckets, of which all but the last are sent during backward.

    An island's own collectives divide them first: all are sent after backward.
    """
    return island is None and sum(each.nbytes for each in model.parameters() if each.requires_grad) > BUCKET_BYTES


class Buckets:
    """Sums the gradients of a step, and sends the weights that owners have updated.

    Args:
        model: whose gradients they are.
        state: the model's units, with their owners.
        membership: has the groups of all that train.
        device: device of the model.
        overlaps_gather: whether updated weights are sent during the next forward.
    """

    def __init__(
        self,
        model: nn.Module,
        state: TrainingState,
        membership: MembershipManager,
        device: torch.device,
        *,
        overlaps_gather: bool = False,
    ) -> None:
        self._state, self._group = state, membership.trainer_group
        self._position_group = membership.groups.position
        self._background = BackgroundCollectives(membership.side_group, membership.trainer_group, device)
        self._late = LateWeights(self._background, model) if overlaps_gather else None
        self._buckets: list[Bucket] = []
        self._arrivals = Arrivals([], self._send)
        self._trained: set[int] = set()
        """Ids of the parameters in buckets: those that were not frozen at the plan, or have had a gradient since."""
        self._sums: list[BucketSum] = []
        """Sums of this step, of the first buckets."""
        self._tasks: list[Pending] = []
        self._again: list[int] = []
        """Buckets of this step in which a gradient has changed after it was sent."""
        self._present: set[int] = set()
        """Ids of the parameters that have a gradient in this step, on any rank."""
        self._stepped_R: list[list[Tensor]] = []
        """Parameters with a gradient that each rank owns: those that the update changes."""

    # ---- the plan

    def plan(self) -> None:
        """Plan the buckets for the current members, owners and placement of experts; collective.

        Nothing may be under way. Parameters that are frozen on all ranks are left out.

        Raises:
            PeerLost: a member is lost.
        """
        parameters = self._state.parameters_in_order()
        trained = self._group.all_reduce(torch.tensor([float(each.requires_grad) for each in parameters]))
        self._trained = {id(each) for each, count in zip(parameters, trained.tolist(), strict=True) if count}
        self._plan()

    def _plan(self) -> None:
        self._arrivals.close()
        self._buckets = self._divide([each for each in self._state.parameters_in_order() if id(each) in self._trained])
        early = self._buckets[:-1] if self._background.is_available else []
        self._arrivals = Arrivals([bucket.parameters for bucket in early], self._send)

    def _divide(self, parameters: Sequence[Tensor]) -> list[Bucket]:
        owners = {
            id(tensor): rank
            for rank, tensors in enumerate(self._state.owners.tensors_R(self._group.size))
            for tensor in tensors
        }
        layers = list(self._state.layers.values())
        rank, size, shards = self._group.rank, self._group.size, self._state.shards
        return plan_buckets(parameters, layers, owners, rank, size, BUCKET_BYTES, shards)

    # ---- a step

    def begin_step(self, *, may_send: bool = True) -> None:
        """Record that the script begins to compute a step, in which gradients `may_send` during backward or not."""
        self._drop_sums()
        self._arrivals.begin_step(may_send=may_send)

    def begin_backward(self) -> None:
        """Record that the script begins to backpropagate a loss.

        Raises:
            PeerLost: a member is lost, and the group does not finish steps.
        """
        if self._late is not None:
            self._late.wait_in_step()
        self._arrivals.begin_backward()

    def _send(self, number: int, gradients: list[Sent]) -> None:
        by_id = {id(each.parameter): each.gradient for each in gradients}
        self._begin_sum(BucketSum(self._buckets[number], by_id, in_place=False))

    def _begin_sum(self, total: BucketSum) -> None:
        self._sums.append(total)
        self._run(total.sum_dense)
        self._sum_divided(total)
        self._run(total.sum_experts)

    def _sum_divided(self, total: BucketSum) -> None:
        if self._state.shards is not None:  # an island sends nothing in the background
            total.sum_divided(self._position_group)

    def _sum_now(self, bucket: Bucket) -> BucketSum:
        return BucketSum(bucket, {id(each): each.grad for each in bucket.parameters}, in_place=True)

    def _run(self, collective: Callable[[Group], None]) -> None:
        work = partial(collective, self._background.group)
        if self._background.is_available:
            self._tasks.append(self._background.submit(work))
        else:
            work()

    def _wait(self) -> None:
        tasks, self._tasks = self._tasks, []
        self._background.wait(tasks)

    @torch.no_grad()
    def complete(self) -> None:
        """Sum what is not an expert's, and agree on the parameters that have a gradient on any rank; collective.

        An expert's or owner's parameter that has one on another rank alone gets zeros.

        Raises:
            PeerLost: a member is lost.
        """
        changed = [bool(bucket) for bucket in self._arrivals.end_backward()]
        if self._state.shards is not None:
            self._state.shards.take_gradients(self._state.dense)
        weights = [layer.weights for layer in self._state.layers.values()]
        every = [*self._state.dense, *weights]
        has_gradient = [each.grad is not None for each in every]
        if self._group.size > 1:
            for bucket in self._buckets[len(self._sums) : -1]:
                self._begin_sum(self._sum_now(bucket))
            changed += [False] * (len(self._sums) - len(changed))
            last = self._sum_now(self._buckets[-1])
            self._sums.append(last)
            self._run(partial(last.sum_dense, flags=torch.tensor([*has_gradient, *changed], dtype=torch.float32)))
            self._sum_divided(last)
            self._wait()
            assert last.flags is not None
            found = [count > 0 for count in last.flags.tolist()]
            self._background.group.check_nccl()
            has_gradient, changed = found[: len(every)], found[len(every) :]
        self._again = [number for number, is_changed in enumerate(changed) if is_changed]
        self._present = {id(each) for each, has in zip(every, has_gradient, strict=True) if has}
        for each in (*self._state.owners.tensors(), *weights):
            if id(each) in self._present and each.grad is None:
                each.grad = torch.zeros_like(each)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients of experts, and of all that has changed since; put all sums in place; collective.

        The owner of a parameter keeps the sum. The other members drop their gradients, and their optimizers skip those
        parameters.

        Raises:
            PeerLost: a member is lost.
        """
        every_R = self._state.owners.tensors_R(self._group.size)
        self._stepped_R = [[each for each in tensors if id(each) in self._present] for tensors in every_R]
        if self._group.size == 1:
            return
        self._run(self._sums[-1].sum_experts)
        sums = self._sums
        for number in self._again:
            sums[number] = self._sum_now(self._buckets[number])
            self._run(sums[number].sum_dense)
            self._sum_divided(sums[number])
            self._run(sums[number].sum_experts)
        new = self._present - self._trained
        thawed = [each for each in self._state.parameters_in_order() if id(each) in new] if new else []
        for bucket in self._divide(thawed) if thawed else ():
            self._begin_sum(self._sum_now(bucket))
        self._wait()
        for each in sums:
            each.put(self._present, self._group.rank)
        if thawed:
            self._trained |= {id(each) for each in thawed}
            self._plan()

    @property
    def extremes(self) -> list[Tensor]:
        """Extremes of this member's gradients before they were summed, but for experts'; none of a member alone."""
        return [each for total in self._sums for each in total.extremes]

    @property
    def flats(self) -> Flats | None:
        """Sums of the gradients that several ranks step; None where each gradient is alone."""
        if self._group.size == 1:
            return None
        return Flats(
            [flat for total in self._sums for flat in total.flats],
            [flat for total in self._sums for flat in total.divided_flats],
        )

    def have_succeeded(self) -> bool:
        """Wait for the GPU; return whether all collectives have succeeded."""
        return self._group.wait_for_collectives() and self._background.have_succeeded()

    # ---- weights

    @torch.no_grad()
    def send_updated(self) -> None:
        """Send the weights that the update of the latest `reduce` has changed; collective.

        The step itself is taken: where a member is lost, the group is dropped, and no error raised.
        """
        stepped_R, self._stepped_R = self._stepped_R, []
        if self._late is not None:
            stepped = {id(each) for tensors in stepped_R for each in tensors}
            buckets = [
                [[each for each in tensors if id(each) in stepped] for tensors in bucket.owned_R]
                for bucket in reversed(self._buckets)  # most forwards use parameters in the model's order
            ]
            self._late.begin(buckets)
            return
        try:
            send_from_owners(stepped_R, self._group)
        except PeerLost as lost:
            self._group.drop(str(lost))

    @torch.no_grad()
    def send_all(self) -> None:
        """Send the weights and buffers of all units that have owners, after a change of owners; collective."""
        self.end()
        send_from_owners(self._state.owners.tensors_R(self._group.size), self._group)

    def await_weights(self) -> None:
        """Wait for the weights that are still on their way; where a member is lost, the group is dropped."""
        if self._late is not None:
            try:
                self._late.wait()
            except PeerLost as lost:
                self._group.drop(str(lost))

    def end(self) -> None:
        """Wait until nothing is under way; if something is, the group must have been dropped."""
        self._background.end()
        self._drop_sums()
        if self._late is not None:
            self._late.forget()

    def _drop_sums(self) -> None:
        self._arrivals.stop()
        self._sums, self._tasks, self._again = [], [], []

    def close(self) -> None:
        """End the thread and remove all hooks."""
        self.end()
        self._arrivals.close()
        self._background.close()
        if self._late is not None:
            self._late.close()
