"""A session's step on a GPU: what it launches, for what its host waits, and what it allocates."""

import json

import pytest

from support.step_costs import STEADY, STEPS, session_steps

WHAT = ("launches", "waits", "collectives", "events", "allocations")
PLAIN = {"forward": (81, 0, 0, 0, 84), "backward": (79, 0, 0, 0, 68), "end": (9, 0, 0, 0, 13)}
"""Without a session, on one GPU."""
COSTS = {
    "auto": {"forward": (82, 2, 7, 16, 91), "backward": (100, 0, 5, 10, 93), "end": (24, 3, 3, 7, 29)},
    "lazarus": {"forward": (108, 2, 7, 2, 119), "backward": (100, 0, 5, 0, 93), "end": (24, 3, 3, 0, 32)},
}
"""Of each of two members, whose two MoE layers exchange tokens. Where there are fewer, lower these."""


@pytest.mark.gpu
@pytest.mark.usefixtures("stands_in")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("preset", COSTS)
def test_a_step_costs_no_more(start, own_gpus, preset):
    """Without the digests of some votes, and what other threads copy in some steps."""
    environment = {name: own_gpus(number) for number, name in enumerate("ab")}
    found, logs = start(session_steps, "ab", environment, preset=preset, on_corruption="ignore")
    for name in "ab":
        plain, *steps = found[name]
        assert len(steps) == STEPS, logs[name]
        assert compared(PLAIN, [plain]) == {}
        assert compared(COSTS[preset], steps[STEADY:]) == {}, json.dumps(steps[-1]["names"], indent=1)


def compared(pinned, events):
    """Costs that are larger, as (pinned, least)."""
    found = {
        (phase, what): (most, min(event["costs"][phase].get(what, 0) for event in events))
        for phase, costs in pinned.items()
        for what, most in zip(WHAT, costs, strict=True)
    }
    return {place: pair for place, pair in found.items() if pair[1] > pair[0]}
