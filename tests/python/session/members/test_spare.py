"""Spares: processes that are ready to train, and take a lost member's place in the recovery that the loss begins."""

import pytest

from evermoe.config.membership import Membership
from evermoe.config.variables import find_membership
from support.harness import wait_until
from support.history import check_history, check_recovered
from support.worker import EVERYTHING, Fault

STEPS = 24
HELD = 8
"""Step at which members wait until the spares stand by; more than one look for newcomers before it and after."""


def start_with_spares(job, faults, spares="d", names="abc"):
    """Members that are held at a step, and spares that know of them."""
    job.open_gate(HELD)
    members = job.start_all(faults, names, gated=True, steps=STEPS)
    members[0].wait_for("commit", step=HELD - 2)
    waiting = [job.start(name, session={"role": "spare"}, gated=True, steps=STEPS) for name in spares]
    for each in waiting:
        wait_until(lambda each=each: "is a spare" in each.log() and each.has_met_members(), f"{each.name} stands by")
    return members, waiting


def stands_by(worker):
    """The event by which a spare says that it is ready."""
    return worker.wait_for("stands_by")


def sizes(worker):
    """Members after each recovery."""
    return [event["members"] for event in worker.events("recovered")]


@pytest.mark.parametrize("preset", ["auto", "gemini"])
@pytest.mark.quick("a worker or its machine is lost while a spare waits")
def test_a_spare_takes_a_lost_members_place_in_the_same_recovery(start_job, preset):
    job = start_job(3, preset=preset, rebalance_interval=0)
    (a, b, c), (spare,) = start_with_spares(job, {"b": [Fault("forward", 17)]})
    ready = stands_by(spare)
    assert len(ready["connected"]) == 3, "it has a connection to each member"
    rooms = [*job.node_memory("d").glob("*.room")]
    assert ready["reserved_bytes"] == sum(path.stat().st_size for path in rooms) > 0
    assert sum(path.stat().st_blocks for path in rooms) * 512 >= ready["reserved_bytes"], "it has its pages"
    job.open_gate(EVERYTHING)
    assert b.join() == -9
    assert [each.join() for each in (a, c, spare)] == [0, 0, 0]
    assert sizes(a) == sizes(c) == [3, 3]
    assert sizes(spare) == [3]
    check_history([a, b, c, spare])
    check_recovered([a, b, c, spare], a)
    assert not [*job.node_memory("d").glob("*.room")], "what was not taken was given back"
    assert [each.events("recovered")[-1]["fetched_units"] for each in (a, c)] == [0, 0], "experts of others stay"
    assert spare.events("recovered")[0]["fetched_units"] > 0


@pytest.mark.long
def test_two_losses_at_once_take_as_many_spares_as_there_are(start_job):
    job = start_job(3, replication=3)
    (a, b, c), (spare,) = start_with_spares(job, {name: [Fault("forward", 17)] for name in "bc"})
    job.open_gate(EVERYTHING)
    assert [each.join() for each in (a, b, c, spare)] == [0, -9, -9, 0]
    assert sizes(a)[-1] == sizes(spare)[-1] == 2
    check_history([a, b, c, spare])


@pytest.mark.long
def test_the_first_of_two_spares_takes_the_place_and_the_second_waits_for_the_next_loss(start_job):
    job = start_job(3)
    members, waiting = start_with_spares(job, {"b": [Fault("forward", 12)], "c": [Fault("forward", 19)]}, "de")
    job.open_gate(EVERYTHING)
    a = members[0]
    assert [each.join() for each in (*members, *waiting)] == [0, -9, -9, 0, 0]
    assert sizes(a) == [3, 3, 3]
    assert sorted(map(len, map(sizes, waiting))) == [1, 2]
    check_history([*members, *waiting])


@pytest.mark.long
def test_a_spare_leaves_the_memory_that_trainers_of_its_node_need(start_job):
    """Its node has room for the trainers' memory, but not for a spare's, too: it says so, and takes a place."""
    job = start_job(2)
    job.open_gate(HELD)
    a, b = job.start_all({"b": [Fault("forward", 17)]}, "ab", gated=True, steps=STEPS)
    a.wait_for("commit", step=HELD - 2)
    kept = {path.name for path in job.node_memory("a").glob("*.arena")}
    spare = job.start("d", session={"role": "spare", "node": "a"}, gated=True, steps=STEPS, free_bytes=1 << 10)
    assert stands_by(spare)["reserved_bytes"] == 0
    assert "this spare reserves no memory: it would need" in spare.log()
    assert {path.name for path in job.node_memory("a").glob("*")} >= kept
    job.open_gate(EVERYTHING)
    assert [each.join() for each in (a, b, spare)] == [0, -9, 0]
    assert sizes(a) == [2, 2]
    check_history([a, b, spare])


@pytest.mark.parametrize("members", [1, 3])
def test_spares_that_nobody_needs_learn_of_the_end_and_the_death_of_one_is_not_noticed(start_job, members):
    """Each is alone on its machine."""
    job = start_job(members)
    workers, (*spares, dying) = start_with_spares(job, {}, "def", "abc"[:members])
    dying.process.kill()
    assert dying.join() == -9
    job.open_gate(EVERYTHING)
    assert [each.join() for each in workers] == [0] * members
    assert [sizes(each) for each in workers] == [[members]] * members
    assert [each.join() for each in spares] == [0, 0]
    assert "the job is over, and this spare was not needed" in spares[0].log()
    assert [each.events("recovered") for each in spares] == [[], []]
    check_history(workers)


@pytest.mark.parametrize(("members", "error"), [(2, "JoinTimeout"), (1, "LostExperts")])
@pytest.mark.long
def test_a_spare_whose_job_is_gone_never_begins_it_again(start_job, members, error):
    job = start_job(members, quorum_timeout=4.0, hang_timeout=2.0)
    job.open_gate(HELD)
    workers = job.start_all({}, "ab"[:members], gated=True, steps=HELD + 2)
    workers[0].wait_for("commit", step=HELD - 2)
    spare = job.start("d", session={"role": "spare"}, steps=HELD + 2)
    wait_until(lambda: "is a spare" in spare.log() and spare.has_met_members(), "it stands by")
    for each in workers:
        each.process.kill()
    assert spare.join() == 1
    assert [event["error"] for event in spare.events("failed")] == [error]
    assert spare.events("commit") == []


def test_a_spare_needs_a_job_whose_members_it_may_replace():
    with pytest.raises(ValueError, match=r"role='spare' \(EVERMOE_ROLE\) waits to replace .*: expected lighthouse"):
        find_membership(Membership(role="spare"))
