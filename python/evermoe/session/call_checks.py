"""Calls of modules and experts that another member repeats, so that wrong products are found before the vote.

    begin     a subject, a member that records its first call in the step, and one that repeats it
    end       input, output and gradients travel from the first to the second, which computes the call again
    vote      if results differ, a third member repeats it, too: two of three name the one that is wrong

Subject and members follow from the step's number. The interval between such steps follows from the time that they take.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from evermoe.comm.gather import gather_json, receive_bytes, send_bytes
from evermoe.comm.membership import MembershipManager
from evermoe.comm.tags import CALL
from evermoe.moe.module_paths import named_parts
from evermoe.process.warn import warn
from evermoe.session.finding import Finding
from evermoe.session.recorded_call import RecordedCall, Subject, differing, from_bytes, repeat, to_bytes
from evermoe.state.same_everywhere import LAST_STEP
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit

SHARE = 0.002
"""Largest part of the steps' time that repeated calls take."""
MIN_INTERVAL, MAX_INTERVAL = 8, 4096
"""Steps from one repeated call to the next, powers of two."""
NUMBERS = 3
"""Numbers of a vote: whether results differ, seconds of this member, and whether it wants no more repeated calls."""
UNREPEATABLE = (RuntimeError, TypeError, ValueError, AttributeError)
"""Errors of calls that cannot be sent or repeated: a check must not end the job."""


class CallChecks:
    """Repeats calls of other members.

    Args:
        model: whose modules are called.
        state: its units.
        membership: the members.
    """

    def __init__(self, model: nn.Module, state: TrainingState, membership: MembershipManager) -> None:
        self._state, self._membership = state, membership
        self._modules = dict(named_parts(model))
        self._subjects: list[Subject] = []
        self._interval = MIN_INTERVAL
        self._has_voted = False
        """Whether a vote has passed since the plan: with it newcomers learn whether calls are repeated at all."""
        self.is_off = False
        """Whether this member wants no more repeated calls; after the next vote no member repeats any."""
        self._subject: Subject | None = None
        self._ranks: list[int] = []
        """Ranks that record and repeat the call of this step, and one that decides between them, if there is one."""
        self._recorded: RecordedCall | None = None
        self._record: dict[str, Any] = {}
        self._differing: list[str] = []
        self.numbers = [0.0] * NUMBERS
        """Numbers that this member adds to the vote."""

    def plan(self) -> None:
        """Begin with the current members and placement; the same on all that train."""
        self.end()
        self._interval, self._has_voted, ranks = MIN_INTERVAL, False, self._membership.num_trainers
        trains = self._membership.role == "train"
        is_used = trains and ranks > 1 and not self.is_off
        self._subjects = subjects(self._modules, self._state, ranks) if is_used else []

    def end(self) -> None:
        """Stop to record a call."""
        self._subject, self._record, self._differing = None, {}, []
        if self._recorded is not None:
            self._recorded.end()
            self._recorded = None

    def begin_step(self, step: int) -> None:
        """Choose the call of a step, and record it if this member computes it."""
        self.end()
        self.numbers = [0.0, 0.0, float(self.is_off)]
        if not self._subjects or not self._has_voted or step <= LAST_STEP or step % self._interval:
            return
        number = step * 0x9E3779B97F4A7C15 % (1 << 64) >> 20
        self._subject = subject = self._subjects[number % len(self._subjects)]
        holders, first = subject.holders, number // len(self._subjects)
        self._ranks = [holders[(first + each) % len(holders)] for each in range(min(3, len(holders)))]
        if self._ranks[0] == self._membership.trainer_group.rank:
            self._recorded = RecordedCall(*self._local(subject), number=first)

    def _local(self, subject: Subject) -> tuple[nn.Module, int | None]:
        if subject.expert is None:
            return self._modules[subject.path], None
        layer = self._state.layers[subject.path]
        return layer, layer.ids.index(subject.expert)

    # ---- the end of a step

    def compute(self) -> None:
        """Repeat the call of this step if this member is to; both members of the pair take part.

        Raises:
            PeerLost: the other one is lost.
        """
        if self._subject is None:
            return
        since = time.perf_counter()
        if self._recorded is not None:
            self._record, self._recorded = self._recorded.end(), None
        self._differing = self._repeat_at(self._ranks[1])
        self.numbers[:2] = [float(bool(self._differing)), time.perf_counter() - since]

    def _repeat_at(self, rank: int) -> list[str]:
        """Return what differs in the call as `rank` repeats it; only that rank knows."""
        group = self._membership.trainer_group
        if group.rank == self._ranks[0]:
            send_bytes(group, self._message(), rank, CALL)
        elif group.rank == rank and (message := receive_bytes(group, self._ranks[0], CALL)):
            return self._repeat(message)
        return []

    def _message(self) -> bytes:
        """Return the record as bytes; none without one."""
        try:
            return to_bytes(self._record) if self._record else b""
        except UNREPEATABLE as error:
            self._warn(error)
            return b""

    def _warn(self, error: Exception) -> None:
        assert self._subject is not None
        warn(f"a call of {self._subject.unit} cannot be repeated, and is not checked: {error}")

    def _repeat(self, data: bytes) -> list[str]:
        assert self._subject is not None
        module, expert = self._local(self._subject)
        try:
            record = from_bytes(data, next(module.parameters()).device)
            return differing(record, repeat(module, expert, record))
        except UNREPEATABLE as error:
            self._warn(error)
            return []

    def find(self, sums: Sequence[float], step_seconds: float) -> Finding | None:
        """Return what differs, by the sums of the members' `numbers`; collective if something does.

        Args:
            sums: of the vote.
            step_seconds: of all members together.

        Raises:
            PeerLost: a member is lost.
        """
        self._has_voted = True
        if sums[2]:
            self.is_off, self._subjects = True, []
        if sums[1] and step_seconds:
            needed = sums[1] * self._membership.num_trainers / (SHARE * step_seconds)
            self._interval = next((n for n in INTERVALS if n >= needed), MAX_INTERVAL)
        return self._decide() if sums[0] else None

    def _decide(self) -> Finding:
        """Let a third member repeat the call."""
        said: dict[str, list[str]] = {}
        group = self._membership.trainer_group
        if self._subject is not None:
            if self._differing:
                said[str(self._ranks[1])] = self._differing
            if len(self._ranks) > 2:
                found = self._repeat_at(self._ranks[2])
                if group.rank == self._ranks[2]:
                    said[str(group.rank)] = found
            mine: Any = [self._subject.unit, self._ranks, said]
        else:
            mine = None  # a member that does not train
        everyone = [each for each in gather_json(self._membership.everyone, mine) if each is not None]
        unit, ranks = everyone[0][:2]
        by_rank = {int(rank): names for _, _, found in everyone for rank, names in found.items()}
        first, second = ranks[:2]
        named = [] if len(ranks) < 3 else [first if by_rank.get(ranks[2]) else second]
        return Finding([f"the {name} of a call of {unit}" for name in by_rank[second]], [unit], named, "call")


INTERVALS = [1 << power for power in range(MIN_INTERVAL.bit_length() - 1, MAX_INTERVAL.bit_length())]


def subjects(modules: dict[str, nn.Module], state: TrainingState, ranks: int) -> list[Subject]:
    """Return what several ranks can compute: experts with replicas, and torch's modules with weights and no children.

    Other classes may have state that differs between ranks. A module that shares its weights with another is left out.
    """
    uses = Counter(id(each) for module in modules.values() for each in module.parameters(recurse=False))
    shared = {each for each, count in uses.items() if count > 1}
    everyone, found = tuple(range(ranks)), []
    for path, module in () if state.shards is not None else modules.items():  # an island's have parts of their weights
        own = [*module.parameters(recurse=False)]
        is_plain = bool(own) and type(module).__module__.startswith("torch.nn.modules.") and not [*module.children()]
        is_plain = is_plain and getattr(module, "max_norm", None) is None  # such an embedding changes its weights
        if is_plain and shared.isdisjoint(map(id, own)):
            found.append(Subject(path or "model", path, None, everyone))
    for path, layer in state.layers.items():
        for expert in range(layer.num_experts):
            holders = tuple(np.flatnonzero(layer.matrix_RE[:, expert]).tolist())
            if len(holders) > 1:
                found.append(Subject(expert_unit(path, expert), path, expert, holders))
    return found
