"""The data behind the demo's picture: who was in the job when, and how fast it trained."""

from __future__ import annotations

import math
import statistics

import pytest

from evermoe.demo.timeline import rates, timeline
from support.demo_events import run

TOKENS = 100


def joined(events, at):
    """Add worker 3, which asks to join at a time, and meets the others half a second later for half a second."""
    events[3] = [
        {"event": "ready", "time": 0.0},
        {"event": "joining", "time": at},
        {"event": "phase", "phase": "rebuild", "time": at + 0.5},
        {"event": "recovered", "time": at + 1.0},
        {"event": "begin", "time": at + 1.0, "step": 7},
        {"event": "update", "time": at + 2.5, "step": 7},
    ]
    for worker in (0, 1):
        meet = [
            {"event": "phase", "phase": "agree", "time": at + 0.4},
            {"event": "phase", "phase": "rebuild", "time": at + 0.5},
        ]
        resume = [{"event": "recovered", "time": at + 1.0}, {"event": "begin", "time": at + 1.0, "step": 7}]
        events[worker] = sorted([*events[worker], *meet, *resume], key=lambda event: event["time"])
    return events


def test_the_number_of_members_changes_at_the_kill():
    found = timeline(run(), None, TOKENS)
    (death,) = found.deaths.values()
    assert found.deaths == {2: 4.5}
    assert (found.members(death - 0.01), found.members(death + 0.01)) == (3, 2)


def test_each_worker_has_a_lane_of_what_it_did():
    found = timeline(joined(run(12), at=9.5), None, TOKENS)
    lanes = {worker: [(span.state, span.start, span.end) for span in lane] for worker, lane in found.lanes.items()}
    assert lanes[2] == [("training", 0.0, 4.5)]
    assert lanes[3] == [("joining", 9.5, 10.5), ("training", 10.5, 12.0)]
    for survivor in (0, 1):
        training = [("training", 0.0, 4.6), ("recovering", 4.6, 6.0), ("training", 6.0, 10.0)]
        assert lanes[survivor][:4] == [*training, ("joining", 10.0, 10.5)]
    assert [found.members(at) for at in (4.0, 5.0, 9.6, 10.6)] == [3, 2, 2, 3]


def test_kill_recovery_and_join_are_marked():
    found = timeline(joined(run(12), at=9.5), None, TOKENS)
    assert found.outages == [(4.5, 7.5)]
    assert [(mark.kind, mark.time) for mark in found.marks] == [("kill", 4.5), ("recovered", 7.5), ("join", 10.5)]


def test_losses_without_failures_are_those_of_the_same_steps():
    found = timeline(run(8), run(6, kill_at=99), TOKENS)
    assert found.losses_without_failures == found.losses[:6]
    assert timeline(run(8), None, TOKENS).losses_without_failures == []


def test_two_commits_at_one_moment_do_not_show_as_a_spike():
    """As at the end of each run: a commit is reported after the next vote, and the last two steps share one."""
    events = run(12)
    for rows in events.values():
        commits = [event for event in rows if event["event"] == "commit"]
        for event, following in zip(commits, commits[1:] + commits[-1:], strict=True):
            event["time"] = following["time"]
    found = [rate for _, rate in timeline(events, None, TOKENS).rates]
    assert all(map(math.isfinite, found))
    assert min(found) > 0 and max(found) < 1.5 * statistics.median(found)


def test_throughput_falls_in_a_recovery_and_returns():
    found = timeline(run(20, kill_at=9), None, TOKENS)
    before = [rate for time, rate in found.rates if time < 9.0]
    lowest = min(rate for time, rate in found.rates if 9.5 < time < 12.5)
    after = [rate for time, rate in found.rates if time > 16.0]
    assert before == pytest.approx([TOKENS] * len(before)) and after == pytest.approx([TOKENS] * len(after))
    assert lowest < 0.5 * TOKENS


def test_one_step_has_no_rate():
    assert rates([1.0], TOKENS, []) == []
