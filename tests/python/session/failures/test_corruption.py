"""Bits that flip in what several members hold: their votes compare digests, and refuse the update."""

from __future__ import annotations

import pytest

from evermoe.state.version import step_of
from support.history import check_history, states_by_version
from support.worker import Fault

EVERYWHERE = {"preset": "lazarus", "replication": 3, "expert_slots": 10, "min_replicas": 3}
"""All members hold all experts."""
FLIPPED = 8
"""A step in whose vote members compare something, however short their steps are."""
STEPS = 11


def start(start_job, members=3, **session):
    sizes = EVERYWHERE if members == 3 else EVERYWHERE | {"replication": 2, "min_replicas": 2}
    return start_job(members, **sizes, rebalance_interval=0, join_interval=50, **session)


def last_state(workers):
    """Digests of all units after the last step."""
    states = states_by_version(workers)
    return states[max(states, key=step_of)]


@pytest.fixture
def clean(start_job):
    """State after a run with right bits, whose members connect again in the same step: experts are placed by load."""

    def run(members):
        faults = {"b": [Fault("vote", FLIPPED, "drop")]}
        workers = start(start_job, members).start_all(faults, "abc"[:members], steps=STEPS)
        assert [each.join() for each in workers] == [0] * members
        assert not any(each.events("corruption_found") for each in workers)
        return last_state(workers)

    return run


CASES = {
    "an expert's weights": Fault("begin", FLIPPED, "flip", where="active"),
    "a dense weight": Fault("begin", FLIPPED, "flip", where="dense"),
    "a moment": Fault("begin", FLIPPED, "flip", where="moment"),
    "a reduced gradient": Fault("vote", FLIPPED, "flip", where="gradient"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick("bits flip in weights, optimizer state or summed gradients of a worker")
def test_a_flipped_bit_is_found_before_the_update_and_its_member_named(start_job, clean, case):
    workers = start(start_job).start_all({"b": [CASES[case]]}, "abc", steps=STEPS)
    assert [each.join() for each in workers] == [0, 0, 0]
    flipped = workers[1].events("flipped")[0]["units"]
    for each in workers:
        (found,) = each.events("corruption_found")
        assert (found["step"], found["nodes"], found["action"]) == (FLIPPED, ["b"], "repair")
        assert found["units"] == sorted(flipped)
        assert each.events("verified")[-1]["digests_mismatched"] == 0
    assert "b (rank 1) against the others" in workers[0].log()
    check_history(workers, repaired="b")
    assert last_state(workers) == clean(3), "the run is equal to one without the flip"


@pytest.mark.parametrize("case", CASES)
def test_of_two_holders_neither_is_named(start_job, clean, case):
    """A repeated step mends a wrong gradient. Of two states a recovery takes that of the first rank."""
    workers = start(start_job, 2).start_all({"b": [CASES[case]]}, "ab", steps=STEPS)
    assert [each.join() for each in workers] == [0, 0]
    for each in workers:
        (found,) = each.events("corruption_found")
        assert (found["step"], found["ranks"], found["action"]) == (FLIPPED, [], "repair")
    check_history(workers, repaired="b")
    assert last_state(workers) == clean(2)


def test_a_member_that_differs_again_leaves(start_job):
    """A recovery does not mend hardware."""
    stuck = [Fault("vote", FLIPPED, "flip", nth=time, where="gradient") for time in (1, 2)]
    workers = start(start_job).start_all({"b": stuck}, "abc", steps=STEPS)
    assert [each.join() for each in workers] == [0, 1, 0]
    for each in workers:
        actions = [event["action"] for event in each.events("corruption_found")]
        assert actions == ["repair", "evict"]
    assert "CorruptState" in workers[1].log()
    assert workers[0].events("commit")[-1]["step"] == STEPS - 1
    check_history(workers)


def test_a_member_that_differs_in_a_third_step_leaves(start_job):
    flips = [Fault("begin", step, "flip", where="moment") for step in (FLIPPED, 2 * FLIPPED, 3 * FLIPPED)]
    workers = start(start_job).start_all({"b": flips}, "abc", steps=3 * FLIPPED + 3)
    assert [each.join() for each in workers] == [0, 1, 0]
    for each in workers:
        actions = [event["action"] for event in each.events("corruption_found")]
        assert actions == ["repair", "repair", "evict"]
    check_history(workers, repaired="b")


@pytest.mark.parametrize(("policy", "codes"), {"evict": [0, 1, 0], "stop": [1, 1, 1]}.items())
def test_policies(start_job, policy, codes):
    job = start(start_job, on_corruption=policy)
    workers = job.start_all({"b": [CASES["a dense weight"]]}, "abc", steps=STEPS)
    assert [each.join() for each in workers] == codes
    for each, code in zip(workers, codes, strict=True):
        assert each.events("corruption_found")[0]["action"] == policy
        assert ("CorruptState" in each.log()) == bool(code)
        assert not [event for event in each.events("commit") if code and event["step"] >= FLIPPED]
    check_history(workers)


@pytest.mark.parametrize("name", "abc")
def test_weights_are_compared_with_those_that_their_owner_has_sent(start_job, name):
    """If the owner's have changed, it leaves, and its units come from copies: nobody else has all of them."""
    job = start_job(3, shard_optimizer=True, rebalance_interval=0, join_interval=50)
    workers = job.start_all({name: [CASES["a dense weight"]]}, "abc", steps=STEPS)
    codes = [each.join() for each in workers]
    owner = workers[0].events("protection_planned")[0]["active"]["head"]
    is_owner = owner == ["abc".index(name)]
    assert codes == [int(is_owner and each == name) for each in "abc"]
    for each in workers:
        found = each.events("corruption_found")[0]
        assert (found["nodes"], found["action"]) == ([name], "evict" if is_owner else "repair")
    check_history(workers, repaired=name)


def test_nothing_is_compared_if_that_is_ignored(start_job):
    workers = start(start_job, on_corruption="ignore").start_all({"b": [CASES["a moment"]]}, "abc", steps=STEPS)
    assert [each.join() for each in workers] == [0, 0, 0]
    assert not any(each.events("corruption_found") for each in workers)
    assert workers[0].events("verified")[-1]["units"] == ["head"]
