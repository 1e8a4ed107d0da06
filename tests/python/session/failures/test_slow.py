"""Members that hang in their own code or are slower than `hang_timeout`: they cost the others that limit, once."""

import re
import time

import pytest

from support.harness import wait_until
from support.history import check_history
from support.worker import Fault

HANG_LIMIT = 1.0
SLACK = 10.0
"""Seconds on top of it: 2 on this machine when it is idle."""
ALL = 1 << 20
"""Characters of a log."""
REASON = "has waited for this member longer than hang_timeout"


@pytest.mark.quick("a worker hangs in your code for longer than `hang_timeout`, or is slower than that in every step")
def test_member_that_hangs(start_job):
    """It lives and beats, and the Lighthouse would wait for it for a minute. It joins again when it has sat out."""
    job = start_job(hang_timeout=HANG_LIMIT, join_timeout=60.0)
    faults = {"b": [Fault("forward", 5, "hang")]}
    job.open_gate(20)
    workers = a, b, c = job.start_all(faults, steps=100, slow=0.05, gated=True)
    since = b.wait_for("fault")["time"]
    for each in (a, c):
        assert each.wait_for("commit", members=2)["time"] - since < HANG_LIMIT + SLACK
    woken = time.time()
    job.wake()
    woke = b.wait_for("connection_lost")["time"]
    wait_until(lambda: time.time() > woke + 10 * HANG_LIMIT, "b has sat out")
    job.open_gate(100)
    assert b.wait_for("recovered", members=3, count=2)["time"] - woken > 10 * HANG_LIMIT
    assert [each.join() for each in workers] == [0, 0, 0]
    check_history(workers, away="b")
    assert REASON in b.log()
    for each in (a, c):
        log = each.log(ALL)
        assert "waited 1 s for b-" in log
        said = re.search(r"b-\S+ computed for \S+ s after collective \d+, \w+ of \w+\[.*\]. Its threads then:", log)
        assert said, "the report of b, which is on another node"
        assert re.search(r"thread MainThread:(?s:.*?)in _train\n(?s:.*?)in fault\n", log[said.end() :])


def test_member_whose_loader_hangs_is_named_by_all(start_job):
    """By itself before the others give up, and by them."""
    job = start_job(hang_timeout=HANG_LIMIT, join_timeout=60.0)
    workers = a, b, c = job.start_all({"b": [Fault("read", 5, "hang")]}, steps=12)
    stuck = b.wait_for("slow_loader")
    assert (stuck["kind"], stuck["loader"], stuck["step"]) == ("stuck", "ElasticSampler", 5)
    assert stuck["seconds"] > HANG_LIMIT / 2 and stuck["member"].startswith("b-")
    assert [each.join() for each in (a, c)] == [0, 0]
    job.wake()
    assert "which reads its batch from its loader" in b.wait_for("connection_lost")["reason"]
    for each in (a, c):
        assert re.search(
            r"waited 1 s for b-\S+ at \S+, which reads its batch from its loader: the others", each.log(ALL)
        )
        assert not each.events("slow_loader")
    assert re.search(
        r"b-\S+ has waited \S+ s for its batch of step 5, and its ElasticSampler has not returned", b.log()
    )
    check_history(workers, away="b")


@pytest.mark.long
def test_member_that_is_always_slow(start_job):
    job = start_job(hang_timeout=HANG_LIMIT)
    workers = a, b, c = [job.start(name, steps=100, slow=1.5 if name == "b" else 0.02) for name in "abc"]
    assert [each.join() for each in (a, c)] == [0, 0]
    assert b.join() in (0, 1)  # it may ask again after the end
    check_history(workers, away="b")
    assert REASON in b.log()
    for each in (a, c):
        # On a slow machine it comes back before the end, to be left out again for twice as long.
        assert [event["members"] for event in each.events("recovered")] in ([3, 2], [3, 2, 3, 2])
        assert "waited 1 s for b-" in each.log()
