"""Kills in the middle of a copy, at either end: what is torn is never taken, what was committed is never lost."""

from __future__ import annotations

import pytest

from support.history import check_history, check_recovered, committed_steps, states_by_version
from support.worker import Fault

VERSION = 6
"""Steps of the state in whose copy things go wrong: later versions are copied while the next step runs."""
SNAPSHOTS = {"expert_slots": 1, "copy_buffer_bytes": 512}
"""No expert has a second active replica if there are as many slots without; a snapshot travels in many chunks."""


def check_survivors(workers, survivors, members):
    """All are at the newest version that is known to be complete, with equal bits; then they train to the end."""
    check_history(workers)
    dead = [each for each in workers if each not in survivors]
    for each in survivors:
        recovered = check_recovered(workers, each)
        assert (recovered["members"], recovered["steps_lost"], recovered["stale"]) == (members, 0, {})
        assert committed_steps(dead) <= recovered["step"] <= VERSION
        # The dead member may have been alone in seeing the vote before pass, and be a step ahead of that.
        assert recovered["step"] >= VERSION - 2
        assert recovered["digests_mismatched"] == 0
    check_end(survivors)


def check_end(survivors):
    for each in survivors:
        assert each.events("done")[0]["step"] == each.options.steps
        assert each.events("verified")[0]["digests_mismatched"] == 0


@pytest.mark.parametrize(
    ("preset", "point", "part"),
    [
        *((preset, "chunk_sent", part) for part in (0.0, 0.5, 1.0) for preset in ("gemini", "baft")),
        *((preset, "snapshot_received", 0.0) for preset in ("baft", "gemini")),
        *((preset, "gradients_logged", 0.0) for preset in ("auto, more slots", "auto")),
    ],
)
@pytest.mark.few(4)
def test_sender_or_receiver_is_killed_in_a_copy(start_job, preset, point, part):
    """A sender at a chunk; a receiver when a version is published, or while it holds gradients."""
    name, _, has_slots = preset.partition(", ")
    job = start_job(preset=name, **SNAPSHOTS | ({"expert_slots": None} if has_slots else {}))
    workers = a, b, c = job.start_all({"b": [Fault(point, VERSION, part=part)]})
    assert [each.join() for each in workers] == [0, -9, 0]
    if point == "chunk_sent":
        chunks = b.events("chunk_sent", step=VERSION)
        assert [event["sent"] for event in chunks] == sorted({event["sent"] for event in chunks})
        assert (chunks[-1]["sent"] == chunks[-1]["total"]) == (part == 1.0)
        assert chunks[-1]["total"] > 20 * job.session["copy_buffer_bytes"]
    check_survivors(workers, [a, c], 2)
    if point == "gradients_logged":
        assert {each.events("recovered")[-1]["step"] for each in (a, c)} == {VERSION - 1}  # nobody has voted


@pytest.mark.parametrize(
    "points",
    [("chunk_sent", "snapshot_received"), ("chunk_sent", "chunk_sent"), ("snapshot_received", "snapshot_received")],
)
def test_both_ends_are_killed(start_job, points):
    """Or one of them, where it was too quick for the other."""
    job = start_job(4, replication=3, preset="gemini", **SNAPSHOTS)
    faults = {name: [Fault(point, VERSION, part=0.5)] for name, point in zip("bc", points, strict=True)}
    workers = job.start_all(faults, "abcd")
    codes = [each.join() for each in workers]
    survivors = [each for each, code in zip(workers, codes, strict=True) if code == 0]
    assert -9 in codes
    assert {workers[0], workers[3]} <= {*survivors}
    check_survivors(workers, survivors, len(survivors))


@pytest.mark.few(1)
def test_two_of_four_are_lost_in_one_recovery_of_baft(start_job):
    """Of what a worker owns, and of an expert that it trains alone, `copies=3` leaves a copy on a third node."""
    job = start_job(4, preset="baft", shard_optimizer=True, replication=3, **SNAPSHOTS, join_interval=50)
    faults = {"b": [Fault("vote", VERSION)], "c": [Fault("phase fetch", nth=2)]}
    workers = a, *_, d = job.start_all(faults, "abcd")
    assert [each.join() for each in workers] == [0, -9, -9, 0]
    check_survivors(workers, [a, d], 2)
    for each in (a, d):
        assert each.events("protection_planned")[0]["survives_two"] == 1.0
        last = each.events("recovered")[-1]
        assert (last["steps_lost"], last["lost_units"], last["stale"]) == (0, [], {})
        assert VERSION - last["step"] in (0, 1), "copies of the step before may be under way as b dies"


FEW_ROOMS = [("chunk_sent", 0.5, 1), ("snapshot_received", 0.0, 10_000), ("gradients_logged", 0.0, 5000)]


@pytest.mark.parametrize(
    ("point", "part", "log_bytes"),
    [
        pytest.param(point, part, log_bytes, marks=() if (point, part, log_bytes) in FEW_ROOMS else pytest.mark.long)
        for point, part in (
            ("chunk_sent", 0.0),
            ("chunk_sent", 0.5),
            ("chunk_sent", 1.0),
            ("snapshot_received", 0.0),
            ("gradients_logged", 0.0),
        )
        for log_bytes in (1, 5000, 10_000)
    ],
)
def test_gradients_find_no_room_in_the_log(start_job, point, part, log_bytes):
    """Units whose gradients do not fit are followed by snapshots: a recovery finds one version of both kinds."""
    job = start_job(replay_log_bytes=log_bytes, **SNAPSHOTS)
    workers = job.start_all({"b": [Fault(point, VERSION, part=part)]})
    codes = [each.join() for each in workers]
    assert codes == [0, -9 if workers[1].events("fault") else 0, 0]
    assert sum(len(each.events("chunk_sent", step=1)) for each in workers) > 0
    assert (sum(len(each.events("gradients_logged")) for each in workers) > 0) == (log_bytes > 2200)
    if codes[1]:
        check_survivors(workers, [workers[0], workers[2]], 2)


@pytest.mark.long
def test_second_death_when_copies_of_both_kinds_are_known(start_job):
    """The survey of one recovery takes nothing from the next one: it, too, can go back to the step before."""
    job = start_job(5, replication=3, replay_log_bytes=10_000, **SNAPSHOTS, min_replicas=2, join_interval=50)
    faults = {"d": [Fault("commit", VERSION)], "b": [Fault("phase verify", nth=2)]}
    workers = job.start_all(faults, "abcde", steps=12)
    assert [each.join() for each in workers] == [0, -9, 0, -9, 0]
    check_history(workers)
    for each in workers[::2]:
        recovered = check_recovered(workers, each)
        assert (recovered["members"], recovered["steps_lost"], recovered["stale"]) == (3, 0, {})
    check_end(workers[::2])


@pytest.mark.parametrize(
    "preset, point", [("gemini", "chunk_sent"), ("baft", "snapshot_received"), ("auto", "gradients_logged")]
)
def test_thread_of_a_copy_that_fails_ends_that_worker_alone(start_job, preset, point):
    job = start_job(preset=preset, **SNAPSHOTS)
    workers = a, b, c = job.start_all({"b": [Fault(point, VERSION, "raise")]})
    assert [each.join() for each in workers] == [0, 1, 0]
    assert b.events("failed")[0]["error"] == "ZeroDivisionError"
    check_survivors(workers, [a, c], 2)


def test_moetion_takes_no_torn_expert(start_job):
    """Older versions are, bit for bit, what the expert was after that step; SGD counts no steps of its own."""
    job = start_job(4, preset="moetion", expert_slots=1, rebalance_interval=0, join_interval=50)
    workers = _, b, *_ = job.start_all(
        {"b": [Fault("gradients_logged", nth=VERSION)]}, "abcd", steps=20, optimizer="sgd"
    )
    assert [each.join() for each in workers] == [0, -9, 0, 0]
    check_history(workers)
    survivors = [workers[0], *workers[2:]]
    states = {version % 2**40: units for version, units in states_by_version(workers).items()}
    for each in survivors:
        recovered = each.events("recovered")[-1]
        assert recovered["step"] == b.events("fault")[0]["at"] - 1
        copy = [e for e in each.events("copy", after="phase") if e["time"] <= recovered["time"]][-1]
        for unit, value in copy["digests"].items():
            if unit == "session":  # counts what was lost
                continue
            assert value == states[recovered["stale"].get(unit, recovered["step"])][unit], unit
    check_end(survivors)


@pytest.mark.long
def test_moetion_has_the_state_of_the_start_of_what_was_not_copied_since(start_job):
    job = start_job(
        2, preset="moetion", expert_slots=1, remote_bytes_per_step=0, rebalance_interval=0, join_interval=50
    )
    workers = a, b = job.start_all({"b": [Fault("vote", 3)]}, "ab", optimizer="sgd")
    assert [each.join() for each in workers] == [0, -9]
    check_history(workers)
    stale = a.events("recovered")[-1]["stale"]
    experts = {unit for unit in b.events("copy")[0]["digests"] if "experts" in unit}
    assert stale == dict.fromkeys(experts, 0)
    check_end([a])
