"""Assignment of live workers to fixed expert-parallel groups after deaths and joins: the papers' "DS(FT)". Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Holding:
    """State that a live worker has.

    Args:
        worker: number of the worker.
        step: steps taken in its state.
        position: position in its group, which determines its experts; None for a new worker, which has all.
        group: unique name of its previous group; None if it was in none.
        saved: steps in the newest checkpoint that it sees; 0 if there is none.
    """

    worker: int
    step: int
    position: int | None = None
    group: str | None = None
    saved: int = 0

    def has(self, position: int, step: int) -> bool:
        """Return whether it can provide the experts of a position, and all other state, after this number of steps."""
        return self.step == step and self.position in (None, position)


@dataclass(frozen=True)
class Seating:
    """Assignment of workers to ranks.

    Args:
        ranks: workers by rank: rank r is at position r mod P of group r // P.
        idle: workers that do not fill a group and wait.
        step: steps in the state from which all continue; 0 for the first weights, which each worker can create.
        sources: for each worker that lacks its part of that state, the worker that provides it.
        from_checkpoint: whether they continue from the newest checkpoint, as no newer state is complete.
    """

    ranks: tuple[int, ...]
    idle: tuple[int, ...]
    step: int
    sources: Mapping[int, int]
    from_checkpoint: bool = False


def seat(holdings: Sequence[Holding], size: int) -> Seating:
    """Keep complete groups, and form new ones of workers whose group has lost a member, and of new workers.

    Example, groups of two: worker 3 of (0, 1) and (2, 3) has died. 0 and 1 continue; 2 is idle. When 4 joins, 2 and 4
    form a group, at positions 0 and 1; 4 gets its state from 1.

    Args:
        holdings: states of all live workers.
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
    complete = [members for _, members in sorted(groups.items()) if len(members) == size]
    ranks = [each for members in complete for each in sorted(members, key=lambda each: each.position or 0)]
    rest = sorted((each for each in holdings if each not in ranks), key=lambda each: each.worker)
    return ranks, rest


def _form(rest: list[Holding], size: int) -> list[Holding]:
    """Take a group's workers out of `rest`, those at their own position first."""
    seats: list[Holding | None] = []
    for position in range(size):
        own = next((each for each in rest if each.position == position), None)
        seats.append(own)
        if own is not None:
            rest.remove(own)
    return [rest.pop(0) if each is None else each for each in seats]


def _newest(holdings: Sequence[Holding], size: int) -> int:
    """Return the newest step for which every position's experts exist; -1 if there is none."""
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
