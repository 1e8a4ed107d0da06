"""Copies that repeat the steps of units which other members train: the session's use of `sender` and `replica`.

A step's reduced gradients reach the replicas *before* the members vote on it, so that a step which is committed can be
repeated wherever a copy is, and none is lost with a node. The factor of clipping and the fact that the step counts are
known to all from the vote itself: they need no message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evermoe.arrangement import Kept
from evermoe.courier import Courier, Parcel
from evermoe.replay import Profile
from evermoe.replica import Replica, ReplicaBehind
from evermoe.sender import GradientSender, Row
from evermoe.units import TrainingState

SIZES_TAG, MESSAGES_TAG = 1, 2
MOST_MESSAGES = 2
"""Of a parameter in a step: its full state, and its gradient."""
LOG_STEPS = 12
"""Gradients that a replica has room for: a batch, the newest steps, and one that is on its way."""


@dataclass
class Exchanged:
    """What became of one step's messages, on this member."""

    sent_bytes: int = 0
    needs_full_state: set[str] = field(default_factory=set)
    """Units of which a message was damaged or missing."""


class ReplayedCopies:
    """The units that this member sends, and those that it keeps for others, until the next arrangement.

    Args:
        state: this member's units.
        kept: those that are replayed, the same list on all members.
        rank: this member.
        profile: of the optimizer, from `evermoe.replay.calibrate`; None: only full states can be sent.
        log_bytes: bound of the replica's log; None for as many gradients as are needed at a time.
    """

    def __init__(
        self,
        state: TrainingState,
        kept: Iterable[Kept],
        rank: int,
        profile: Profile | None,
        *,
        log_bytes: int | None = None,
    ) -> None:
        self.state = state
        kept = list(kept)
        self._to = _by_peer((holder, each.unit) for each in kept if each.primary == rank for holder in each.holders)
        self._from = _by_peer((each.primary, each.unit) for each in kept if rank in each.holders)
        mine = list(dict.fromkeys(unit for units in self._to.values() for unit in units))
        theirs = [state.by_name[unit] for units in self._from.values() for unit in units]
        self.sender = GradientSender(
            state.optimizer, {unit: _rows(state, unit) for unit in mine}, profile=profile, is_hooked=False
        )
        most = sum(unit.pieces[0].nbytes + 256 for unit in theirs)
        self.replica = Replica(theirs, log_bytes=max(1, log_bytes or LOG_STEPS * most))

    @property
    def has_peers(self) -> bool:
        """Whether this member sends or keeps anything."""
        return bool(self._to or self._from)

    @property
    def units(self) -> list[str]:
        """That are kept here for others."""
        return [unit for units in self._from.values() for unit in units]

    def exchange(
        self, courier: Courier, step: int, selected: Collection[str] | None = None, *, only_states: bool = False
    ) -> Exchanged:
        """Sends the step's messages and takes over those of the others; in a thread of the courier.

        Args:
            courier: whose connections are used.
            step: number of the step that comes.
            selected: units that take part; None for all.
            only_states: full states as they are now, after this step, and no gradients.

        Raises:
            PeerLost: another member is gone.
        """
        result = Exchanged()
        sizes = {peer: torch.zeros(self._most_messages(units), dtype=torch.int64) for peer, units in self._from.items()}
        rows = [courier.receive(Parcel(row.view(torch.uint8), peer, SIZES_TAG)) for peer, row in sizes.items()]
        make = self.sender.states if only_states else self.sender.coming
        outgoing = list(self._outgoing(selected, lambda unit: [message for _, message in make(step, [unit])]))
        courier.send(parcel for parcel in outgoing if parcel.tag == SIZES_TAG)
        for transfer in rows:
            transfer.wait()
        # A message is only sent once its peer waits for it: so all wait for theirs before anybody sends.
        arriving = {peer: torch.empty(int(row.sum()), dtype=torch.uint8) for peer, row in sizes.items() if row.any()}
        messages = [courier.receive(Parcel(data, peer, MESSAGES_TAG)) for peer, data in arriving.items()]
        result.sent_bytes = courier.send(parcel for parcel in outgoing if parcel.tag == MESSAGES_TAG)
        for (peer, data), transfer in zip(arriving.items(), messages, strict=True):
            transfer.wait()
            self._take(data, sizes[peer].tolist(), result)
        return result

    def committed(self, clip: float) -> None:
        """All members have agreed on the step, with gradients multiplied by `clip`; the optimizer has taken it."""
        self.sender.stepped()
        self.replica.release(clip=clip)

    def interrupted(self) -> None:
        """The step will be taken anew, or never."""
        self.replica.discard()

    def stored(self) -> Iterator[tuple[str, int, Tensor, int]]:
        """Unit, step, bytes and digest of everything that is kept here for others, as new as it gets."""
        for unit in self.units:
            step = self.replica.version(unit)
            if step is not None:
                try:
                    caught_up = self.replica.catch_up(unit, step)
                except ReplicaBehind:
                    continue
                yield unit, caught_up.step, caught_up.state, caught_up.digest

    def close(self) -> None:
        """Ends the replica's thread."""
        self.replica.close()

    def _most_messages(self, units: Sequence[str]) -> int:
        return MOST_MESSAGES * sum(len(_parameters(self.state, unit)) for unit in units)

    def _outgoing(
        self, selected: Collection[str] | None, make: Callable[[str], list[NDArray[np.uint8]]]
    ) -> Iterator[Parcel]:
        made: dict[str, list[NDArray[np.uint8]]] = {}
        for peer, units in self._to.items():
            row = torch.zeros(self._most_messages(units), dtype=torch.int64)
            messages = []
            for unit in units:
                if selected is None or unit in selected:
                    if unit not in made:
                        made[unit] = make(unit)
                    messages += made[unit]
            for place, message in enumerate(messages):
                row[place] = len(message)
            yield Parcel(row.view(torch.uint8), peer, SIZES_TAG)
            if messages:
                yield Parcel(torch.from_numpy(np.concatenate(messages)), peer, MESSAGES_TAG)

    def _take(self, data: Tensor, sizes: Sequence[int], result: Exchanged) -> None:
        for message in data.split([size for size in sizes if size]):
            received = self.replica.receive(message.numpy(), hold=True)
            if received.needs_full_state:
                result.needs_full_state |= set(self.units) if received.unit is None else {received.unit}


def _by_peer(pairs: Iterable[tuple[int, str]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for peer, unit in pairs:
        found.setdefault(peer, []).append(unit)
    return dict(sorted(found.items()))


def _parameters(state: TrainingState, unit: str) -> list[str]:
    """Names of a unit's parameters and buffers, without the optimizer's state of them."""
    pieces = [piece.name for piece in state.by_name[unit].pieces]
    return [name for name in pieces if not any(name.startswith(f"{other}/") for other in pieces)]


def _rows(state: TrainingState, unit: str) -> dict[str, Tensor | Row]:
    """What the sender is to follow of a unit that is trained here."""
    about = state.by_name[unit]
    if about.layer is None:
        return dict(state.dense_tensors(unit))
    layer = state.layers[about.layer]
    return {"weights": Row(layer.weights, layer.experts.index(about.expert or 0))}
