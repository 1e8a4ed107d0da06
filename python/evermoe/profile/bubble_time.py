"""Time that ranks of a pipeline wait for each other in a step, and the time that 1F1B predicts. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from evermoe.planning.windows import Span, StepProfile


class BubbleTime(NamedTuple):
    """Seconds of a step in which a rank computes nothing of the schedule."""

    measured: float
    """Seconds without compute between the first rank's first forward and the last end of a backward."""
    expected: float
    """(p - 1) · (t_f + t_b): the bubbles of 1F1B with p stages that take t_f and t_b per microbatch, as this one."""

    def __str__(self) -> str:
        return f"{self.measured:.6f} s of bubbles in a step, {self.expected:.6f} s by (p - 1) * (t_f + t_b) of 1F1B"


def bubble_time(
    steps: Sequence[Sequence[StepProfile]], starts: Sequence[Sequence[float]], rank: int, stages: int
) -> BubbleTime | None:
    """Return the bubbles of a rank, medians over the steps; None if it computes nothing of a schedule.

    Two stages with a microbatch each, forward 1 s and backward 2 s, one after the other:

        >>> def spans(forward, backward):
        ...     rows = (("forward", forward, 1.0), ("backward", backward, 2.0))
        ...     return [Span(kind, kind, "compute", start, seconds) for kind, start, seconds in rows]
        >>> steps = [[StepProfile(7.0, spans(0.0, 4.0))], [StepProfile(7.0, spans(1.0, 2.0))]]
        >>> bubble_time(steps, [[0.0], [0.0]], rank=0, stages=2)
        BubbleTime(measured=3.0, expected=3.0)

    Args:
        steps: steps by rank, the same number for each.
        starts: starts of these steps, by rank, on one clock.
        rank: the rank whose bubbles are computed.
        stages: stages of the pipeline; several virtual stages of a rank count as one.
    """
    found = [
        one
        for number in range(len(steps[rank]))
        if (one := _of_step([each[number] for each in steps], [each[number] for each in starts], rank, stages))
    ]
    if not found:
        return None
    return BubbleTime(*(statistics.median(each) for each in zip(*found, strict=True)))


def _of_step(step_R: Sequence[StepProfile], start_R: Sequence[float], rank: int, stages: int) -> BubbleTime | None:
    ends_R = [
        [(start + span.start, start + span.start + span.seconds) for span in _computed(step)]
        for step, start in zip(step_R, start_R, strict=True)
    ]
    mine = _computed(step_R[rank])
    forwards = [span.seconds for span in mine if span.kind == "forward"]
    if not forwards or len(forwards) == len(mine):
        return None
    busy = sum(span.seconds for span in mine)
    spans = [each for ends in ends_R for each in ends]
    measured = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return BubbleTime(max(0.0, measured - busy), (stages - 1) * busy / len(forwards))


def _computed(step: StepProfile) -> list[Span]:
    """Return forwards and backwards; in a zero-bubble schedule, backwards for inputs and for weights."""
    return [span for span in step.spans if span.kind in ("forward", "backward")]
