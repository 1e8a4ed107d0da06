"""How often snapshots would lose the least time, where the idle windows of a step are too short; for the log."""

from __future__ import annotations

from evermoe.planning.protection import FAILURE
from evermoe.planning.schedule import ChunkReason, Link, copy_period


def lowered(reason: ChunkReason, step_seconds: float, link: Link) -> str:
    """What a plan's summary says of a lower frequency; empty where a step's windows have room for a version.

    Args:
        reason: of the plan.
        step_seconds: of a step.
        link: the way to the destinations.
    """
    if reason.fits or not step_seconds:
        return ""
    steps = reason.steps_per_version
    windows, copy = reason.available_seconds / steps, reason.used_seconds + reason.delay_seconds * steps
    period = copy_period(step_seconds, windows, copy, reason.bytes / link.beta, FAILURE)
    if period.steps <= steps:
        return ""
    return (
        f"; a version in {period.steps} steps would delay training by {period.delay_seconds:.6f} s, and a failure in "
        f"{1 / FAILURE:.0f} steps would waste {period.wasted_seconds:.6f} s (Gemini's Eq. 1): the least loss"
    )
