"""Which workers train in which fixed expert-parallel group after some have died or come: the papers' "DS(FT)". Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Holding:
    """What a worker that lives has.

    Args:
        worker: its number.
        step: steps taken in its state.
        position: of the experts that it holds, in its group; None for one that has just begun and holds all.
        group: name of its group of before, which no other group ever has; None for one that was in none.
        saved: steps in the newest checkpoint that it sees; 0 where there is none.
    """

    worker: int
    step: int
    position: int | None = None
    group: str | None = None
    saved: int = 0

    def has(self, position: int, step: int) -> bool:
        """Whether it can give the experts of a position, and all else, as they are after so many steps."""
        return self.step == step and self.position in (None, position)


@dataclass(frozen=True)
class Seating:
    """Who trains where.

    Args:
        ranks: workers by rank: rank r is at position r mod P of group r // P.
        idle: workers that fill no group, and wait.
        step: steps in the state from which all go on; after 0 that is the first weights, which each can make.
        sources: of each worker that lacks its part of that state, who gives it.
        from_checkpoint: whether they go on from the newest checkpoint: no newer state is left complete.
    """

    ranks: tuple[int, ...]
    idle: tuple[int, ...]
    step: int
    sources: Mapping[int, int]
    from_checkpoint: bool = False


def seat(holdings: Sequence[Holding], size: int) -> Seating:
    """Keeps the groups that are whole, and forms new ones of those whose group has lost a worker, or who are new.

    Example, groups of two: of (0, 1) and (2, 3) worker 3 has died. 0 and 1 go on; 2 is idle. When 4 joins, 2 and 4 form
    a group, at positions 0 and 1; 4 gets its state from 1.

    Args:
        holdings: of all workers that live.
        size: P, workers of a group.
    """
    ranks, rest = _whole_groups(holdings, size)
    for _ in range(len(rest) // size):
        ranks += _form(rest, size)
    used = {each.worker for each in ranks}
    step = _newest(holdings, size)
    saved = max((each.saved for each in holdings), default=0)
    sources = _sources(holdings, ranks, size, step) if step > 0 and step >= saved else {}
    return Seating(
        tuple(each.worker for each in ranks),
        tuple(sorted(each.worker for each in holdings if each.worker not in used)),
        max(step, saved, 0),
        sources,
        from_checkpoint=max(step, 0) < saved,
    )


def _whole_groups(holdings: Sequence[Holding], size: int) -> tuple[list[Holding], list[Holding]]:
    groups: dict[str, list[Holding]] = {}
    for each in holdings:
        if each.group is not None:
            groups.setdefault(each.group, []).append(each)
    whole = [members for _, members in sorted(groups.items()) if len(members) == size]
    ranks = [each for members in whole for each in sorted(members, key=lambda each: each.position or 0)]
    rest = sorted((each for each in holdings if each not in ranks), key=lambda each: each.worker)
    return ranks, rest


def _form(rest: list[Holding], size: int) -> list[Holding]:
    """Takes a group's workers out of `rest`, those at their own position first."""
    seats: list[Holding | None] = []
    for position in range(size):
        own = next((each for each in rest if each.position == position), None)
        seats.append(own)
        if own is not None:
            rest.remove(own)
    return [rest.pop(0) if each is None else each for each in seats]


def _newest(holdings: Sequence[Holding], size: int) -> int:
    """The newest step after which every position's experts are there; -1 if there is none."""
    for step in sorted({each.step for each in holdings}, reverse=True):
        if all(any(each.has(position, step) for each in holdings) for position in range(size)):
            return step
    return -1


def _sources(holdings: Sequence[Holding], ranks: Sequence[Holding], size: int, step: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for rank, each in enumerate(ranks):
        if not each.has(rank % size, step):
            givers = [other.worker for other in holdings if other.has(rank % size, step)]
            found[each.worker] = min(givers, key=lambda giver: (list(found.values()).count(giver), giver))
    return found
