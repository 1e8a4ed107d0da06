"""A thousand steps with everything on, or a fifth of them: replicas follow bit for bit through whatever happens."""

from __future__ import annotations

import signal

import pytest

from support.history import check_history, check_recovered
from support.worker import Fault

LIMIT = 200.0
"""Seconds for hundreds of steps on a busy machine."""


def longest_idle(each):
    """Per expert: most steps in a row without a token."""
    longest, now = {}, {}
    for event in each.events("copy", after="update"):
        for layer, counts in event["tokens"].items():
            for expert, count in enumerate(counts):
                now[layer, expert] = 0 if count else now.get((layer, expert), 0) + 1
                longest[layer, expert] = max(longest.get((layer, expert), 0), now[layer, expert])
    return longest


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [
        ("evermoe", 200),
        pytest.param("adamw", 1000, marks=pytest.mark.long),
        pytest.param("evermoe", 1000, marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_replicas_follow_many_steps(start_job, optimizer, steps):
    """Experts without tokens for many steps, clipping, a schedule, shifting load, and three deaths."""
    job = start_job(
        2,
        expert_slots=1,
        max_grad_norm=0.3,
        rebalance_interval=steps // 20,
        join_interval=steps // 50,
        snapshot_interval=steps // 10,
    )
    job.open_gate(steps * 3 // 10)
    options = {"steps": steps, "optimizer": optimizer, "schedule": "cosine", "narrow": steps // 5, "gated": True}
    replica = {"session": {"role": "replica"}} | options
    nodes = [job.start("y", **replica)]
    nodes[0].wait_for("phase", phase="agree")
    a, b = job.start_all({"b": [Fault("vote", steps * 19 // 20)]}, "ab", **options)
    for gate, following in ((steps * 3 // 10, steps * 3 // 5), (steps * 3 // 5, steps)):
        a.wait_for("gate", LIMIT, step=gate)
        nodes[-1].signal(signal.SIGKILL)
        assert nodes[-1].join() == -9
        nodes.append(job.start("y", **replica))
        nodes[-1].wait_for("phase", phase="agree")
        job.open_gate(following)
    assert [each.join(LIMIT) for each in (a, b, nodes[-1])] == [0, -9, 0]
    check_history([a, b])
    assert max(longest_idle(a).values()) >= steps * 3 // 20, "no expert was idle for long"
    assert any(event["reason"] == "the load has shifted" for event in a.events("recovered"))
    for event in a.events("recovered"):
        assert (event["steps_lost"], event["digests_mismatched"], event["stale"]) == (0, 0, {})
    recovered = check_recovered([a, b], a)
    assert (recovered["step"], recovered["members"]) == (steps * 19 // 20, 1)
    assert recovered["sources"]["peer"] > 0
    for each in (a, nodes[-1]):
        verified = each.events("verified")[0]
        assert verified["digests_mismatched"] == 0
        assert verified["digests_checked"] > 0
