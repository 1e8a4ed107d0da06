"""Interval between versions where a step's idle windows are too short: minimises the lost time. Pure."""

from __future__ import annotations

from evermoe.copies.snapshot.rank_plan import MAX_VERSION_STEPS
from evermoe.planning.protection import FAILURE
from evermoe.planning.schedule import ChunkReason, Link


def steps_of(reason: ChunkReason, step_seconds: float, link: Link) -> int:
    """Return the steps over which a version is sent: the fewest without delay, or those that lose the least time.

    Args:
        reason: of a plan with the fewest steps without delay, of `plan_chunks(version_steps=None)`.
        step_seconds: of a step.
        link: the link to the destinations.
    """
    period = reason.pace(step_seconds, link, FAILURE, most=MAX_VERSION_STEPS)
    return reason.steps_per_version if period is None else period.steps


def lowered(reason: ChunkReason, step_seconds: float, link: Link, *, is_done: bool) -> str:
    """Return the sentence of a plan's summary on a lower frequency; empty where versions do not delay training.

    Args:
        reason: of the plan that is in use.
        step_seconds: of a step.
        link: the link to the destinations.
        is_done: whether versions are as frequent as `steps_of` says; otherwise the sentence is advice.
    """
    period = reason.pace(step_seconds, link, FAILURE, most=MAX_VERSION_STEPS)
    if period is None:
        return ""
    failures = f"a failure in {1 / FAILURE:.0f} steps"
    if is_done:
        return (
            f"; so there is a version every {reason.steps_per_version} steps, which loses the least time to delays and "
            f"to {failures} (Gemini's Eq. 1)"
        )
    if period.steps <= reason.steps_per_version:
        return ""
    return (
        f"; a version in {period.steps} steps would delay training by {period.delay_seconds:.6f} s, and {failures} "
        f"would waste {period.wasted_seconds:.6f} s (Gemini's Eq. 1): the least loss"
    )
