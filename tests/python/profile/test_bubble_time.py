"""Seconds of bubbles: 1F1B schedules that are laid out here have exactly those of the formula."""

from __future__ import annotations

import itertools

import pytest

from evermoe.planning.windows import Span, StepProfile
from evermoe.profile.bubble_time import bubble_time


def order(stage, stages, microbatches):
    """1F1B: some forwards, then a backward and a forward in turn, then the backwards that are left."""
    ahead = min(stages - 1 - stage, microbatches)
    turns = [("forward", n) for n in range(ahead)]
    for number in range(microbatches - ahead):
        turns += [("forward", ahead + number), ("backward", number)]
    return turns + [("backward", n) for n in range(microbatches - ahead, microbatches)]


def schedule(stages, microbatches, forward, backward):
    """By stage, the spans of a step in which each begins as soon as its stage is free and its input has come."""
    ends, free, spans = {}, [0.0] * stages, [[] for _ in range(stages)]
    left = [order(stage, stages, microbatches) for stage in range(stages)]
    while any(left):
        for stage, turns in enumerate(left):
            if not turns:
                continue
            kind, number = turns[0]
            before = stage - 1 if kind == "forward" else stage + 1
            is_first = not 0 <= before < stages
            needs = (
                (kind, before, number) if not is_first else ("forward", stage, number) if kind == "backward" else None
            )
            if needs is not None and needs not in ends:
                continue
            start = max(free[stage], ends.get(needs, 0.0))
            seconds = forward if kind == "forward" else backward
            spans[stage].append(Span(f"{kind} {number}", kind, "compute", start, seconds))
            ends[kind, stage, number] = free[stage] = start + seconds
            turns.pop(0)
    return spans


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 4), (4, 4), (4, 9)])
def test_1f1b_has_the_bubbles_of_its_formula(stages, microbatches):
    spans = schedule(stages, microbatches, 1.0, 2.0)
    late = [0.5 * rank for rank in range(stages)]  # steps do not begin at the same time on all ranks
    steps = [
        [StepProfile(100.0, [span._replace(start=span.start - begin) for span in each])] * 2
        for each, begin in zip(spans, late, strict=True)
    ]
    starts = [[begin, 100.0 + begin] for begin in late]
    for rank in range(stages):
        found = bubble_time(steps, starts, rank, stages)
        assert found.measured == pytest.approx((stages - 1) * 3.0)
        assert found.expected == pytest.approx((stages - 1) * 3.0)


def test_backwards_in_two_parts_count_as_one():
    undivided = schedule(2, 4, 1.0, 2.0)
    halves = [
        [
            part
            for span in each
            for part in ([span._replace(seconds=1.0), span._replace(start=span.start + 1.0, seconds=1.0)])[
                : 1 + (span.kind == "backward")
            ]
        ]
        for each in undivided
    ]
    assert len(halves[0]) == len(undivided[0]) + 4
    found = bubble_time([[StepProfile(100.0, each)] for each in halves], [[0.0], [0.0]], 0, 2)
    assert found == pytest.approx((3.0, 3.0))


def test_a_rank_without_a_schedule_has_none():
    busy = [Span("step", "optimizer", "compute", 0.0, 1.0), Span("reduce", "collective", "network", 1.0, 1.0)]
    assert bubble_time([[StepProfile(3.0, busy)]], [[0.0]], 0, 1) is None
    forwards = [span for span in itertools.chain(*schedule(1, 2, 1.0, 2.0)) if span.kind == "forward"]
    assert bubble_time([[StepProfile(3.0, forwards)]], [[0.0]], 0, 1) is None
