"""Sparse versions in real processes: a slice in each step, and a lost stage that becomes dense by computing again."""

from __future__ import annotations

import re
import signal

import pytest
import torch

import evermoe
from evermoe._native import Arena
from evermoe.copies.snapshot.slices import MAX_SLICES
from evermoe.state.version import step_of
from support.flips import BIT
from support.harness import PATIENCE, wait_until
from support.pipeline_worker import MICROBATCHES
from support.pipelines import BORDER_BYTES, RANKS, Pipeline, has_voted, run_undisturbed

STEPS, SLICES = 15, 3
DEEP = {"stages": 4, "peers": 1}
COMMON = {"attempts": "means", "dropout": 0.1, "steps": STEPS, "rate": 1e-3, "schedules_rate": True}
DENSE = {"preset": "baft", "max_grad_norm": 0.5}
SPARSE = DENSE | {"sparse": True, "snapshot_interval": SLICES}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """By rank, the end of a run of four stages in which nothing happens, with versions that are not sparse."""
    folder = tmp_path_factory.mktemp("deep")
    return run_undisturbed(folder, **COMMON, **DEEP, copies=DENSE)[0]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The same of two stages of two ranks each, with sparse versions: their units are not cut, and so compare."""
    return run_undisturbed(tmp_path_factory.mktemp("wide"), **COMMON, copies=SPARSE)[0]


def recovered_at(worker):
    return [event["step"] for event in worker.events("recovered")]


def check(done, expected):
    """The end of a run is that of an undisturbed one, to the bit."""
    assert [each["digests"] for each in done] == [each["digests"] for each in expected]
    assert [each["different"] for each in done] == [[]] * RANKS
    assert [each["rate"] for each in done] == [pytest.approx(1e-3 * 0.8**STEPS)] * RANKS


def forwards(steps):
    return MICROBATCHES * steps


@pytest.mark.parametrize(
    ("slices", "step", "begun"),
    [(3, 8, {4}), (3, 2, {0}), (3, 7, {4}), (3, 9, {4, 7}), (7, 10, {1})],
    ids=[
        "within a window",
        "before there is one",
        "one is complete",
        "before the last slice",
        "more slices than units",
    ],
)
def test_a_lost_stage_is_made_dense_by_replay(start_job, deep, slices, step, begun):
    """No other rank has the stage's state. The others compute nothing again: they send what they have logged."""
    pipeline = Pipeline(start_job(RANKS), **COMMON, **DEEP, copies=SPARSE | {"snapshot_interval": slices})
    started = [pipeline.start(rank, kill_in_step=step if rank == 1 else None) for rank in range(RANKS)]
    pipeline.lose(started[1])
    newcomer = pipeline.start(1)
    done = pipeline.finish()
    check(done, deep)
    (again,) = recovered_at(newcomer)
    assert again in begun
    assert {each["forwards"] for rank, each in enumerate(done) if rank != 1} == {forwards(STEPS)}
    assert done[1]["forwards"] == forwards(STEPS - again)


@pytest.mark.long
def test_slices_are_as_many_as_the_bubbles_need(start_job, tmp_path):
    """Ranks meet once for it and lose nothing, compute nothing again; then a stage is lost, and comes from a window."""
    small = {"profile_steps": 4, "copy_buffer_bytes": 1 << 9}
    common = COMMON | DEEP | {"steps": 24, "width": 128}
    expected, _ = run_undisturbed(tmp_path, **common, copies=DENSE)
    pipeline = Pipeline(start_job(RANKS), **common, copies=DENSE | small | {"sparse": True})
    started = [pipeline.start(rank, kill_in_step=18 if rank == 1 else None) for rank in range(RANKS)]
    pipeline.lose(started[1])
    newcomer = pipeline.start(1)
    done = pipeline.finish()
    assert [each["digests"] for each in done] == [each["digests"] for each in expected]
    assert [each["different"] for each in done] == [[]] * RANKS
    lost = started[0].events("connection_lost")
    summaries = [event["summary"] for event in started[0].events("step")]
    cut = {int(found[1]) for each in summaries if (found := re.match(r"of (\d) slices", each))}
    assert len(cut) == 1
    assert cut <= {*range(2, MAX_SLICES + 1)}
    again = recovered_at(newcomer)[0]
    assert 18 - 2 * MAX_SLICES <= again < 18
    assert len(lost) == len(recovered_at(started[0])) - 1 >= 2
    assert {each["forwards"] for rank, each in enumerate(done) if rank != 1} == {forwards(24)}
    assert done[1]["forwards"] == forwards(24 - again)


@pytest.mark.long
def test_losses_of_several_stages_while_others_replay(start_job, deep):
    """The newcomer dies within the replay; and another stage once there are windows again."""
    pipeline = Pipeline(start_job(RANKS), **COMMON, **DEEP, copies=SPARSE)
    plans = {1: {"kill_in_step": 8}, 3: {"kill_in_step": 12}}
    started = [pipeline.start(rank, **plans.get(rank, {})) for rank in range(RANKS)]
    pipeline.lose(started[1])
    second = pipeline.start(1, kill_in_step=6)  # has two of three slices
    pipeline.lose(second)
    third = pipeline.start(1)
    pipeline.lose(started[3])
    last = pipeline.start(3)
    done = pipeline.finish()
    check(done, deep)
    assert recovered_at(started[0]) == [0, 4, 4, 8]
    assert recovered_at(second) == [4]
    assert recovered_at(third) == [4, 8]
    assert recovered_at(last) == [8]
    assert [each["forwards"] for each in done] == [
        forwards(STEPS),
        forwards(STEPS - 4),
        forwards(STEPS),
        forwards(STEPS - 8),
    ]


@pytest.mark.long
def test_a_stage_that_replays_begins_anew_when_another_one_is_lost(start_job, deep):
    """Two stages have only slices when one of them is lost again: the other loads its own again, and does not count as
    complete.
    """
    pipeline = Pipeline(start_job(RANKS), **COMMON, **DEEP, copies=SPARSE)
    started = [pipeline.start(rank, kill_in_step=8 if rank in (1, 3) else None) for rank in range(RANKS)]
    pipeline.lose(started[1])
    started[3].process.kill()  # if it has not come as far
    pipeline.lose(started[3])
    second = {rank: pipeline.start(rank, kill_in_step=5 if rank == 1 else None) for rank in (1, 3)}
    pipeline.lose(second[1])
    pipeline.start(1)
    done = pipeline.finish()
    check(done, deep)
    assert recovered_at(started[0]) == recovered_at(started[2]) == [0, 4, 4]
    assert recovered_at(second[3]) == [4, 4]
    assert "all ranks compute the step again" not in "".join(each.log() for each in (started[0], started[2], second[3]))
    assert [done[rank]["forwards"] for rank in (0, 2)] == [forwards(STEPS)] * 2


@pytest.mark.parametrize(("step", "again"), [(13, 13), (5, 4)], ids=["complete", "in the middle of a replay"])
@pytest.mark.long
def test_both_ranks_of_a_stage_are_lost_and_then_one_of_them(start_job, wide, step, again):
    """One alone has a peer with all of the state: then nothing is replayed. But one that has two of three slices does
    not count as complete: then both load all of them again.
    """
    pipeline = Pipeline(start_job(RANKS), **COMMON, copies=SPARSE)
    plans = {rank: {"kill_in_step": 8, "kill_with": rank ^ 1} for rank in (2, 3)}
    started = [pipeline.start(rank, **plans.get(rank, {})) for rank in range(RANKS)]
    for each in started[2:]:
        pipeline.lose(each)
    second = [pipeline.start(rank, kill_in_step=step if rank == 3 else None) for rank in (2, 3)]
    pipeline.lose(second[1])
    last = pipeline.start(3)
    done = pipeline.finish()
    check(done, wide)
    assert recovered_at(started[0]) == recovered_at(started[1]) == [0, 4, again]
    assert recovered_at(second[0]) == [4, again]
    assert recovered_at(last) == [again]
    assert [each["forwards"] for each in done[:2]] == [forwards(STEPS)] * 2
    assert again == 4 or done[2]["forwards"] == forwards(STEPS - 4), "the peer computes nothing again"


def damage_windows(folder, stage):
    """Flips a bit of all that a node keeps of the windows of a stage, but not of what its copies began with."""
    damaged = 0
    for path in sorted(folder.glob("*.arena")):
        arena = Arena.open(str(path))
        for index in (index for index, version in arena.versions() if step_of(version)):
            for name, offset, nbytes in arena.units():
                if name.startswith(f"stage{stage}."):
                    arena.buffer(index)[offset + nbytes // 2] ^= BIT
                    damaged += 1
    return damaged


@pytest.mark.long
def test_where_a_window_is_damaged_all_go_back_to_older_whole_copies(start_job, deep):
    """The first window is complete, and the previous copies still exist, when a stage is lost."""
    pipeline = Pipeline(start_job(RANKS), **COMMON, **DEEP, copies=SPARSE)
    started = [pipeline.start(rank, stop_at=f"vote {SLICES}" if rank == 1 else None) for rank in range(RANKS)]
    started[1].wait_for("stops")
    for each in started:
        wait_until(lambda each=each: has_voted(each, SLICES), f"{each.name} has its copies")
    assert damage_windows(pipeline.job.node_memory("n0"), 1)
    started[1].signal(signal.SIGKILL)
    pipeline.lose(started[1])
    newcomer = pipeline.start(1)
    done = pipeline.finish()
    check(done, deep)
    assert recovered_at(started[0]) == [0, 0]
    assert recovered_at(newcomer) == [0]


@pytest.mark.long
def test_a_window_that_was_fetched_outlives_its_holder_before_there_are_new_copies(start_job, deep):
    """The rank that keeps a lost stage's copies is lost as well, once the newcomer has fetched them."""
    pipeline = Pipeline(start_job(RANKS), **COMMON, **DEEP, copies=SPARSE)
    plans = {0: {"kill_at": "protect 4"}, 1: {"kill_in_step": 8}}
    started = [pipeline.start(rank, **plans.get(rank, {})) for rank in range(RANKS)]
    pipeline.lose(started[1])
    second = pipeline.start(1)
    pipeline.lose(started[0])
    last = pipeline.start(0)
    done = pipeline.finish()
    check(done, deep)
    said = [event["said"] for event in second.events("protocol")]
    assert [step_of(each["version"]) for each in said if each.get("event") == "restored"] == [4, 4], "in one recovery"
    assert recovered_at(second) == recovered_at(last) == [4]
    assert second.events("recovered")[0]["sources"]["peer"] == 0
    assert recovered_at(started[2]) == [0, 4]


@pytest.mark.long
def test_two_stages_are_lost_at_once(start_job, deep):
    """Neither has a log; each gets from its neighbours what these have sent, and from the other what that computes."""
    pipeline = Pipeline(start_job(RANKS), **COMMON, **DEEP, copies=SPARSE)
    started = [pipeline.start(rank, kill_in_step=8 if rank in (1, 3) else None) for rank in range(RANKS)]
    pipeline.lose(started[1])
    started[3].process.kill()  # if it has not come as far
    pipeline.lose(started[3])
    for rank in (1, 3):
        pipeline.start(rank)
    done = pipeline.finish()
    check(done, deep)
    assert recovered_at(started[0]) == [0, 4]
    assert [each["forwards"] for each in done] == [forwards(STEPS), forwards(STEPS - 4)] * 2


@pytest.mark.long
def test_other_data_than_before_makes_all_stages_replay(start_job, deep):
    """A newcomer whose inputs are others than before: all load their slices, and compute again. It is lost in that
    replay, and the next one has the same as at first: all begin once more, and end like a run without failures.
    """
    pipeline = Pipeline(start_job(RANKS), **COMMON, **DEEP, copies=SPARSE)
    started = [pipeline.start(rank, kill_in_step=8 if rank == 0 else None) for rank in range(RANKS)]
    pipeline.lose(started[0])
    second = pipeline.start(0, noise=1.0, kill_in_step=5)
    pipeline.lose(second)
    pipeline.start(0)
    done = pipeline.finish()
    check(done, deep)
    assert [recovered_at(each) for each in started[1:]] == [[0, 4, 4, 4]] * 3
    assert all(each.log().count("all ranks compute the step again") == 1 for each in started[1:])


@pytest.mark.parametrize("schedule", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
@pytest.mark.long
def test_stages_of_several_parts_are_lost(start_job, tmp_path, schedule):
    options = COMMON | {"schedule": schedule, "chunks": 2, "copies": SPARSE}
    expected, _ = run_undisturbed(tmp_path, **options)
    pipeline = Pipeline(start_job(RANKS), **options)
    plans = {rank: {"kill_in_step": 8, "kill_with": rank ^ 1} for rank in (0, 1)}
    started = [pipeline.start(rank, **plans.get(rank, {})) for rank in range(RANKS)]
    for each in started[:2]:
        pipeline.lose(each)
    for rank in (0, 1):
        pipeline.start(rank)
    done = pipeline.finish()
    check(done, expected)
    assert recovered_at(started[2]) == [0, 4]
    assert [each["forwards"] for each in done] == [2 * forwards(STEPS - 4)] * 2 + [2 * forwards(STEPS)] * 2


@pytest.mark.parametrize(("preset", "lost"), [("moetion", 3), ("baft", 1)])
@pytest.mark.long
def test_a_rank_that_has_experts_alone_is_lost(start_job, tmp_path, preset, lost):
    """Its peer goes back with it, as tokens travel between them; the other stage computes nothing again.

    Units of many sizes are fetched: all ranks must plan that in the same order.
    """
    options = COMMON | {"experts": 5, "copies": SPARSE | {"preset": preset, "replication": 2, "expert_parallel": True}}
    expected, _ = run_undisturbed(tmp_path, **options)
    pipeline = Pipeline(start_job(RANKS), **options)
    started = [pipeline.start(rank, kill_in_step=8 if rank == lost else None) for rank in range(RANKS)]
    pipeline.lose(started[lost])
    pipeline.start(lost)
    done = pipeline.finish()
    check(done, expected)
    other = [each for rank, each in enumerate(done) if rank // 2 != lost // 2]
    assert recovered_at(started[lost - 1]) == [0, 4]
    assert [each["forwards"] for each in other] == [forwards(STEPS)] * 2
    assert done[lost - 1]["forwards"] > forwards(STEPS)


@pytest.mark.long
def test_all_processes_die_and_their_nodes_live(start_job, deep):
    """Then nobody has a log: all stages load their slices, and compute all steps since."""
    pipeline = Pipeline(start_job(RANKS), **COMMON, **DEEP, copies=SPARSE)
    for rank in range(RANKS):
        pipeline.start(rank, kill_in_step=8 if rank == 0 else None)
    for each in pipeline.ranks[1:]:
        each.wait_for("connection_lost")
        each.process.kill()
    for each in pipeline.ranks:
        each.process.join(PATIENCE)
    for rank in range(RANKS):
        pipeline.start(rank)
    done = pipeline.finish()
    check(done, deep)
    assert [recovered_at(each) for each in pipeline.ranks[RANKS:]] == [[4]] * RANKS
    assert [each["forwards"] for each in done] == [forwards(STEPS - 4)] * RANKS


def test_a_step_captures_a_slice_and_the_weights_of_those_to_come(start_job, deep):
    pipeline = Pipeline(start_job(RANKS), **COMMON, **DEEP, copies=SPARSE | {"profile_steps": 4})
    for rank in range(RANKS):
        pipeline.start(rank)
    done = pipeline.finish()
    check(done, deep)
    for rank, each in enumerate(pipeline.ranks):
        events = each.events("step")
        sent = {event["step"]: event["total"] for event in each.events("chunk_sent")}
        captured = [sent[step] for step in range(1, STEPS + 1)]
        state, weights = done[rank]["state_bytes"], done[rank]["state_bytes"] / 3
        assert captured[:SLICES] * (STEPS // SLICES) == captured, "the same in each window"
        assert sum(captured[:SLICES]) >= state
        assert max(captured) < weights + 2 * weights / SLICES + 0.1 * state
        assert max(event["logged"] for event in events) <= 2 * SLICES * 2 * BORDER_BYTES
        assert "of 3 slices, each as a version in a step, the largest: a version takes 1 step" in events[-1]["summary"]


def test_sparse_versions_need_the_log():
    module = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="sparse=True needs localised=True: a slice is of another step"):
        evermoe.PipelineSession(
            module,
            torch.optim.SGD(module.parameters()),
            lambda session: None,
            stage=0,
            stages=2,
            preset=evermoe.presets.PipelineBaft(sparse=True),
            localised=False,
            membership=evermoe.Membership(lighthouse="http://localhost:1", job="x"),
        )
