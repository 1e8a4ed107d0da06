"""After a change of members only copies that their holders lack are made again."""

from __future__ import annotations

import pytest

from support.harness import FEWEST
from support.history import check_history, check_recovered
from support.worker import Fault

FAULT = 5


def arrangements(worker):
    """Of each arrangement: bytes that were missing on all members, and that this one sent in snapshots."""
    found, step = [], None
    for event in worker.events():
        if event["event"] == "protection_planned":
            found.append([event["missing_bytes"], 0])
            step = None
        elif event["event"] == "copy" and step is None:
            step = event["step"]
        elif event["event"] == "chunk_sent" and event["step"] == step:
            found[-1][1] = event["total"]
    return found


def waits(worker):
    """Of each recovery, whether training waited for the copies."""
    events = [event["event"] for event in worker.events()]
    recoveries = [at for at, event in enumerate(events) if event == "recovered"]
    arranged = [at for at, event in enumerate(events) if event == "protection_planned"]
    return ["confirm" in events[begin:end] for begin, end in zip(arranged, recoveries, strict=True)]


@pytest.mark.parametrize(("fault", "free_bytes"), [("vote", None), ("confirm", None), ("vote", 1000)])
def test_after_a_death_only_missing_copies_are_sent(start_job, fault, free_bytes):
    """Training waits for copies at the start, and afterwards only where memory is short."""
    job = start_job(4, preset="gemini", join_interval=50)
    faults = {"b": [Fault(fault, FAULT)]}
    room = {"c": free_bytes}
    workers = [job.start(name, *faults.get(name, []), free_bytes=room.get(name)) for name in "abcd"]
    assert [each.join() for each in workers] == [0, -9, 0, 0]
    check_history(workers)
    survivors = [each for each in workers if each.name != "b"]
    for each in survivors:
        assert waits(each) == [True, free_bytes is not None]
        assert check_recovered(workers, each)["steps_lost"] == 0
    if free_bytes is None:
        missing_R, sent_R = zip(*(arrangements(each)[-1] for each in survivors), strict=True)
        assert len(set(missing_R)) == 1
        assert 0.9 * missing_R[0] < sum(sent_R) < 1.1 * missing_R[0], "digests and padding are sent, too"


def test_a_newcomer_gets_the_copies_that_it_keeps(start_job):
    job = start_job(2, preset="gemini", join_interval=1)
    job.open_gate(4)
    workers = job.start_all({}, "ab", gated=True, steps=30)
    for each in workers:
        each.wait_for("gate", step=4)
    workers.append(job.start("c", gated=True, steps=30))
    job.take_in(workers[2], until=30)
    assert [each.join() for each in workers] == [0, 0, 0]
    check_history(workers)
    missing_R, sent_R = zip(*(arrangements(each)[-1] for each in workers), strict=True)
    assert missing_R == missing_R[:1] * 3
    assert 0.9 * missing_R[0] < sum(sent_R) < 1.1 * missing_R[0]


@pytest.mark.long
def test_copies_that_arrive_damaged_during_training_are_made_again_while_it_waits(start_job):
    """A copy that its holder has from before goes bad between the survey and its use."""
    job = start_job(4, preset="gemini", join_interval=50)
    flip = Fault("phase verify", action="flip", nth=2, where="arena")
    workers = job.start_all({"a": [flip], "b": [Fault("vote", FAULT)]}, "abcd")
    assert [each.join() for each in workers] == [0, -9, 0, 0]
    assert workers[0].events("flipped")[0]["units"]
    check_history(workers)
    for each in (workers[0], *workers[2:]):
        assert waits(each) == [True, False, True], "at the start, after the death, after the vote that failed"
        assert each.events("verified")[0]["digests_mismatched"] == 0
        assert check_recovered(workers, each)["steps_lost"] == 0


def test_copies_repeat_steps_before_a_recovery_only_where_no_trainer_is_left(start_job):
    """Nobody needs the others then: they repeat their steps concurrently with the next one."""
    job = start_job(3, **FEWEST, rebalance_interval=0, join_interval=50)
    look = Fault("phase fetch", action="look", nth=2)
    workers = a, b, c = job.start_all({"a": [look], "b": [Fault("vote", FAULT)], "c": [look]})
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    plan, lost = a.events("protection_planned")[0], b.events("joined")[0]["rank"]
    orphans = {unit for unit, trainers in plan["active"].items() if trainers == [lost]}
    kept = {each: kept_by(each, plan) for each in (a, c)}
    assert orphans & (kept[a] | kept[c])
    assert (kept[a] | kept[c]) - orphans
    for each in (a, c):
        assert set(each.events("looked")[0]["behind"]) == kept[each] - orphans
        assert check_recovered(workers, each)["steps_lost"] == 0
        assert each.events("verified")[0]["digests_mismatched"] == 0


def kept_by(worker, plan):
    """Units of which a worker keeps replicas."""
    rank = worker.events("joined")[0]["rank"]
    return {unit for unit, (kind, _, holders) in plan["holders"].items() if kind == "replayed" and rank in holders}
