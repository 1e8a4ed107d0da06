"""The demo's verdict, on events made by hand: every reason to fail is one."""

from __future__ import annotations

import copy

import pytest

from evermoe.demo.summary import count_lost, episodes, lost_steps, portion_lost, step_seconds, summarise
from support.demo_events import run


def test_a_good_run_passes():
    result = summarise(run(), None, 8)
    assert result["ok"], result["problems"]
    assert (result["steps_lost"], result["steps_committed"]) == (0, 8)
    assert result["digests_checked"] == 2 * 10 + 2 * 5
    assert result["fetched_bytes"] == 200
    assert result["copy_seconds"] == pytest.approx(0.25)


def test_phases_of_a_recovery_add_up():
    (episode,) = episodes(run())
    expected = {"detect": 0.1, "agree": 0.4, "rebuild": 0.2, "fetch": 0.3, "verify": 0.5, "repeat": 1.5}
    assert episode.seconds == pytest.approx(expected)
    assert episode.total_seconds == pytest.approx(3.0) == pytest.approx(sum(expected.values()))
    assert (episode.killed, episode.step, episode.members, episode.fetched_units) == ([2], 4, 2, 4)


def test_workers_that_join_later_do_not_count_as_survivors():
    events = run()
    events[3] = [{"event": "ready", "time": 0.0}, {"event": "begin", "time": 9.0, "step": 6}]
    assert episodes(events)[0].seconds["detect"] == pytest.approx(0.1)


def test_losses_are_compared_step_by_step_with_those_of_a_run_without_failures():
    without = {worker: rows for worker, rows in run(12, kill_at=99).items()}
    result = summarise(run(12, kill_at=9), without, 12)
    assert (result["loss_difference"], result["ok"]) == (0.0, True)
    assert result["loss_without_failures"] == result["loss_last"]
    for rows in without.values():
        for event in rows:
            if event["event"] == "commit" and event["step"] > 9:
                event["loss"] -= 2.0
    result = summarise(run(12, kill_at=9), without, 12)
    assert result["loss_difference"] == pytest.approx(2.0)
    assert summarise(run(12, kill_at=9), None, 12)["loss_difference"] is None


def test_steps_are_timed_before_the_first_kill():
    assert step_seconds(run(12, kill_at=9)) == pytest.approx([1.0] * 5)


def fail(events, change):
    events = copy.deepcopy(events)
    change(events)
    return summarise(events, None, 8)["problems"]


def test_every_reason_to_fail_is_one():
    def without_last_commit(events):
        for rows in events.values():
            rows[:] = [e for e in rows if not (e["event"] == "commit" and e["step"] == 7)]

    def mismatch(events):
        events[0][-1]["digests_mismatched"] = 1

    def rising(events):
        for event in (e for rows in events.values() for e in rows if e["event"] == "commit"):
            event["loss"] = 1.0 + event["step"]

    def undone(events):
        next(e for e in events[0] if e["event"] == "recovered")["steps_lost"] = 3

    def repeated(events):
        events[0].append(dict(next(e for e in events[0] if e["event"] == "commit")))

    def unverified(events):
        for rows in events.values():
            rows[:] = [e for e in rows if e["event"] != "verified"]

    assert "1 steps were lost" in fail(run(), without_last_commit)[0]
    assert "1 digests did not match" in fail(run(), mismatch)[0]
    assert "the loss did not fall" in fail(run(), rising)[0]
    assert "3 steps were lost" in fail(run(), undone)[0]
    assert lost_steps(run(), 8) == 0
    assert "1 steps were lost" in fail(run(), repeated)[0]
    assert "no worker verified" in fail(run(), unverified)[0]


def test_nobody_left_is_a_problem():
    events = run()
    cut = events[2][-1]["time"]
    events = {worker: [e for e in rows if e["time"] <= cut] for worker, rows in events.items()}
    assert any("no survivor applied a step" in problem for problem in summarise(events, None, 8)["problems"])


def partial_run(lost):
    """Steps 0 to 3 with 10 tokens each on expert 0 and 30 on expert 1; expert 1 goes back to its copy of step 2."""
    events = run(kill_at=4)
    for worker, rows in events.items():
        for event in list(rows):
            if event["event"] == "commit":
                event["generation"] = 1
                counts = {"moe": [5, 15] if worker < 2 else [0, 0]}
                rows.append({"event": "routed", "step": event["step"], "generation": 1, "counts": counts, "time": 0.0})
                rows.append({"event": "routed", "step": event["step"], "generation": 0, "counts": counts, "time": 0.0})
            if event["event"] == "recovered":
                told = {"stale": {"moe.experts.1": 2}, "lost_tokens": {"moe.experts.1": lost}, "plt": lost / 160}
                event.update(told | {"step": 4})
    return events


@pytest.mark.parametrize(("lost", "ok"), [(60, True), (59, False)])
def test_what_the_session_says_was_lost_must_be_what_the_routers_have_counted(lost, ok):
    result = summarise(partial_run(lost), None, 8, is_partial=True)
    assert result["plt_counted"] == pytest.approx(60 / 160)
    assert result["lost_tokens"] == lost
    assert result["ok"] == ok, result["problems"]
    assert ok or any("PLT" in problem for problem in result["problems"])


def test_tokens_lost_in_one_recovery_are_not_counted_in_the_next():
    counts = {step: {"moe": [1, 10**step]} for step in range(5)}
    recoveries = [
        {"stale": {"moe.experts.1": 1}, "step": 3},
        {"stale": {"moe.experts.0": 2, "moe.experts.1": 1}, "step": 4},
        {"stale": {"moe.experts.1": 4}, "step": 5},
    ]
    assert count_lost(counts, recoveries) == [
        {"moe.experts.1": 110},
        {"moe.experts.0": 2, "moe.experts.1": 1000},
        {"moe.experts.1": 10_000},
    ]
    assert portion_lost(counts, recoveries) == pytest.approx(11_112 / 11_116)
