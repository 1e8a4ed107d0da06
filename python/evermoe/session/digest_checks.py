"""Digests in each vote: members that hold the same bits compare a part of them before they take the step.

    step        ─ reduce ─ digests of a part of the state and of the gradients ─ VOTE ─ update
    all equal      n · Σ d² = (Σ d)² over the n members that hold the part
    one differs    the step is refused; members gather the digests, and a majority names the one that differs

A vote carries sums alone, whatever the number of members. A digest is two numbers of 16 bits, whose squares float64
adds up exactly over 2²¹ members. Each vote compares the next part, as large as `CheckBudget` allows; after the last
one the next pass begins.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple

from torch import Tensor

from evermoe.comm.gather import gather_json
from evermoe.comm.membership import MembershipManager
from evermoe.session.check_budget import CheckBudget
from evermoe.session.finding import Finding
from evermoe.state.rotation import Entry, Rotation, Round, Slice
from evermoe.state.same_everywhere import LAST_STEP
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import LOOP_UNITS, digests_of

SLOTS = 8
"""Sets of holders that compare a part each in one vote."""
FIELDS = 5
"""Numbers of a slot: members that compare, two halves of the digest, and their squares."""
NUMBERS = SLOTS * FIELDS + 2
"""Numbers of a vote: those of the slots, seconds of the digests, and seconds of the step."""


class SharedUnits(NamedTuple):
    """Units that the same ranks hold."""

    holders: tuple[int, ...]
    state: Rotation
    gradients: Rotation
    """Empty where they are not compared: where a rank owns a unit, the others drop its gradients."""
    round: Round
    """Bytes that were compared in the current turn of `state`."""

    @property
    def nbytes(self) -> int:
        """Bytes of a pass."""
        return self.state.nbytes + self.gradients.nbytes


class Part(NamedTuple):
    """Bytes that a set of holders compares in a vote."""

    shared: SharedUnits
    of_state: list[Slice]
    of_gradients: list[Slice]

    @property
    def units(self) -> set[str]:
        """Names of its units."""
        return {each.entry.unit for each in (*self.of_state, *self.of_gradients)}

    @property
    def state_nbytes(self) -> int:
        """Bytes of the state in it."""
        return sum((each.stop - each.start) * each.entry.itemsize for each in self.of_state)


class DigestChecks:
    """Compares what several members hold, a part in each vote.

    Args:
        state: this member's units.
        membership: the members; its `trainer_group` has the first ranks of `everyone`.
        compares_gradients: whether members have equal gradients at the vote; code of the script may change them.
    """

    def __init__(self, state: TrainingState, membership: MembershipManager, *, compares_gradients: bool) -> None:
        self._state, self._membership = state, membership
        self._compares_gradients = compares_gradients
        self._shared: list[SharedUnits] = []
        self._budget = CheckBudget()
        self.numbers = [0.0] * NUMBERS
        """Numbers that this member adds to the vote."""
        self._window: list[Part] = []
        """Parts that are compared in this step, by slot."""
        self._verified: dict[tuple[int, ...], int] = {}
        """By holders: the step in which the latest complete turn of their state began."""
        self._at = 0
        """The first of the sets of holders that compare next."""
        self._since = time.monotonic()

    def plan(self) -> None:
        """Begin a new pass, with the current members and placement; the same on all that train."""
        self._window, self._at, self._budget, self._verified = [], 0, CheckBudget(), {}
        self._since = time.monotonic()
        ranks = self._membership.num_trainers
        is_compared = ranks > 1 and self._membership.role == "train"
        self._shared = shared_units(self._state, ranks, with_gradients=self._compares_gradients) if is_compared else []

    @property
    def is_comparing(self) -> bool:
        """Whether members compare anything in their votes."""
        return bool(self._shared)

    def are_all_in(self, holders: Mapping[str, int]) -> bool:
        """Return whether all that is compared is in these units, each with all its holders.

        Args:
            holders: number of members that have equal bytes of a unit.
        """
        return all(
            holders.get(entry.unit) == len(each.holders) for each in self._shared for entry in each.state.entries
        )

    @property
    def verified_through(self) -> int | None:
        """Steps taken in the newest state that all its holders are known to have had equal; None if none is known.

        Nothing has differed since `plan`, and each part was equal in a vote on a later step: by then a checkpoint of
        this state was copied from it.
        """
        is_complete = self._shared and len(self._verified) == len(self._shared)
        return min(self._verified.values()) - 1 if is_complete else None

    # ---- a vote

    def compute(self, step: int) -> None:
        """Compute this member's `numbers` for the vote on a step, whose reduced gradients it has."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self.numbers = mine = [0.0] * NUMBERS
        mine[-1] = seconds
        for part in self._window:  # of a vote that has not passed
            self._record(step, part, holders=0)
        self._window = []
        if not self._shared or step <= LAST_STEP or not self._budget.is_due(step):
            return
        self._window = self._next_window()
        own = {place: [*chain(*part.values())] for place, part in enumerate(map(self._read, self._window)) if part}
        for place, value in zip(own, digests_of([*own.values()]), strict=True):
            low, high = value & 0xFFFF, value >> 16 & 0xFFFF
            mine[place * FIELDS : (place + 1) * FIELDS] = [1.0, low, high, low * low, high * high]
        mine[-2] = time.monotonic() - now

    def _next_window(self) -> list[Part]:
        """Choose the next parts: of each set of holders in proportion to what they hold."""
        sets = [self._shared[(self._at + place) % len(self._shared)] for place in range(min(SLOTS, len(self._shared)))]
        self._at = (self._at + len(sets)) % len(self._shared)
        ranks = {rank for each in sets for rank in each.holders}
        most = max(sum(each.nbytes for each in sets if rank in each.holders) for rank in ranks)
        found = []
        for each in sets:
            share = each.nbytes * self._budget.nbytes // most
            of_gradients = share * each.gradients.nbytes // each.nbytes
            found.append(Part(each, each.state.take(share - of_gradients), each.gradients.take(of_gradients)))
        return found

    def _read(self, part: Part) -> dict[str, list[Tensor]]:
        """Return this member's tensors of a part, by what they are: nothing if it does not hold them yet."""
        found: dict[str, list[Tensor]] = {}
        state = self._state
        if self._membership.trainer_group.rank not in part.shared.holders or state.late.missing & part.units:
            return found
        for unit, slices in groupby(part.of_state, key=lambda each: each.entry.unit):
            tensors = tensors_of(state, unit)
            found[f"the state of {unit}"] = [each.of(tensors[each.entry.name]) for each in slices]
        for each in part.of_gradients:
            gradient = gradient_of(state, each.entry)
            if gradient is not None:
                found.setdefault(f"the gradient of {each.entry.unit}", []).append(each.of(gradient))
        return found

    # ---- the result

    def find(self, step: int, sums: Sequence[float]) -> Finding | None:
        """Return what differs among the members by the sums of their `numbers`; collective if something does.

        Args:
            step: that all members have voted for.
            sums: of the members' `numbers`.

        Raises:
            PeerLost: a member is lost.
        """
        differing = [place for place in range(SLOTS) if differ(sums[place * FIELDS : (place + 1) * FIELDS])]
        self._budget.after(sums[-2], sums[-1])
        if differing:
            return self._compare(differing)
        for place, part in enumerate(self._window):
            self._record(step, part, holders=int(sums[place * FIELDS]))
        self._window = []
        return None

    def _record(self, step: int, part: Part, holders: int) -> None:
        """Record that this number of its holders have compared a part, and that they have equal bytes."""
        shared = part.shared
        if holders == len(shared.holders):
            shared.round.compared(step, part.state_nbytes)
        if shared.state.is_at_start and (began := shared.round.end()) is not None:
            self._verified[shared.holders] = began

    def _compare(self, places: Sequence[int]) -> Finding:
        """Compare digests of each unit's state and gradients in some slots; collective."""
        parts = [self._read(self._window[place]) for place in places] if self._window else []
        own = {name: tensors for part in parts for name, tensors in part.items()}
        said_R = gather_json(self._membership.everyone, dict(zip(own, digests_of([*own.values()]), strict=True)))
        by_name: dict[str, dict[int, int]] = {}
        for rank, said in enumerate(said_R):
            for name, value in said.items():
                by_name.setdefault(name, {})[rank] = value
        differing = {name: found for name, found in by_name.items() if len(set(found.values())) > 1} or by_name
        ranks = sorted({rank for found in differing.values() for rank in outvoted(found)})
        units = sorted({name.rpartition(" ")[2] for name in differing})
        owners = {self._state.owners.by_unit.get(unit) for unit in units}
        return Finding(sorted(differing), units, ranks, can_repair=owners.isdisjoint(ranks))


def shared_units(state: TrainingState, ranks: int, *, with_gradients: bool) -> list[SharedUnits]:
    """Return what several ranks hold, by the set of its holders, in the same order on all ranks.

    Of a unit with an owner, all ranks hold the weights. Numbers and buffers are left out, and what the training loop
    keeps.
    """
    entries: dict[tuple[int, ...], tuple[list[Entry], list[Entry]]] = {}
    active = state.active(ranks)
    for unit in state.catalog.units:
        holders = active[unit.name]
        is_owned = unit.name in state.owners.by_unit
        if is_owned:
            holders = tuple(range(ranks))
        if len(holders) < 2 or unit.name in LOOP_UNITS:
            continue
        buffers = {spec.name for spec in unit.specs if spec.is_buffer}
        of_state, of_gradients = entries.setdefault(holders, ([], []))
        for spec in unit.specs:
            parameter = spec.name.split("/")[0]
            if not spec.shape or parameter in buffers:
                continue
            entry = Entry(unit.name, spec.name, spec.nbytes // spec.dtype.itemsize, spec.dtype.itemsize)
            if not is_owned or spec.name == parameter:
                of_state.append(entry)
            if with_gradients and not is_owned and spec.name == parameter:
                of_gradients.append(entry)
    found = []
    for holders in sorted(entries):
        states, gradients = map(Rotation, entries[holders])
        found.append(SharedUnits(holders, states, gradients, Round(states.nbytes)))
    return [each for each in found if each.nbytes]


def tensors_of(state: TrainingState, unit: str) -> dict[str, Tensor]:
    """Return the tensors that this rank holds of a unit, by the names of its specs."""
    if unit in state.owners.by_unit:
        return {name: tensor.detach() for name, tensor in state.dense_tensors(unit).items()}
    (tensors,) = state.tensors([unit])
    return {spec.name: tensor for spec, tensor in zip(state.catalog.by_name[unit].specs, tensors, strict=True)}


def gradient_of(state: TrainingState, entry: Entry) -> Tensor | None:
    """Return the reduced gradient of an entry that is a parameter; None without one."""
    unit = state.catalog.by_name[entry.unit]
    if unit.layer is None:
        return state.dense_tensors(entry.unit)[entry.name].grad
    layer = state.layers[unit.layer]
    return None if layer.weights.grad is None else layer.weights.grad[layer.ids.index(unit.expert or 0)]


def differ(slot: Sequence[float]) -> bool:
    """Return whether members differ, by the sums of their numbers in a slot: `FIELDS` of them.

    >>> differ([3.0, 6.0, 9.0, 12.0, 27.0]), differ([3.0, 6.0, 9.0, 14.0, 27.0])  # 2 + 2 + 2, and 1 + 2 + 3
    (False, True)
    """
    count, low, high, low_squares, high_squares = map(int, slot)
    return count * low_squares != low * low or count * high_squares != high * high


def outvoted(digests: Mapping[int, int]) -> list[int]:
    """Return the ranks whose digest differs from that of more than half of them; none without such a majority.

    >>> outvoted({0: 7, 2: 7, 3: 8}), outvoted({0: 7, 2: 8})
    ([3], [])
    """
    ((value, votes),) = Counter(digests.values()).most_common(1)
    return [rank for rank, each in digests.items() if each != value] if 2 * votes > len(digests) else []
