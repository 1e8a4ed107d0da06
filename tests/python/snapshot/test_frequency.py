"""Steps between versions where idle windows are too short: against all paces, each counted by itself."""

from __future__ import annotations

import pytest

from evermoe.copies.snapshot.frequency import lowered, steps_of
from evermoe.copies.snapshot.rank_plan import MAX_VERSION_STEPS
from evermoe.planning.schedule import ChunkReason, Link

LINK = Link(1e-3, 1e6)
NBYTES = 500_000
STEP = 0.2


def reason(steps, delay, used=0.0):
    """A plan over this number of steps, each of which is delayed and has some of its windows used."""
    return ChunkReason(False, steps, None, delay, used * steps, 3 * used * steps, NBYTES, NBYTES, "")


def least(copy, windows):
    """The first number of steps that loses the least time in a step: delays, and what one failure in 10,000 wastes."""

    def lost(steps):
        return max(0.0, copy - steps * windows) / steps + 1e-4 * (1.5 * steps * STEP + NBYTES / LINK.beta)

    return min(range(1, MAX_VERSION_STEPS + 1), key=lost)


@pytest.mark.parametrize("delay", [1e-5, 1e-3, 0.005, 0.02, 0.3])
def test_windows_that_take_nothing(delay):
    steps = steps_of(reason(1, delay), STEP, LINK)
    assert steps == least(delay, 0.0)
    assert steps_of(reason(steps, delay / steps), STEP, LINK) == steps, "the same of the plan that follows"


@pytest.mark.parametrize("windows", [0.001, 0.004, 0.01])
def test_windows_that_take_too_little(windows):
    """The plan is over as many steps as there may be, and even these have no room for all."""
    delay = 0.003
    copy = MAX_VERSION_STEPS * (windows + delay)
    assert steps_of(reason(MAX_VERSION_STEPS, delay, windows), STEP, LINK) == least(copy, windows)


def test_what_delays_nothing_stays():
    for is_done in (False, True):
        assert lowered(reason(3, 0.0, 0.1), STEP, LINK, is_done=is_done) == ""
    assert steps_of(reason(3, 0.0, 0.1), STEP, LINK) == 3


def test_advice_is_for_those_who_have_fixed_more_versions():
    few = least(0.02, 0.0)
    assert f"; a version in {few} steps would delay training by 0.02" in lowered(
        reason(1, 0.02), STEP, LINK, is_done=False
    )
    assert lowered(reason(few, 0.02 / few), STEP, LINK, is_done=False) == ""
    assert f"; so there is a version every {few} steps" in lowered(reason(few, 0.02 / few), STEP, LINK, is_done=True)
