"""Figures of a run, on events made by hand."""

from __future__ import annotations

from benches.compare.outcome import lost_steps, measure


def taken(step, time, **more):
    return {"event": "taken", "step": step, "time": time, "loss": 3.0} | more


def restarted():
    """Steps 0 to 4, a second each from second 10; worker 1 dies; from second 20 again from step 3."""
    first = [{"event": "begin", "step": 0, "time": 10.0}, *(taken(step, 11.0 + step) for step in range(5))]
    again = [{"event": "resumed", "step": 3, "time": 20.0}, *(taken(step, 18.0 + step) for step in range(3, 8))]
    last = [{"event": "final", "loss": 2.5, "time": 26.0}]
    other = [taken(step, 11.1 + step) for step in range(5)] + [{"event": "killed", "step": 5, "time": 15.5}]
    return {0: first + again + last, 1: other}


def figures(events, **more):
    return measure(
        events, **({"began": 4.0, "tokens": 100, "assignments": 400, "sent_bytes": 7, "peak_memory_bytes": 8} | more)
    )


def test_steps_taken_again_are_lost_with_their_tokens():
    outcome = figures(restarted())
    assert (outcome.steps, outcome.seconds, outcome.startup_seconds) == (8, 15.0, 6.0)
    assert (outcome.lost_steps, outcome.lost_tokens, outcome.plt) == (2, 800, 0.0)
    assert outcome.tokens_per_second == 8 * 100 / 15.0
    assert (outcome.final_loss, outcome.kills, outcome.joins) == (2.5, 1, 0)


def test_a_failure_does_not_change_the_time_of_a_step():
    assert figures(restarted()).step_seconds == 1.0


def test_longest_stall_ends_with_a_step_that_is_new():
    assert figures(restarted()).longest_stall == 8.0  # from step 5 at 15.0 to step 6 at 23.0


def test_tokens_of_experts_that_went_back_count_once_whoever_reports_them():
    told = {"event": "recovered", "step": 5, "lost_tokens": {"a.experts.1": 30, "a.experts.2": 12}, "plt": 0.02}
    events = {0: [taken(4, 1.0), told | {"time": 2.0}, taken(5, 3.0)], 1: [told | {"time": 2.1}]}
    outcome = figures(events, began=0.0)
    assert (outcome.lost_steps, outcome.lost_tokens, outcome.plt) == (0, 42, 0.02)


def test_one_who_resumes_later_at_the_same_step_loses_nothing():
    rows = {0: [taken(0, 1.0), taken(1, 2.0)], 1: [{"event": "resumed", "step": 2, "time": 2.5}]}
    assert lost_steps(rows) == 0


def test_what_comes_after_the_last_step_does_not_count():
    events = restarted()
    events[2] = [{"event": "killed", "time": 26.5}, {"event": "resumed", "step": 0, "time": 27.0}, taken(0, 28.0)]
    assert figures(events) == figures(restarted())


def test_run_without_a_step_has_figures():
    outcome = figures({0: []})
    assert (outcome.steps, outcome.tokens_per_second, outcome.final_loss) == (0, 0.0, None)
