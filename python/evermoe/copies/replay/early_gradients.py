"""Gradients that are sent to replicas while backward still computes others.

    backward      ──last layer── … ──first layer──┐
    concurrently          └ bucket 0 ── bucket 1 ──┴ the rest, and what has changed since ── VOTE

Only gradients of experts that one member alone trains are sent early: nothing is added to them after backward. A bucket
holds all that a member sends of some layers. The last layers come first, in the order of backward.

A bucket is sent before its gradients are known to be final: see `evermoe.comm.arrivals`. The state and the optimizer's
numbers may change, too. What has changed since is sent again with the rest, and replicas hold the later record of a
step. A member that had to send something twice sends nothing early for some steps.

Every bucket of the plan is sent in every step, empty if its gradients could not be sent early: the receiver waits for
all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from evermoe._native import RECORD_HEADER_BYTES
from evermoe.comm.arrivals import Arrivals, Sent
from evermoe.comm.courier import Courier, Message
from evermoe.comm.pacer import ANY_TIME
from evermoe.comm.tags import REPLAY_GRADIENTS
from evermoe.comm.task import Task
from evermoe.comm.transport import Transfer
from evermoe.copies.replay.frame import Frame
from evermoe.copies.replay.part import parameters_of
from evermoe.copies.replay.sender import GradientSender
from evermoe.copies.replay.source import PROOF_BYTES, Record, wait_for_gradients
from evermoe.copies.replay.step_bytes import gradient_bytes
from evermoe.planning.protection import UnitProtection
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import Unit

MAX_MESSAGES = 2
"""Messages of a parameter in a step: its full state or a proof, and its gradient."""


def layer_groups(units: Iterable[Unit], bucket_bytes: int, *, has_rest: bool) -> list[list[str]]:
    """The layers of each bucket of one member, the last ones first; the same on all members.

        >>> import torch
        >>> from evermoe.state.unit import TensorSpec
        >>> layers = ["one", "two", "three"]
        >>> units = [Unit(f"{each}.0", (TensorSpec("weights", (4,), torch.float32),), each, 0) for each in layers]
        >>> layer_groups(units, 20, has_rest=False)  # two layers of 16 bytes each; "one" goes with the rest
        [['three', 'two']]

    Args:
        units: that the member sends early, in the order of the catalog.
        bucket_bytes: minimum bytes of the gradients in a bucket; 0 for no buckets.
        has_rest: whether the member also sends gradients after they are reduced; if not, the last bucket is the rest.
    """
    nbytes: dict[str, int] = {}
    for unit in units:
        assert unit.layer is not None
        nbytes[unit.layer] = nbytes.get(unit.layer, 0) + sum(map(gradient_bytes, parameters_of(unit)))
    groups: list[list[str]] = []
    room = 0
    for layer in reversed(nbytes) if bucket_bytes else ():
        if room <= 0:
            groups.append([])
            room = bucket_bytes
        groups[-1].append(layer)
        room -= nbytes[layer]
    return groups if has_rest else groups[:-1]


class _Bucket(NamedTuple):
    """Message from one member to another with the records of some layers."""

    units: list[str]
    frame: Frame

    def write_records(self, made: Mapping[str, list[Record]]) -> Tensor:
        """Write the records of these units, and return the message."""
        data, tail = self.frame.write_records([record for unit in self.units for record in made.get(unit, ())])
        assert not len(tail), "a bucket has room for a proof and a gradient of each parameter"
        return data


class EarlyGradients:
    """The buckets that this member sends and receives in each step.

    Args:
        state: this member's units.
        kept: units that are sent early, with the ranks that send and keep them; the same on all members.
        with_rest: members that also send other units.
        rank: of this member.
        sender: encodes this member's gradients.
        bucket_bytes: minimum bytes of the gradients in a bucket; 0 for no buckets.
    """

    def __init__(
        self,
        state: TrainingState,
        kept: Sequence[UnitProtection],
        with_rest: Collection[int],
        rank: int,
        sender: GradientSender,
        bucket_bytes: int,
    ) -> None:
        self._state, self._sender = state, sender
        self._layers: list[list[str]] = []
        """Layers of each bucket that this member sends."""
        self._outgoing: list[dict[int, _Bucket]] = []
        """The same buckets, by peer."""
        self._incoming: dict[int, list[Frame]] = {}
        """Frames of the buckets that this member receives, by peer."""
        self.units: set[str] = set()
        """Units that buckets have room for, among those that this member sends or keeps."""
        order = {unit.name: number for number, unit in enumerate(state.catalog.units)}
        kept = sorted(kept, key=lambda each: order[each.unit])
        for primary in sorted({each.primary for each in kept}):
            own = [each for each in kept if each.primary == primary]
            if rank != primary and all(rank not in each.holders for each in own):
                continue
            units = [state.catalog.by_name[each.unit] for each in own]
            groups = layer_groups(units, bucket_bytes, has_rest=primary in with_rest)
            layers_of_all = {layer for layers in groups for layer in layers}
            self.units |= {unit.name for unit in units if unit.layer in layers_of_all}
            peers = sorted({peer for each in own for peer in each.holders}) if primary == rank else [rank]
            buckets = [self._buckets(own, layers, peers) for layers in groups]
            if primary == rank:
                self._layers, self._outgoing = groups, buckets
            elif found := [by_peer[rank].frame for by_peer in buckets if by_peer]:
                self._incoming[primary] = found
        self._transfers: list[Transfer] = []
        self._courier: Courier | None = None
        """Sends the buckets of this step."""
        self._step, self._selected = 0, frozenset[str]()
        self._changed: set[str] = set()
        """Layers whose gradients have changed since they were sent."""
        self._next = 0
        """Number of the next bucket to send."""
        self._sent_units: set[str] = set()
        """Units whose gradients were sent in this step."""
        self.tasks: list[Task[None]] = []
        """Transfers of this step."""
        weights = [[state.layers[layer].weights for layer in layers] for layers in self._layers]
        self._arrivals = Arrivals(weights, self._begin_send)

    def _buckets(
        self, kept: Sequence[UnitProtection], layers: Collection[str], peers: Iterable[int]
    ) -> dict[int, _Bucket]:
        """Return each peer's bucket: the units of these layers that the peer keeps."""
        by_name = self._state.catalog.by_name
        mine = [each for each in kept if by_name[each.unit].layer in layers]
        units = {peer: [each.unit for each in mine if peer in each.holders] for peer in peers}
        return {peer: _Bucket(some, _frame(map(by_name.__getitem__, some))) for peer, some in units.items() if some}

    # ---- the training thread and the backward thread

    def begin_step(self, courier: Courier, step: int, selected: Collection[str] | None, *, may_send: bool) -> None:
        """Begin a step. Nothing of the previous one may be in flight.

        Args:
            courier: sends and receives.
            step: number of the next step.
            selected: units that take part; None for all.
            may_send: whether gradients may be sent as soon as they exist.
        """
        self._courier = courier
        self._step, self._selected = step, frozenset(self._state.catalog.by_name if selected is None else selected)
        self._next, self._sent_units, self._changed, self.tasks = 0, set(), set(), []
        self._arrivals.begin_step(may_send=may_send)
        if self._incoming:
            self.tasks.append(courier.submit(partial(self._expect, courier)))

    def begin_backward(self) -> None:
        """Record that the script begins a backward pass."""
        self._arrivals.begin_backward()

    def _begin_send(self, number: int, sent: Sequence[Sent]) -> None:
        assert self._courier is not None
        self.tasks.append(self._courier.submit(partial(self._send, self._courier, number, sent)))
        self._next = number + 1

    def end_backward(self) -> None:
        """Record that the script's gradients are final: what has changed since it was sent goes with the rest.

        Those of experts that several members train are reduced afterwards, in the same tensors.
        """
        changed = {id(each.parameter) for bucket in self._arrivals.end_backward() for each in bucket}
        self._changed = {path for path, layer in self._state.layers.items() if id(layer.weights) in changed}

    def stop_sending(self) -> None:
        """Send nothing more of this step early, and release the gradients that are kept for that."""
        self._arrivals.stop()

    def close(self) -> None:
        """Remove the hooks. Calling it again has no effect."""
        self._arrivals.close()

    # ---- the courier's thread

    def _expect(self, courier: Courier) -> None:
        frames = [(peer, frame) for peer, some in self._incoming.items() for frame in some]
        self._transfers = [courier.begin_receive(Message(frame.data, peer, REPLAY_GRADIENTS)) for peer, frame in frames]

    def _send(self, courier: Courier, number: int, sent: Sequence[Sent]) -> None:
        """Send a bucket without the units that replicas cannot follow: these come with the rest."""
        if number == 0:
            self._sender.reread()
        buckets, gradients = self._outgoing[number], {id(each.parameter): each.gradient for each in sent}
        units = self._selected.intersection(unit for bucket in buckets.values() for unit in bucket.units)
        made = {
            unit: list(self._sender.next_step_records(self._step, unit, gradients))
            for unit in units
            if not self._sender.lacking(unit)
        }
        self._sent_units |= made.keys()
        wait_for_gradients(self._state.devices())
        courier.send_messages(
            Message(bucket.write_records(made), peer, REPLAY_GRADIENTS, ANY_TIME, for_vote=True)
            for peer, bucket in buckets.items()
        )

    def send_rest(self, courier: Courier) -> Collection[str]:
        """Send the remaining buckets empty. Return the units that were sent early and have not changed since."""
        courier.send_at_once(
            Message(bucket.write_records({}), peer, REPLAY_GRADIENTS)
            for buckets in self._outgoing[self._next :]
            for peer, bucket in buckets.items()
        )
        if not self._sent_units:
            return ()
        by_name, has_numbers = self._state.catalog.by_name, self._sender.reread_numbers()
        current = {unit for unit in self._sent_units if has_numbers and not self._sender.lacking(unit)}
        if len(current) < len(self._sent_units):
            self._arrivals.wait_some_steps()
        return {unit for unit in current if by_name[unit].layer not in self._changed}

    def wait_for_buckets(self) -> None:
        """Wait for the buckets of the other members.

        Raises:
            PeerLost: a member is gone, or the sizes of its messages are damaged.
        """
        for transfer in self._transfers:
            transfer.wait()
        self._transfers = []
        for peer, frames in self._incoming.items():
            for frame in frames:
                frame.check_sizes(peer)

    def records(self) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield the records received before `wait_for_buckets` returned: pieces of memory with their sizes."""
        for frames in self._incoming.values():
            for frame in frames:
                yield from frame.split_records(None)


def _frame(units: Iterable[Unit]) -> Frame:
    parameters = [each for unit in units for each in parameters_of(unit)]
    most = sum(gradient_bytes(each) + PROOF_BYTES + MAX_MESSAGES * RECORD_HEADER_BYTES for each in parameters)
    return Frame(MAX_MESSAGES * len(parameters), most)
