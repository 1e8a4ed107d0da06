"""The first copies of a protection plan: made while training waits, or concurrently with the next step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evermoe.comm.membership import MembershipManager
from evermoe.copies.replay.replicas import Replicas
from evermoe.copies.snapshot.store import MAX_TRIES
from evermoe.errors import CorruptCopy, PeerLost
from evermoe.events import Confirm
from evermoe.events.base_event import Listener
from evermoe.state.keeper import CopyMaker
from evermoe.state.stored import NO_COPIES, KeptCopies
from evermoe.state.version import step_of


class FirstCopies:
    """Makes the first copies of a plan through the keepers.

    Args:
        keepers: in the order in which they are called.
        membership: all members.
        emit: listener of the session.
        replicas: the keeper among them that repeats steps; None without one.
    """

    def __init__(
        self,
        keepers: Sequence[CopyMaker],
        membership: MembershipManager,
        emit: Listener,
        replicas: Replicas | None = None,
    ) -> None:
        self._keepers, self._membership, self._emit, self._replicas = keepers, membership, emit, replicas
        self._copies = NO_COPIES
        """Earlier copies, which need not be sent."""
        self._in_background = False
        self.version: int | None = None
        """Version of the copies that are in flight concurrently with training; None if there are none."""
        self.failed = False
        """Whether copies that this member should keep were damaged or found no room, and are still incomplete."""

    def begin_plan(self, copies: KeptCopies, *, waits: bool, has_room: bool) -> bool:
        """Begin with a new plan; collective.

        Args:
            copies: copies that members already have.
            waits: whether training waits for the copies of this plan; the same on all members.
            has_room: whether this member has memory for them, for the earlier copies and for a step.

        Returns:
            Whether the earlier copies can stay until those of the plan are complete, so that training need not wait;
            the same on all members.
        """
        self._copies, self._in_background = copies, False
        if copies and not waits:
            everyone = self._membership.everyone
            self._in_background = bool(everyone.all_reduce(torch.tensor([int(has_room)])) == everyone.size)
        return self._in_background

    def drop_earlier_copies(self) -> None:
        """Drop the earlier copies: they are not needed any more, or a new plan replaces the latest one."""
        self._copies.forget()
        self.version = None

    @property
    def is_arriving(self) -> bool:
        """Whether copies are in flight concurrently with training."""
        return self.version is not None

    @property
    def may_arrive_later(self) -> bool:
        """Whether training need not wait for the plan's copies. It must if the earlier copies made room for them."""
        return self._in_background and bool(self._copies)

    def begin_copies(self, version: int) -> None:
        """Begin to make all copies as of `version` in the background; collective. `have_arrived` must follow."""
        self._begin(version)
        self.version = version

    def _begin(self, version: int) -> None:
        for keeper in self._keepers:
            keeper.protect_all(version)

    def have_arrived(self) -> bool:
        """Wait for the copies that were begun; return whether they are complete, as far as this member knows."""
        is_complete = all([keeper.wait_for_copies() for keeper in self._keepers])
        is_complete = is_complete and not (self._replicas is not None and self._replicas.requests.lacks_first)
        is_lost = self._membership.trainer_group.broken is not None or any(keeper.lost for keeper in self._keepers)
        self.failed = any(keeper.problem for keeper in self._keepers) or (not is_complete and not is_lost)
        return is_complete

    def make_copies(self, version: int, makes_any: bool) -> None:
        """Make all copies as of `version`, and wait until they are complete on all members; collective.

        Args:
            version: version of the current state.
            makes_any: False if no copies are kept: members then only wait for each other.

        Raises:
            PeerLost: a member was lost meanwhile.
            CorruptCopy: copies did not match their digests several times in a row.
        """
        everyone = self._membership.everyone
        for _ in range(MAX_TRIES):
            is_complete = self._make_once(version) if makes_any else True
            self._emit(Confirm(step_of(version)))
            if everyone.all_reduce(torch.tensor([int(is_complete)])) == everyone.size:
                return
            self._copies.forget()  # the earlier copies may be the damaged ones
        raise CorruptCopy(
            f"copies arrived with other bytes than were sent, {MAX_TRIES} times in a row: check the network"
        )

    def _make_once(self, version: int) -> bool:
        self._begin(version)
        is_complete = all([keeper.wait_for_copies() for keeper in self._keepers])
        lost = next(filter(None, (keeper.lost for keeper in self._keepers)), None)
        if lost is not None:
            raise PeerLost(lost)
        lacks_some = self._replicas is not None and bool(self._replicas.requests.take())
        return is_complete and not lacks_some

    def finish_plan(self) -> None:
        """End the plan's first copies: they are complete on all members."""
        self.drop_earlier_copies()
        self.failed = False
