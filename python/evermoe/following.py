"""What replicas get before each vote: the gradients of the step that comes.

    arrange ─ begin_states ─ wait ─ mark_whole ─ [ begin ─ wait ─ committed ] at each step
                                                   heal, where a replica asked for states

Beside the replicas of the latest arrangement those of the one before are kept, until all of the new ones are whole.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from evermoe.arrangement import Kept
from evermoe.config import SessionConfig
from evermoe.courier import Courier, Errand, Listener
from evermoe.elastic import Membership
from evermoe.errors import NotReplayable
from evermoe.replay import Profile, calibrate
from evermoe.replayed import Exchanged, ReplayedCopies
from evermoe.units import TrainingState
from evermoe.versions import step_of, version_of

logger = logging.getLogger(__name__)


@dataclass
class _Replicas:
    """Of one arrangement."""

    copies: ReplayedCopies
    generation: int
    base: int = 0
    """The version that they began with."""

    def stored(self) -> Iterator[FollowedCopy]:
        """Everything that is kept here for others."""
        for unit, step, value in self.copies.stored():
            version = self.base if step == step_of(self.base) else version_of(self.generation, step)
            yield FollowedCopy(unit, version, value, self.copies)


@dataclass(frozen=True)
class FollowedCopy:
    """A version of one unit that a replica here has, or can be brought to."""

    unit: str
    version: int
    digest: int
    copies: ReplayedCopies

    @property
    def data(self) -> Tensor:
        """uint8 `[nbytes]`; empty if the replica has left the version behind."""
        return self.copies.read(self.unit, step_of(self.version))


class Following:
    """The replicas that follow this member's units, and those that it keeps for others.

    Args:
        state: this member's units.
        membership: who takes part; replica nodes keep copies alone.
        config: of the session.
        emit: of the session.
    """

    def __init__(self, state: TrainingState, membership: Membership, config: SessionConfig, emit: Listener) -> None:
        self._state, self._membership, self._config, self._emit = state, membership, config, emit
        self.courier = Courier(membership.background, None, "evermoe-gradients", device=membership.device)
        self._profile: Profile | None = None
        self._is_calibrated = False
        self._now: _Replicas | None = None
        self._older: _Replicas | None = None
        self._is_whole = False
        """Whether all copies of the latest arrangement were whole once."""
        self._exchange: Errand[Exchanged] | None = None
        self.is_early = False
        """Whether nobody adds to the gradients that this member sends: they may go while others are reduced."""
        self.asked: set[str] = set()
        """Units of which this member needs the full state anew."""
        self._has_told = False
        """Of the first message that could not be used."""

    # ---- who follows what

    def calibrate(self) -> None:
        """Finds out, once, how the optimizer's steps are repeated."""
        if self._config.role == "train" and not self._is_calibrated:
            self._is_calibrated = True
            try:
                self._profile = calibrate(self._state.optimizer)
            except NotReplayable as error:
                if self._membership.everyone.rank == 0:
                    logger.warning("copies get the state after each step, not gradients: %s", error)

    def is_replayable(self, unit: str) -> bool:
        """Whether the unit's steps can be repeated, as far as this member knows."""
        return self._profile is not None and self._state.is_replayable(unit, self._profile)

    def arrange(
        self, kept: Iterable[Kept], active: dict[str, tuple[int, ...]], generation: int, keeps_previous: bool
    ) -> None:
        """Other members keep other units from now on; `begin_states` and `mark_whole` must follow.

        Args:
            kept: what is replayed, the same list on all members.
            active: ranks that train each unit.
            generation: of the members.
            keeps_previous: see `ReplayedCopies`.
        """
        kept, rank = list(kept), self._membership.everyone.rank
        if self._now is not None:
            if self._is_whole:
                self._drop_older()
                self._older = self._now
            else:  # it never was: what was before it still is what there is
                self._now.copies.close()
        self._is_whole, self.asked = False, set()
        self.is_early = all(len(active[each.unit]) == 1 for each in kept if each.primary == rank)
        copies = ReplayedCopies(
            self._state,
            kept,
            rank,
            self._profile,
            log_bytes=self._config.replay_log_bytes,
            keeps_previous=keeps_previous,
            device=self._config.replica_device,
        )
        self._now = _Replicas(copies, generation)

    def mark_whole(self) -> None:
        """All members have said that the copies of the arrangement are whole: what was before it is not needed."""
        self._is_whole = True
        self._drop_older()

    def _drop_older(self) -> None:
        if self._older is not None:
            self._older.copies.close()
            self._older = None

    # ---- a step

    def begin_step(self) -> None:
        """A step begins; nothing of it was sent yet."""
        self._exchange = None

    @property
    def has_begun(self) -> bool:
        """Whether this step's messages are under way, or through."""
        return self._exchange is not None

    def begin_states(self, version: int) -> None:
        """Begins to send the state of all units, which is that of `version`."""
        assert self._now is not None
        self._now.base = version
        self._begin(step_of(version), None, only_states=True)

    def begin(self, step: int, selected: Collection[str] | None) -> None:
        """Begins to send the gradients of the step that comes: of these units, None for all."""
        assert self._now is not None
        if self._now.copies.has_peers:
            self._begin(step, selected, only_states=False)

    def _begin(self, step: int, selected: Collection[str] | None, *, only_states: bool) -> None:
        assert self._now is not None
        copies = self._now.copies

        def exchange() -> Exchanged:
            exchanged = copies.exchange(self.courier, step, selected, only_states=only_states)
            if exchanged.held and not only_states:
                self._emit("held", {"step": step})
            return exchanged

        self._exchange = self.courier.go(exchange)

    def wait(self) -> bool:
        """Until all messages that were begun are through; False if a member was `lost`."""
        if self._exchange is None:
            return True
        is_done = self._exchange.wait()
        if self._exchange.result is not None:
            self._note(self._exchange.result)
        return is_done

    def _note(self, exchanged: Exchanged) -> None:
        self.asked |= exchanged.needs_full_state
        if self.asked and not self._has_told:
            self._has_told = True
            logger.warning(
                "the copies here of %s wait for its full state, which comes next: %s",
                min(self.asked),
                exchanged.problem,
            )

    @property
    def lost(self) -> str | None:
        """Why the messages did not get through."""
        return None if self._exchange is None else self._exchange.lost

    def committed(self, clip: float) -> None:
        """All members have agreed on the step, and it is taken, with gradients multiplied by `clip`."""
        assert self._now is not None
        self._now.copies.committed(clip)

    def heal(self, primary: Callable[[str], int]) -> None:
        """Some members have asked for full states, which come with the next step from those that send; collective."""
        assert self._now is not None
        everyone = self._membership.everyone
        found = [json.loads(text) for text in everyone.all_gather_bytes(json.dumps(sorted(self.asked)).encode())]
        self.asked = set()
        for unit in {unit for units in found for unit in units}:
            if primary(unit) == everyone.rank:
                self._now.copies.sender.request_full_state(unit)

    # ---- after a failure

    def settle(self) -> bool:
        """Waits until nothing is under way; whether all that was is through."""
        is_whole = self._exchange is None or self._exchange.wait()
        self._exchange = None
        return is_whole

    def stored(self) -> Iterator[FollowedCopy]:
        """Every unit that is kept here for others, in every version that it can be brought to."""
        for replicas in filter(None, (self._now, self._older)):
            yield from replicas.stored()

    def close(self) -> None:
        """Ends all threads. Nothing may be under way."""
        self.courier.close()
        if self._now is not None:
            self._now.copies.close()
        self._drop_older()
        self._now = None
