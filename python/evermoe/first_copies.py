"""The copies with which a plan of protection begins: all at once while training waits, or beside the next step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evermoe.comm.membership import MembershipManager
from evermoe.errors import CorruptCopy, PeerLost
from evermoe.events import Confirm, Listener
from evermoe.keeper import Keeper
from evermoe.loss_ledger import LossLedger
from evermoe.replay.replicas import Replicas
from evermoe.snapshot.store import MAX_TRIES
from evermoe.state.stored import NO_COPIES, KeptCopies
from evermoe.state.version import step_of


class FirstCopies:
    """Has the keepers make the first copies of a plan.

    Args:
        keepers: in the order in which they are driven.
        replicas: the one of them that repeats steps.
        membership: all members.
        ledger: is told of copies that are there at once.
        emit: of the session.
    """

    def __init__(
        self,
        keepers: Sequence[Keeper],
        replicas: Replicas,
        membership: MembershipManager,
        ledger: LossLedger,
        emit: Listener,
    ) -> None:
        self._keepers, self._replicas, self._membership = keepers, replicas, membership
        self._ledger, self._emit = ledger, emit
        self._copies = NO_COPIES
        """Copies of before, which need not be sent."""
        self._is_beside = False
        self.version: int | None = None
        """Version of the copies that are on their way beside training; None if none are."""
        self.failed = False
        """Whether copies that this member should keep came damaged or found no room, and have not been whole since."""

    def plan(self, copies: KeptCopies, *, waits: bool, is_roomy: bool) -> bool:
        """Begins with a new plan; collective.

        Args:
            copies: those that members have already.
            waits: whether training waits for the copies of this plan; the same on all members.
            is_roomy: whether this member has memory for them and for those of before in a step.

        Returns:
            Whether the copies of before can stay until those of the plan are whole, so that training need not wait; the
            same on all members.
        """
        self._copies, self._is_beside = copies, False
        if copies and not waits:
            everyone = self._membership.everyone
            self._is_beside = bool(everyone.all_reduce(torch.tensor([int(is_roomy)])) == everyone.size)
        return self._is_beside

    def forget(self) -> None:
        """A new plan takes the place of the latest one: its copies of before are not needed."""
        self._copies.forget()
        self.version = None

    @property
    def is_arriving(self) -> bool:
        """Whether copies are on their way beside training."""
        return self.version is not None

    @property
    def may_arrive_later(self) -> bool:
        """Whether training need not wait for the plan's copies: not where those of before made room for them."""
        return self._is_beside and bool(self._copies)

    def begin(self, version: int) -> None:
        """Begins to make all copies as of `version` beside training; collective. `have_arrived` must follow."""
        self._begin(version)
        self.version = version

    def _begin(self, version: int) -> None:
        for keeper in self._keepers:
            copied = keeper.protect_all(version)
            if copied:
                self._ledger.copied(copied, version)

    def have_arrived(self) -> bool:
        """Waits for the copies that were begun; whether they are whole, as far as this member knows."""
        is_whole = all([keeper.wait() for keeper in self._keepers]) and not self._replicas.lacks_states
        is_lost = self._membership.trainer_group.broken is not None or any(keeper.lost for keeper in self._keepers)
        self.failed = any(keeper.problem for keeper in self._keepers) or (not is_whole and not is_lost)
        return is_whole

    def make(self, version: int, makes_any: bool) -> None:
        """Makes all copies as of `version`, and waits until they are whole on all members; collective.

        Args:
            version: of the state now.
            makes_any: False where no copies are kept: members only wait for each other.

        Raises:
            PeerLost: a member was lost meanwhile.
            CorruptCopy: copies did not match their digests several times in a row.
        """
        everyone = self._membership.everyone
        for _ in range(MAX_TRIES):
            is_whole = self._make_once(version) if makes_any else True
            self._emit(Confirm(step_of(version)))
            if everyone.all_reduce(torch.tensor([int(is_whole)])) == everyone.size:
                return
            self._copies.forget()  # those of before may be what is damaged
        raise CorruptCopy(
            f"copies arrive with other bytes than were sent, {MAX_TRIES} times in a row: check the network"
        )

    def _make_once(self, version: int) -> bool:
        self._begin(version)
        is_whole = all([keeper.wait() for keeper in self._keepers])
        lost = next(filter(None, (keeper.lost for keeper in self._keepers)), None)
        if lost is not None:
            raise PeerLost(lost)
        return not self._replicas.take_requests() and is_whole

    def end(self) -> None:
        """All copies of the plan are whole on all members."""
        self.forget()
        self.failed = False
