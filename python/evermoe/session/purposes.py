"""Meetings of members that train between two steps, to compare what each is about to do.

Their messages have a tag of their own, so that a time limit finds a member that does not come. In a collective, a
member that has begun the next step would answer with the bytes of another collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum

import torch
from torch import Tensor

from evermoe.comm.common_start import CommonStart
from evermoe.comm.group import Group
from evermoe.comm.membership import MembershipManager
from evermoe.comm.tags import MEETING
from evermoe.errors import PeerLost, UnequalForwards

UNLIMITED = timedelta(days=1000)
"""Timeout of a wait that only the death of a member ends."""
NOT_COME = -1
ELSEWHERE_SECONDS = 1.0
"""Time for which a member must wait for others elsewhere, until it counts as absent."""
LOOK_SECONDS = 0.2


class Purpose(IntEnum):
    """The next work of a member."""

    NONE = 0
    """The same as the others: the member has just joined them."""
    STEP = 1
    EVALUATION = 2
    ALONE = 3
    STOP = 4


class Meeting:
    """Meetings of the members of a group.

    Args:
        group: the members that train.
        waiting: returns ranks of members that wait for others now, for any reason.
        start: of work that the processes of an island begin together.
        is_counted: whether this process's part of an evaluation counts, which all of an island compute.
    """

    def __init__(
        self, group: Group, waiting: Callable[[], Collection[int]], start: CommonStart, *, is_counted: bool
    ) -> None:
        self._group, self._waiting, self.start, self.is_counted = group, waiting, start, is_counted
        self._come: dict[int, Tensor] = {}
        self.purpose: Purpose | None = None
        """Purpose of this member's latest meeting if that failed, until the next meeting; else None."""
        self.is_elsewhere = False
        """Whether the latest meeting ended because another member was elsewhere."""

    def meet(self, mine: Purpose, limit: timedelta | None = None) -> Purpose:
        """Wait for all members; collective.

        Args:
            mine: purpose of this member.
            limit: how long it waits; None for `hang_timeout`.

        Returns:
            The purpose of all members but those that came for `NONE`.

        Raises:
            PeerLost: a member is gone, or has not come in time. UnequalForwards: members came for different purposes.
        """
        group = self._group
        self.purpose = mine
        others = [rank for rank in range(group.size) if rank != group.rank]
        self._come = {rank: torch.full((1,), NOT_COME, dtype=torch.int64, device="cpu") for rank in others}
        message = torch.tensor([int(mine)], device="cpu")
        sends, receives = [(message, rank) for rank in others], [(self._come[rank], rank) for rank in others]
        group.exchange(sends, receives, MEETING, limit)
        if group.broken is not None:
            raise PeerLost(group.broken)
        self.purpose = None
        come = {rank: Purpose(int(each)) for rank, each in self._come.items()} | {group.rank: mine}
        return _common(come)

    def begin_evaluation(self) -> None:
        """Wait for all members, then begin with the other processes of this member's island; collective.

        Raises:
            PeerLost, UnequalForwards: as of `meet`; or another process of the island has lost a peer.
        """
        self.meet(Purpose.EVALUATION)
        if not self.start.begin():
            raise PeerLost("another process of this island has lost a peer")

    def meet_unless_elsewhere(self, mine: Purpose) -> bool:
        """Meet members of which some may be elsewhere: then drop the group. Return whether all came."""
        with self._dropping_if_elsewhere():
            try:
                self.meet(mine)
            except PeerLost as lost:
                self._group.drop(str(lost))
                return False
        return True

    @contextmanager
    def _dropping_if_elsewhere(self) -> Iterator[None]:
        is_over, self.is_elsewhere = threading.Event(), False
        thread = threading.Thread(target=self._look, args=[is_over], name="evermoe-meeting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _look(self, is_over: threading.Event) -> None:
        """Drop the group once an absent member waits for others elsewhere, as it then waits for this member."""
        since: dict[int, float] = {}
        while not is_over.wait(LOOK_SECONDS):
            absent = [rank for rank, each in self._come.items() if int(each) == NOT_COME]
            waiting, now = set(self._waiting()).intersection(absent) if absent else set(), time.monotonic()
            since = {rank: since.get(rank, now) for rank in waiting}
            if any(now - began > ELSEWHERE_SECONDS for began in since.values()):
                self.is_elsewhere = True
                self._group.drop(f"rank {min(since)} has begun the next step")
                return


def waiting_ranks(membership: MembershipManager) -> set[int]:
    """Ask all other members of a group, and return the ranks of those that wait for members now."""
    addresses = {each: data["probe_address"] for each, data in membership.members.items() if each != membership.id}
    ranks = {each: rank for rank, each in enumerate(membership.members)}
    return {ranks[each] for each in membership.reach.find_waiting(addresses)}


def _common(come: dict[int, Purpose]) -> Purpose:
    ranks = {rank: purpose for rank, purpose in sorted(come.items()) if purpose is not Purpose.NONE}
    found = sorted(set(ranks.values()))
    if len(found) > 1:
        text = "; ".join(
            f"rank {', '.join(str(rank) for rank, each in ranks.items() if each == purpose)}: {purpose.name.lower()}"
            for purpose in found
        )
        raise UnequalForwards(
            f"members that train do different things after the same step ({text}): evaluation(), evaluate(), "
            "repeated() and alone() are for all of them, in the same order"
        )
    return found[0] if found else Purpose.NONE
