"""Copies that repeat the steps of units that other members train: the session's use of `sender` and `replica`.

A step's reduced gradients reach the replicas *before* the members vote on it. So every replica can repeat a committed
step, and the loss of a node loses none. All members know the clip factor and the outcome from the vote itself: neither
needs a message.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from evermoe._native import RECORD_HEADER_BYTES
from evermoe.comm.courier import Courier, Message
from evermoe.comm.pacer import AT_ONCE
from evermoe.comm.tags import REPLAY_HEAD, REPLAY_TAIL
from evermoe.comm.transport import Transfer
from evermoe.copies.replay.calibrate import Arithmetics
from evermoe.copies.replay.early_gradients import MAX_MESSAGES, EarlyGradients
from evermoe.copies.replay.early_states import EarlyStates
from evermoe.copies.replay.frame import Frame
from evermoe.copies.replay.part import parameters_of, parts_of
from evermoe.copies.replay.repeater import Damage
from evermoe.copies.replay.replica import CaughtUp, Received, Replica
from evermoe.copies.replay.sender import GradientSender, Row
from evermoe.copies.replay.source import Record, RecordMemory, take_digests, wait_for_gradients
from evermoe.errors import ReplicaBehind
from evermoe.planning.protection import LOG_STEPS, RECORD_BYTES, UnitProtection
from evermoe.planning.seating import HEAD_BYTES
from evermoe.profile.memory import in_huge_pages
from evermoe.state.stored import KeptCopies
from evermoe.state.training_state import TrainingState

PROOF_STEPS = 64
"""Steps in which the complete state of each replica is compared with its trainer's twice."""


@dataclass
class ExchangeResult:
    """Outcome of one step's messages on this member."""

    sent_bytes: int = 0
    held: int = 0
    """Messages of other members that are in the log now."""
    needs_full_state: set[str] = field(default_factory=set)
    """Units whose message was damaged, missing or found no room, or whose state on this member is damaged."""
    problem: str = ""
    """Reason for the first of them."""
    damages: list[Damage] = field(default_factory=list)
    """Units whose state on this member was found to be damaged."""


class ReplayExchange:
    """The units that this member sends, and those that it keeps for others, until the next plan.

    Args:
        state: this member's units.
        kept: replayed units, the same list on all members; replicas begin in this order.
        rank: of this member.
        arithmetics: of the optimizer; of parameters without one only full states can be sent.
        log_bytes: bound of the replica's log, raised to the largest gradient; None for `LOG_STEPS` gradients.
        keeps_previous: `stored` also yields the step before the newest, the only one at which other units are complete.
        device: device of the units that this member keeps.
        message_bytes: maximum bytes of a message of states that are sent while a step computes; None: by the link.
        alone: units whose gradients are final once backward has computed them: see `early_gradients`.
        bucket_bytes: minimum bytes of a message of gradients that are sent during backward; 0 sends none then.
        keeps_disputes: see `Replica`.
    """

    def __init__(
        self,
        state: TrainingState,
        kept: Iterable[UnitProtection],
        rank: int,
        arithmetics: Arithmetics,
        *,
        log_bytes: int | None = None,
        keeps_previous: bool = False,
        device: str = "cpu",
        message_bytes: int | None = None,
        alone: Collection[str] = (),
        bucket_bytes: int = 0,
        keeps_disputes: bool = False,
    ) -> None:
        self.state, self.keeps_previous, self.device = state, keeps_previous, torch.device(device)
        kept = list(kept)
        self._holders = {each.unit: each.holders for each in kept if each.primary == rank}
        """Ranks that keep each unit which this member sends, in the order in which replicas begin."""
        self.primaries = {each.unit: each.primary for each in kept if rank in each.holders}
        """The rank that sends each unit which this member keeps, in the same order."""
        self._to = _by_peer((holder, unit) for unit, holders in self._holders.items() for holder in holders)
        self._from = _by_peer((primary, unit) for unit, primary in self.primaries.items())
        mine = list(dict.fromkeys(unit for units in self._to.values() for unit in units))
        theirs = [state.catalog.by_name[unit] for units in self._from.values() for unit in units]
        self.sender = GradientSender(
            state.optimizer, {unit: rows_of(state, unit) for unit in mine}, arithmetics=arithmetics, is_hooked=False
        )
        self.early = EarlyStates(
            state.catalog, self._holders, self.primaries, self.sender, state.optimizer, message_bytes
        )
        """States from before the next step that may be sent while it computes; otherwise `exchange_step` sends them."""
        with_rest = {each.primary for each in kept if each.unit not in alone}
        early = [each for each in kept if each.unit in alone]
        self.gradients = EarlyGradients(state, early, with_rest, rank, self.sender, bucket_bytes)
        """Gradients that are sent while backward computes others."""
        self._outgoing_frames = {peer: self._frame(units, keeps_tail=True) for peer, units in self._to.items()}
        self._incoming_frames = {peer: self._frame(units) for peer, units in self._from.items()}
        gradients = [
            4 * math.prod(spec.shape) + RECORD_BYTES
            for units in self._from.values()
            for u in units
            for spec in parameters_of(state.catalog.by_name[u])
        ]
        log_bytes = LOG_STEPS * sum(gradients) if log_bytes is None else log_bytes
        log_bytes = max([1, log_bytes, *gradients])
        self.replica = Replica(theirs, device=device, log_bytes=log_bytes, keeps_disputes=keeps_disputes)
        self._previous: dict[tuple[str, int], CaughtUp] = {}
        """States one step before the newest that `stored` has yielded; the replica itself has moved past them."""

    @property
    def has_peers(self) -> bool:
        """Whether this member sends or keeps anything."""
        return bool(self._to or self._from)

    @property
    def units(self) -> list[str]:
        """Units that this member keeps for others."""
        return [unit for units in self._from.values() for unit in units]

    def next_digests(self) -> Callable[[], None] | None:
        """Return what reads some of the state that this member trains, for replicas to compare; None in most steps.

        Nothing may write the state while it is read.
        """
        sources = self.sender.turns.choose(PROOF_STEPS)
        return partial(take_digests, sources, self.state.optimizer) if sources else None

    def begin_with(self, courier: Courier, step: int, copies: KeptCopies) -> ExchangeResult:
        """Bring all replicas to the state after a step. Runs in a courier's thread.

        A replica begins with the bytes that its member already has, or with those that the trainer sends. States are
        taken over in the order of the plan, as soon as they arrive, also while this member sends others.

        Args:
            courier: sends and receives.
            step: number of steps taken.
            copies: the copies of this state that members have.

        Raises:
            PeerLost: another member is gone.
        """
        result = ExchangeResult()
        mine = copies.here
        arriving = deque(
            (data, courier.begin_receive(Message(data, peer, REPLAY_TAIL)))
            for unit, peer in self.primaries.items()
            if unit not in mine
            for data in self._room_for(unit)
        )
        for unit in self.units:
            if unit in mine:
                self._begin_here(unit, step, copies, result)
        for unit in self._holders:
            self.sender.follow_unit(unit)
        lacking = ((unit, [p for p in holders if unit not in copies.at(p)]) for unit, holders in self._holders.items())
        memory = RecordMemory(courier.in_flight + 1)  # the records in flight, and the one that is being made
        result.sent_bytes = courier.send_messages(
            (
                Message(torch.from_numpy(record), peer, REPLAY_TAIL, AT_ONCE)
                for unit, peers in lacking
                for _, record in self.sender.full_state_messages(step, [unit] if peers else [], memory.take_buffer)
                for peer in peers
            ),
            lambda sent: self._take_states(courier, arriving, result, waits=False),
        )
        self._take_states(courier, arriving, result, waits=True)
        return result

    def _take_states(
        self, courier: Courier, arriving: deque[tuple[Tensor, Transfer]], result: ExchangeResult, *, waits: bool
    ) -> None:
        """Take over the states that have arrived, in order; with `waits`, wait for all of them."""
        while arriving and (waits or arriving[0][1].has_ended):
            data, transfer = arriving.popleft()
            courier.wait_received(transfer)
            self._take_record(data, result)

    def _room_for(self, unit: str) -> Iterator[Tensor]:
        """Yield memory for the records of a unit's full state; the replica keeps the state in it.

        Pages that nothing has been written to take no memory.
        """
        for specs in parts_of(self.state.catalog.by_name[unit]):
            nbytes = RECORD_HEADER_BYTES + sum(spec.nbytes for spec in specs)
            yield in_huge_pages(torch.empty(nbytes, dtype=torch.uint8))

    def _begin_here(self, unit: str, step: int, copies: KeptCopies, result: ExchangeResult) -> None:
        state = in_huge_pages(torch.empty(self.state.catalog.by_name[unit].nbytes, dtype=torch.uint8))
        if copies.read(unit, state):
            self.replica.begin_with(unit, step, state)
        else:
            result.needs_full_state.add(unit)
            result.problem = result.problem or f"{unit}: this member's copy can no longer be read"

    def exchange_step(self, courier: Courier, step: int, selected: Collection[str] | None = None) -> ExchangeResult:
        """Send the step's messages and take over those of other members. Runs in a courier's thread.

        Args:
            courier: sends and receives.
            step: number of the next step.
            selected: units that take part; None for all.

        Raises:
            PeerLost: another member is gone, or the sizes of its messages are damaged.
        """
        result = ExchangeResult()
        heads = [
            courier.begin_receive(Message(frame.data, peer, REPLAY_HEAD))
            for peer, frame in self._incoming_frames.items()
        ]
        tails: list[Message] = []
        outgoing = self._outgoing(step, selected, self.gradients.send_rest(courier))
        result.sent_bytes = courier.send_messages(self._head(peer, records, tails) for peer, records in outgoing)
        for transfer in heads:
            transfer.wait()
        for peer, frame in self._incoming_frames.items():
            frame.check_sizes(peer)
        # A peer must be ready for its tail before it is sent, so all members wait for theirs before any sends one.
        sizes = {peer: frame.tail_bytes() for peer, frame in self._incoming_frames.items()}
        arriving = {peer: torch.empty(size, dtype=torch.uint8) for peer, size in sizes.items() if size}
        transfers = [courier.begin_receive(Message(data, peer, REPLAY_TAIL)) for peer, data in arriving.items()]
        result.sent_bytes += courier.send_messages(tails)
        for transfer in transfers:
            transfer.wait()
        self.gradients.wait_for_buckets()
        for record in self.early.take_records():  # everything has arrived, so the states take effect
            self._take_record(record, result)
        rest = (
            part for peer, frame in self._incoming_frames.items() for part in frame.split_records(arriving.get(peer))
        )
        for data, lengths in itertools.chain(self.gradients.records(), rest):
            # If a unit was sent twice, the later record counts.
            held, others = self.replica.hold_all(data.numpy(), lengths)
            result.held += held
            for received in others:
                self._add_outcome(received, result)
        result.damages = self.replica.take_damages()
        for each in result.damages:
            result.problem = result.problem or each.reason
            result.needs_full_state.add(each.unit)
        return result

    def commit_step(self, clip: float | None) -> None:
        """Record that the agreed step was taken, with gradients multiplied by `clip`; None: its update was skipped."""
        self._previous.clear()
        self.sender.on_step(was_skipped=clip is None)
        self.replica.release_held(clip=clip)

    def stored(self, needed: Collection[str] | None = None) -> Iterator[tuple[str, int, int | None]]:
        """Yield unit, step and digest of every copy that this member keeps, as new as possible; `read` has the bytes.

        It yields the same when called again: a recovery may fail and another one follow. Units that are not `needed`
        (None: all are) repeat no step before they are read; their digests are None.
        """
        units = self.units if needed is None else [unit for unit in self.units if unit in needed]
        self._remember_previous(units)
        for (unit, step), caught_up in self._previous.items():
            yield unit, step, caught_up.digest
        yield from self.replica.survey(units)
        for unit in set(self.units).difference(units):
            newest, oldest = self.replica.version(unit), self.replica.oldest(unit)
            if newest is None or oldest is None:
                continue
            if self.keeps_previous and oldest < newest and (unit, newest - 1) not in self._previous:
                yield unit, newest - 1, None
            yield unit, newest, None

    def catch_up(self, needed: Collection[str]) -> Iterator[None]:
        """Bring units that this member keeps to the steps that `stored` yields, a part at a time; in any thread."""
        units = [unit for unit in self.units if unit in needed]
        self._remember_previous(units)
        yield
        yield from self.replica.catch_up_all(units)

    def _remember_previous(self, units: Iterable[str]) -> None:
        for unit in units if self.keeps_previous else ():
            newest = self.replica.version(unit)
            if newest is not None and (unit, newest - 1) not in self._previous:
                with suppress(ReplicaBehind):
                    self._previous[unit, newest - 1] = self.replica.catch_up(unit, newest - 1)

    def read(self, unit: str, step: int, out: Tensor | None = None, *, lends: bool = False) -> Tensor:
        """Return the bytes of a copy from `stored`, uint8 `[nbytes]`; empty if they no longer exist.

        They are written to `out`, uint8 `[nbytes]`, if it is given. With `lends`, they may be in the replica's memory.
        """
        self._remember_previous([unit])
        if (unit, step) in self._previous:
            state = self._previous[unit, step].state
            return state if out is None else out[: len(state)].copy_(state)
        try:
            return self.replica.read(unit, step, out, lends=lends)
        except ReplicaBehind:
            return torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """End the replica's thread, and send nothing early any more."""
        self.gradients.close()
        self.replica.close()

    def _frame(self, units: Sequence[str], *, keeps_tail: bool = False) -> Frame:
        """Return memory for the records of a step. A kept tail has room for the units that no bucket has."""
        parameters = {unit: parameters_of(self.state.catalog.by_name[unit]) for unit in units}
        nbytes = {unit: sum(each.nbytes + RECORD_HEADER_BYTES for each in specs) for unit, specs in parameters.items()}
        rest = sum(size for unit, size in nbytes.items() if unit not in self.gradients.units)
        tail = rest if keeps_tail and rest > HEAD_BYTES else 0
        return Frame(MAX_MESSAGES * sum(map(len, parameters.values())), min(sum(nbytes.values()), HEAD_BYTES), tail)

    def _outgoing(
        self, step: int, selected: Collection[str] | None, sent_early: Collection[str]
    ) -> Iterator[tuple[int, list[Record]]]:
        """Yield each peer and its records of the next step, except those of units in `sent_early`."""
        made: dict[str, list[Record]] = {}
        self.sender.reread()
        for peer, units in self._to.items():
            chosen = [unit for unit in units if unit not in sent_early and (selected is None or unit in selected)]
            for unit in chosen:
                if unit not in made:
                    made[unit] = list(self.sender.next_step_records(step, unit))
            records = [record for unit in chosen for record in made[unit]]
            wait_for_gradients(self.state.devices())
            yield peer, records

    def _head(self, peer: int, records: Sequence[Record], tails: list[Message]) -> Message:
        """Return the message that goes to a peer at once; what does not fit is added to `tails`."""
        head, tail = self._outgoing_frames[peer].write_records(records)
        if len(tail):
            tails.append(Message(tail, peer, REPLAY_TAIL, AT_ONCE))
        return Message(head, peer, REPLAY_HEAD, AT_ONCE)

    def _take_record(self, message: Tensor, result: ExchangeResult) -> None:
        received = self.replica.receive(message.numpy(), hold=True, keep=True)
        result.held += received.code == "ok"
        self._add_outcome(received, result)

    def _add_outcome(self, received: Received, result: ExchangeResult) -> None:
        if received.needs_full_state:
            result.problem = result.problem or f"{received.code}: {received.reason}"
            result.needs_full_state |= set(self.units) if received.unit is None else {received.unit}


def _by_peer(pairs: Iterable[tuple[int, str]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for peer, unit in pairs:
        found.setdefault(peer, []).append(unit)
    return dict(sorted(found.items()))


def rows_of(state: TrainingState, unit: str) -> dict[str, Tensor | Row]:
    """Return the tensors of a unit that this member trains, for the sender."""
    about = state.catalog.by_name[unit]
    if about.layer is None:
        return dict(state.dense_tensors(unit))
    layer = state.layers[about.layer]
    return {"weights": Row(layer.weights, layer.ids.index(about.expert or 0))}
