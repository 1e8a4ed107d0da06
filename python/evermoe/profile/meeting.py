"""Actual start of transfers, from the records of both ends: pure functions of all ranks' steps.

A receive is posted long before its sender has anything to send, and a collective waits for its last member. One rank
alone cannot distinguish that wait from a busy network, and the bubbles of a pipeline would look busy. All ranks
together can: nothing moves before the last of them has begun.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from evermoe.planning.windows import Span, StepProfile


class Meeting(NamedTuple):
    """Name of a transfer that is equal on all its ranks."""

    name: str | None
    """None for a send and its receive; else the name of the collective."""
    members: tuple[int, ...]
    """Sender and receiver, or all ranks in order."""
    occurrence: int
    """Number among the equal transfers of the step."""


def meet(steps: Sequence[StepProfile], starts: Sequence[float]) -> list[StepProfile]:
    """Return the same step of all ranks, with transfers starting when their last member has begun.

    A send and its receive are one transfer and end together, at the earlier of both recorded ends: each is recorded
    when a thread has waited for it, or later. A collective ends on each rank separately. Transfers whose other end was
    not recorded stay unchanged.

        >>> send = Span("send to 1", "send", "network", 4.0, 3.0, 64, [1])
        >>> receive = Span("receive from 0", "receive", "network", 1.0, 4.0, 64, [0])
        >>> steps = [StepProfile(9.0, [send]), StepProfile(9.0, [receive])]
        >>> [(step.spans[0].start, step.spans[0].seconds) for step in meet(steps, [100.0, 100.5])]
        [(4.0, 1.5), (3.5, 1.5)]

    The send began at 104, the receive at 101.5: the transfer did at 104. It ended at 105.5, when the receiver had it.

    Args:
        steps: one of each rank, by rank.
        starts: when they started, in seconds of one clock.
    """
    ends: dict[Meeting, dict[int, int]] = defaultdict(dict)
    for rank, step in enumerate(steps):
        for position, key in _keys(step, rank):
            ends[key][rank] = position
    spans = [list(step.spans) for step in steps]
    for key, found in ends.items():
        if not all(member in found for member in key.members):
            continue
        met = [(starts[rank] + spans[rank][at].start, spans[rank][at].seconds) for rank, at in found.items()]
        begin = max(start for start, _ in met)
        together = min(start + seconds for start, seconds in met) if key.name is None else None
        for rank, at in found.items():
            span = spans[rank][at]
            end = starts[rank] + span.start + span.seconds if together is None else together
            first = min(begin, end)  # later by at most the error of the clocks
            spans[rank][at] = span._replace(start=max(0.0, first - starts[rank]), seconds=end - first)
    return [StepProfile(step.seconds, found) for step, found in zip(steps, spans, strict=True)]


TICK = 1e-9
"""Seconds between the starts of two transfers that would start at once."""


def in_one_order(steps: Sequence[StepProfile]) -> list[StepProfile]:
    """Return the steps of one rank with their transfers in the same order, so that `find_windows` matches them.

    Concurrent transfers, such as a send and a receive in one batch, begin in varying order. All steps with the same
    transfers get the order of the median starts. Where a step has another order, the late transfer starts with the next
    one: busy for longer than it was, never for less.

        >>> def step(first, second):
        ...     spans = [Span("a", "send", "network", first, 2.0), Span("b", "send", "network", second, 2.0)]
        ...     return StepProfile(9.0, spans)
        >>> [span.start for span in in_one_order([step(1.0, 2.0), step(1.0, 2.0), step(3.0, 2.5)])[2].spans]
        [2.499999999, 2.5]
    """
    positions = [_occurrences(step.spans) for step in steps]
    usual = Counter(frozenset(found) for found in positions).most_common(1)[0][0]
    like = [number for number, found in enumerate(positions) if found.keys() == usual]
    median = {
        key: statistics.median(steps[number].spans[positions[number][key]].start for number in like) for key in usual
    }
    order = sorted(usual, key=lambda key: (median[key], key), reverse=True)
    result = list(steps)
    for number in like:
        spans = list(steps[number].spans)
        limit = float("inf")
        for at in (positions[number][key] for key in order):
            start = max(0.0, min(spans[at].start, limit - TICK))
            spans[at] = spans[at]._replace(start=start, seconds=spans[at].start + spans[at].seconds - start)
            limit = start
        result[number] = StepProfile(steps[number].seconds, spans)
    return result


def _occurrences(spans: Sequence[Span]) -> dict[tuple[str, int], int]:
    """Return the position of each transfer by its name and its number among those of that name."""
    seen: dict[str, int] = defaultdict(int)
    found = {}
    for position, span in sorted(enumerate(spans), key=lambda each: each[1].start):
        if span.resource == "network":
            found[span.name, seen[span.name]] = position
            seen[span.name] += 1
    return found


def _keys(step: StepProfile, rank: int) -> list[tuple[int, Meeting]]:
    """Return the position of each transfer in `step.spans`, and its meeting."""
    seen: dict[tuple[str | None, tuple[int, ...]], int] = defaultdict(int)
    found = []
    for position, span in sorted(enumerate(step.spans), key=lambda each: each[1].start):
        if span.resource != "network" or not span.peers:
            continue
        if span.kind in ("send", "receive") and len(span.peers) == 1:
            peer = span.peers[0]
            who: tuple[str | None, tuple[int, ...]] = None, ((rank, peer) if span.kind == "send" else (peer, rank))
        elif span.kind == "collective":
            who = span.name, tuple(sorted({rank, *span.peers}))
        else:
            continue
        found.append((position, Meeting(*who, seen[who])))
        seen[who] += 1
    return found
