"""State that outlives processes: shared memory on living nodes, then checkpoints on disk, then a clear end."""

from __future__ import annotations

import signal
import time

import pytest

from evermoe._native import Arena
from evermoe.state.version import step_of
from support.harness import FEWEST, wait_until
from support.history import check_history, check_recovered, committed_steps
from support.worker import Fault

CRASH = 7


def crash_all(job, workers, step=CRASH):
    """All processes die between two steps, with all copies of this version complete; their nodes stay alive."""
    for each in workers:
        each.wait_for("gate", step=step)
    if job.session.get("preset") in ("gemini", "baft"):
        for each in workers:
            bundles = len(each.events("snapshot_received", step=step - 1)) if step else 1
            each.wait_for("snapshot_received", step=step, count=bundles)
    if job.session.get("replication") == 1:  # copies in the worker's own memory, which no vote waits for
        wait_until(lambda: newest_steps(job, workers) == {step}, f"copies of step {step} are complete")
    for each in workers:
        each.signal(signal.SIGKILL)
    assert {each.join() for each in workers} == {-9}


def newest_steps(job, workers):
    arenas = [path for each in workers for path in job.node_memory(each.name).glob("*.arena")]
    return {step_of(version) for path in arenas for _, version in Arena.open(path).versions()[:1]}


def run_until_crash(job, names="abc"):
    job.open_gate(CRASH)
    crash_all(job, job.start_all({}, names, gated=True))


def flip(job, damaged, nodes="abc"):
    """Changes a byte of every unit that `damaged(name)`, in the newest version of all arenas of the nodes."""
    count = 0
    for node in nodes:
        for path in sorted(job.node_memory(node).glob("*.arena")):
            arena = Arena.open(path)
            index = arena.versions()[0][0]
            for name, offset, nbytes in arena.units():
                if damaged(name):
                    arena.buffer(index)[offset + nbytes // 2] ^= 0x10
                    count += 1
    return count


@pytest.mark.quick("all workers crash, all machines stay up")
def test_all_processes_crash_and_the_job_resumes_from_shared_memory(start_job):
    job = start_job()
    run_until_crash(job)
    again = job.start_all({})
    assert [each.join() for each in again] == [0, 0, 0]
    check_history(job.workers)
    for each in again:
        recovered = check_recovered(job.workers, each, 0)
        assert (recovered["step"], recovered["digests_mismatched"]) == (CRASH, 0)
        assert recovered["sources"]["local memory"] > 0
        assert recovered["sources"].get("disk", 0) == 0
    assert job.arenas() == []


@pytest.mark.long
def test_moetion_resumes_from_the_memory_of_its_own_nodes(start_job):
    """After a failure of software alone: each node has snapshots of what it trains."""
    job = start_job(preset="moetion", local_bytes_per_step=1 << 30, **FEWEST)
    run_until_crash(job)
    again = job.start_all({})
    assert [each.join() for each in again] == [0, 0, 0]
    check_history(job.workers, undone=True)
    for each in again:
        recovered = each.events("recovered")[0]
        assert CRASH - 1 <= recovered["step"] <= CRASH
        assert recovered["sources"]["local memory"] > 0
        assert recovered["sources"].get("disk", 0) == recovered["digests_mismatched"] == 0


def test_where_each_host_has_a_copy_of_everything_nothing_is_asked_of_peers(start_job):
    """The processes are gone, and their hosts and shared memory are left."""
    job = start_job(2, preset="gemini")
    run_until_crash(job, "ab")
    again = job.start_all({}, "ab")
    assert [each.join() for each in again] == [0, 0]
    check_history(job.workers)
    for each in again:
        recovered = check_recovered(job.workers, each, 0)
        assert (recovered["step"], recovered["tier"]) == (CRASH, "own memory")
        assert recovered["sources"]["local memory"] > 0 == recovered["sources"].get("peer", 0)


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.02])
@pytest.mark.few(1)
def test_all_processes_crash_in_the_middle_of_anything(start_job, delay):
    job = start_job()
    workers = job.start_all({}, steps=10_000)
    workers[0].wait_for("commit", step=9)
    time.sleep(delay)
    for each in workers:
        each.signal(signal.SIGKILL)
    assert {each.join() for each in workers} == {-9}
    committed = committed_steps(workers)
    again = job.start_all({}, steps=committed + 5)
    assert [each.join() for each in again] == [0, 0, 0]
    for each in again:
        recovered = check_recovered(job.workers, each, 0)
        assert recovered["step"] in (committed, committed + 1)
        assert recovered["digests_mismatched"] == 0
    check_history(again)


@pytest.mark.long
def test_all_crash_with_damaged_copies_and_then_without_a_node(start_job):
    """Copies of one node are damaged, then all copies of a unit; at last one node is lost, and fewer come back."""
    job = start_job(preset="gemini")
    run_until_crash(job)
    assert flip(job, lambda name: True, "a") > 0
    job.open_gate(CRASH + 4)
    again = job.start_all({}, gated=True, steps=30)
    crash_all(job, again, CRASH + 4)
    recovered = [check_recovered(job.workers, each, 0) for each in again]
    assert {r["step"] for r in recovered} == {CRASH}
    assert all(r["digests_mismatched"] > 0 for r in recovered)
    assert flip(job, lambda name: name == "first.experts.3") == 2
    job.open_gate(CRASH + 8)
    again = job.start_all({}, gated=True, steps=30)
    crash_all(job, again, CRASH + 8)
    for each in again:
        recovered = check_recovered(job.workers, each, 0)
        assert (recovered["step"], recovered["steps_lost"]) == (CRASH + 3, 1), "the version before"
        assert recovered["digests_mismatched"] > 0
    job.lose_node("b")
    job.open_gate(30)
    last = job.start_all({}, "ac", session={"members": 2}, steps=30)
    assert [each.join() for each in last] == [0, 0]
    check_history(job.workers, undone=True)
    for each in last:
        assert check_recovered(job.workers, each, 0)["step"] == CRASH + 8


@pytest.mark.quick("a worker crashes, its machine stays up, and it is started again")
def test_process_restarted_on_a_living_node_joins_again(start_job):
    job = start_job()
    job.open_gate(8)
    a, _, c = job.start_all({"b": [Fault("vote", 5)]}, gated=True, steps=30)
    for each in (a, c):
        each.wait_for("gate", step=8)
    again = job.start("b", steps=30)
    job.take_in(again, until=30)
    assert [each.join() for each in (a, c, again)] == [0, 0, 0]
    check_history(job.workers)
    assert check_recovered(job.workers, again, 0)["step"] >= 8
    assert job.arenas() == []


def test_units_that_survive_only_in_the_memory_of_a_crashed_process_come_from_there(start_job):
    job = start_job(2, replication=1, **FEWEST)
    run_until_crash(job, "ab")
    again = job.start_all({}, "ab")
    assert [each.join() for each in again] == [0, 0]
    check_history(job.workers)
    recovered = [check_recovered(job.workers, each, 0) for each in again]
    assert {r["step"] for r in recovered} == {CRASH}
    assert all(r["sources"]["local memory"] for r in recovered)


@pytest.mark.parametrize("preset", ["auto", "gemini"])
@pytest.mark.long
def test_all_crash_before_the_first_step_and_start_afresh(start_job, preset):
    """Nothing was learnt, so nothing is missed, whatever memory is gone."""
    job = start_job(preset=preset, **FEWEST)
    job.open_gate(0)
    crash_all(job, job.start_all({}, gated=True), step=0)
    for node in "bc":
        job.lose_node(node)
    job.open_gate(1 << 60)
    again = job.start_all({})
    assert [each.join() for each in again] == [0, 0, 0]
    check_history(again)


def test_active_replicas_alone_survive_without_copies(start_job):
    job = start_job(replication=0, expert_slots=4, min_replicas=2)
    workers = job.start_all({"b": [Fault("vote", 5)]})
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    for each in (workers[0], workers[2]):
        assert check_recovered(workers, each)["step"] == 5
    assert job.arenas() == []


@pytest.mark.quick("more copies are lost than are kept")
def test_units_without_a_copy_come_from_the_newest_checkpoint(start_job, tmp_path):
    job = start_job(replication=1, checkpoints=str(tmp_path / "saved"), checkpoint_interval=3, **FEWEST)
    workers = job.start_all({"b": [Fault("vote", 5)]})
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers, undone=True)
    for survivor in workers[::2]:
        recovered = check_recovered(workers, survivor)
        assert (recovered["step"], recovered["steps_lost"], recovered["members"]) == (3, 2, 2)
        assert recovered["sources"]["disk"] == recovered["fetched_units"] > 0
        assert any(unit.startswith("first.experts.") for unit in recovered["lost_units"])
        assert survivor.events("done")[0]["consumed"] == 10 * 12


def test_new_job_resumes_from_the_checkpoint_of_an_earlier_one(start_job, tmp_path):
    options = {"checkpoints": str(tmp_path / "saved")}
    first = start_job(2, **options)
    before = first.start_all({}, "ab", steps=6)
    assert [each.join() for each in before] == [0, 0]
    second = start_job(3, **options)
    after = second.start_all({}, "xyz", steps=9)
    assert [each.join() for each in after] == [0, 0, 0]
    for each in after:
        assert check_recovered(before + after, each, 0)["step"] == 6
    check_history(before + after)


@pytest.mark.quick("… and no checkpoint exists")
def test_units_lost_everywhere_are_named_and_end_the_job_until_their_node_is_back(start_job):
    """Members ask each other again until the limit: after 0.2 s, 0.4 s, 0.8 s and so on."""
    job = start_job(replication=1, rejoin_timeout=3.0, **FEWEST)
    workers = a, b, c = job.start_all({"b": [Fault("vote", 5)]})
    assert [each.join() for each in workers] == [1, -9, 1]
    mine = b.events("copy")[0]["digests"].keys()
    others = a.events("copy")[0]["digests"].keys() | c.events("copy")[0]["digests"].keys()
    for survivor in (a, c):
        failed = survivor.events("failed")[0]
        assert failed["error"] == "LostExperts"
        assert set(failed["units"]) >= mine - others
        assert any(unit.startswith("first.experts.") for unit in failed["units"])
        assert failed["units"][0] in failed["message"]
        assert "set checkpoints" in failed["message"]
        assert failed["time"] - b.events("fault")[0]["time"] < 30
    (lost,) = a.events("connection_lost")
    requests = [each for each in a.events("phase", phase="rebuild") if each["time"] > lost["time"]]
    assert 2 <= len(requests) <= 5
    again = job.start_all({})
    assert [each.join() for each in again] == [0, 0, 0]
    for each in again:
        assert check_recovered(job.workers, each, 0)["step"] == 5
    check_history(again)


@pytest.mark.parametrize("point", ["forward", "commit"])
@pytest.mark.quick("your code raises on all workers")
def test_exception_on_all_workers_keeps_their_memory_for_a_restart(start_job, point):
    job = start_job()
    workers = job.start_all({name: [Fault(point, 5, "raise")] for name in "abc"})
    assert [each.join() for each in workers] == [1, 1, 1]
    again = job.start_all({})
    assert [each.join() for each in again] == [0, 0, 0]
    for each in again:
        assert check_recovered(job.workers, each, 0)["step"] == 5 + (point == "commit")
    check_history(again)
    assert job.arenas() == []
