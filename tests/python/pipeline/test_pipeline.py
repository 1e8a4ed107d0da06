"""A pipeline of 2 stages with 2 data-parallel ranks each, or of 4 stages: real processes, each of which is killed."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

import evermoe
from support.disks import shrink, small_memories
from support.harness import PATIENCE, Job
from support.pipeline_worker import PEERS, STAGES, Options, Stage, batch
from support.pipelines import PRESETS, RANKS, Pipeline

STEPS, PROFILE_STEPS = 16, 4
ROUNDING = 1.0
"""Microseconds that times of a trace may be off."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Losses and final digests of a run in which nothing happens."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = Job(folder, RANKS)
    try:
        pipeline = Pipeline(job, copies=PRESETS["baft"])
        for rank in range(RANKS):
            pipeline.start(rank)
        done = pipeline.finish()
        return pipeline.losses(), [each["digests"] for each in done]
    finally:
        job.close()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.long
def test_each_rank_dies_in_a_step_and_its_successor_in_a_copy(start_job, uninterrupted, preset):
    losses, digests = uninterrupted
    pipeline = Pipeline(start_job(RANKS), copies=PRESETS[preset])
    deaths = [(1 + 3 * rank, 3 + 3 * rank) for rank in range(RANKS)]
    first = [pipeline.start(rank, kill_in_step=in_step) for rank, (in_step, _) in enumerate(deaths)]
    second, third = [], []
    for rank, (_, in_copy) in enumerate(deaths):
        pipeline.lose(first[rank])
        second.append(pipeline.start(rank, kill_in_copy=in_copy))
        pipeline.lose(second[rank])
        third.append(pipeline.start(rank))
    done = pipeline.finish()

    history = [0]
    for (in_step, in_copy), each in zip(deaths, third, strict=True):
        again = each.events("recovered")[0]["step"]
        assert again in (in_copy - 1, in_copy)  # the vote had passed where it died; survivors may know of it, too
        history += [in_step, again]
    for rank in range(RANKS):
        lives = history[: 1 + 2 * rank], history[1 + 2 * rank :][:1], history[2 + 2 * rank :]
        for each, steps in zip((first[rank], second[rank], third[rank]), lives, strict=True):
            assert [event["step"] for event in each.events("recovered")] == steps
        for newcomer in (second[rank], third[rank]):
            assert newcomer.events("recovered")[0]["fetched_units"] == len(done[rank]["digests"])

    found = pipeline.losses()
    unsaid = {key for key in losses if key[1] in [in_copy for _, in_copy in deaths]}  # taken by dying or in recover()
    assert losses.keys() - unsaid <= found.keys() <= losses.keys()
    for key, values in found.items():
        assert values == pytest.approx(losses[key] * len(values), abs=1e-6)
    for each, expected in zip(done, digests, strict=True):
        assert each["different"] == []
        assert each["digests"] == expected
    assert done[0]["compared"] == 4 * STAGES * len(digests[0])  # both peers' and two copies
    for stage in range(STAGES):
        assert done[stage * PEERS]["digests"] == done[stage * PEERS + 1]["digests"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_whole_stage_is_lost(start_job, uninterrupted, preset):
    """Nobody trains its units any more: their copies at the other stage are all that is left of them."""
    _, digests = uninterrupted
    pipeline = Pipeline(start_job(RANKS), copies=PRESETS[preset])
    deaths = [1 if rank < PEERS else 8 for rank in range(RANKS)]
    started = [
        pipeline.start(rank, kill_with=rank ^ 1, **({"kill_in_copy": step} if rank < PEERS else {"kill_in_step": step}))
        for rank, step in enumerate(deaths)
    ]
    newcomers = []
    for stage in range(STAGES):
        victims = [stage * PEERS + peer for peer in range(PEERS)]
        for rank in victims:
            pipeline.lose(started[rank])
        newcomers += [pipeline.start(rank) for rank in victims]
    pipeline.finish_as(uninterrupted)
    for each, step in zip(newcomers, deaths, strict=True):
        recovered = each.events("recovered")[0]
        assert recovered["step"] in (step - 1, step)  # the previous one if the newest one's copies were being sent
        assert recovered["sources"] == {"local memory": 0, "peer": len(digests[0])}


def test_without_copies_a_lost_rank_is_served_by_its_data_parallel_peer(start_job):
    """All units of its newcomer can only have come from this peer."""
    pipeline = Pipeline(start_job(RANKS), copies=PRESETS["moetion"] | {"replication": 2}, steps=5)
    started = [pipeline.start(rank, kill_in_step=2 if rank == RANKS - 1 else None) for rank in range(RANKS)]
    pipeline.lose(started[-1])
    newcomer = pipeline.start(RANKS - 1)
    done = pipeline.finish()
    assert [each["sent_bytes"] for each in done] == [0] * RANKS, "there are no copies"
    recovered = newcomer.events("recovered")[0]
    assert recovered["step"] == 2
    assert recovered["sources"] == {"local memory": 0, "peer": len(done[0]["digests"])}
    assert done[-1]["digests"] == done[-2]["digests"]
    assert [each["different"] for each in done] == [[]] * RANKS


@pytest.mark.long
def test_a_node_with_two_stages_is_lost(start_job):
    """Its stages' copies are on the other node, one on each rank, although one had its predecessor on its node."""
    pipeline = Pipeline(start_job(RANKS), ranks_per_node=2, stages=RANKS, peers=1, steps=40, copies=PRESETS["baft"])
    started = [pipeline.start(rank) for rank in range(RANKS)]
    died_after = started[3].wait_for("step", step=5)["step"]
    for each in started[2:]:
        each.process.kill()
    for each in started[2:]:
        each.process.join(PATIENCE)
    shutil.rmtree(pipeline.job.node_memory("n1"))
    newcomers = [pipeline.start(rank) for rank in (2, 3)]
    done = pipeline.finish()
    for each in newcomers:
        recovered = each.events("recovered")[0]
        assert recovered["step"] >= died_after - 1
        assert recovered["sources"] == {"local memory": 0, "peer": len(done[0]["digests"])}
    assert [each["different"] for each in done] == [[]] * RANKS


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.long
def test_memory_without_room_for_old_and_new_copies_does_not_end_the_job(start_job, small_disk, uninterrupted, preset):
    pipeline = Pipeline(start_job(RANKS), copies=PRESETS[preset] | {"memory_dir": str(small_disk)})
    with small_memories(pipeline.job, small_disk, ["n0", "n1", "n2", "n3"]) as nodes:
        started = [pipeline.start(rank) for rank in range(RANKS)]
        for each in started:
            each.wait_for("step", step=3)
        for node in nodes:
            shrink(node, 1.1)
        started[1].process.kill()
        started[1].process.join(PATIENCE)
        pipeline.start(1)
        pipeline.finish_as(uninterrupted)
    for each in pipeline.ranks[:1] + pipeline.ranks[2:]:
        assert "Earlier copies are removed" in each.log()
        assert "fewer copies" not in each.log()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.long
def test_a_newcomer_without_room_for_copies_keeps_none(start_job, small_disk, uninterrupted, preset):
    """It neither has its own copied nor keeps those of others; and the next death costs no more than that."""
    copies = PRESETS[preset] | {"memory_dir": str(small_disk), "profile_steps": 2}
    pipeline = Pipeline(start_job(RANKS), copies=copies)
    with small_memories(pipeline.job, small_disk, ["n0", "n1", "n2", "n3", "tiny"]) as nodes:
        subprocess.run(["mount", "-o", "remount,size=64k", nodes[-1]], check=True)
        started = [pipeline.start(rank, kill_in_step={3: 3, 1: 8}.get(rank)) for rank in range(RANKS)]
        started[3].process.join(PATIENCE)
        tiny = pipeline.start(3, copies=copies | {"node": "tiny"})
        started[1].process.join(PATIENCE)
        newcomer = pipeline.start(1)
        pipeline.finish_as(uninterrupted)
    assert "are kept with fewer copies" in tiny.log()
    assert [each["step"] for each in newcomer.events("recovered")] == [8]
    assert all(each.events("done")[0]["different"] == [] for each in (started[0], started[2], tiny, newcomer))


def test_memory_that_is_too_small_at_the_start_is_said_at_once(start_job, small_disk):
    pipeline = Pipeline(start_job(RANKS), copies=PRESETS["baft"] | {"memory_dir": str(small_disk)})
    with small_memories(pipeline.job, small_disk, ["n0", "n1", "n2", "n3"]) as nodes:
        for node in nodes:
            subprocess.run(["mount", "-o", "remount,size=64k", node], check=True)
        for rank in range(RANKS):
            pipeline.start(rank)
        assert [each.join() for each in pipeline.ranks] == [1] * RANKS
    assert any("No space left" in each.log() and "OSError" in each.log() for each in pipeline.ranks)


def test_all_processes_die_and_their_nodes_live(start_job, uninterrupted):
    losses, digests = uninterrupted
    pipeline = Pipeline(start_job(RANKS), copies=PRESETS["moetion"] | {"replication": 2})
    for rank in range(RANKS):
        pipeline.start(rank, kill_in_step=6 if rank == 0 else None)
    for each in pipeline.ranks[1:]:
        each.wait_for("connection_lost")
        each.process.kill()
    for each in pipeline.ranks:
        each.process.join(PATIENCE)
    assert [each.process.exitcode for each in pipeline.ranks] == [-9] * RANKS
    for rank in range(RANKS):
        pipeline.start(rank)
    done = pipeline.finish()
    assert {each.events("recovered")[0]["step"] for each in pipeline.ranks[RANKS:]} in ({5}, {6})
    assert all(set(values) == set(losses[key]) for key, values in pipeline.losses().items())
    assert [each["digests"] for each in done] == digests


def losses_alone(chunks):
    """By step, the mean loss when one process trains all of the model."""
    options = Options("", "", "", 0)
    model = torch.nn.Sequential(*(Stage(number, options.width, 0) for number in range(STAGES * chunks)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    found = {}
    for step in range(options.steps):
        optimizer.zero_grad()
        inputs, target = torch.cat([batch(step, peer, options.width) for peer in range(PEERS)], 1)
        loss = torch.nn.functional.mse_loss(model(inputs), target)
        loss.backward()
        found[step + 1] = float(loss.detach())
        optimizer.step()
    return found


@pytest.mark.long
def test_ranks_with_several_virtual_stages(start_job):
    """Interleaved 1F1B: a rank that dies takes two stages of the model with it."""
    pipeline = Pipeline(start_job(RANKS), copies=PRESETS["baft"], chunks=2)
    started = [pipeline.start(rank, kill_in_step=4 if rank == 2 else None) for rank in range(RANKS)]
    pipeline.lose(started[2])
    newcomer = pipeline.start(2)
    done = pipeline.finish()
    assert newcomer.events("recovered")[0]["fetched_units"] == len(done[2]["digests"])
    for each in done:
        assert each["different"] == []
        assert {name.split(".")[1] for name in each["digests"] if not name.endswith("_loop")} == {"0", "1"}
    expected = losses_alone(chunks=2)
    found = pipeline.losses()
    assert {step for _, step in found} == expected.keys()
    for (_, step), values in found.items():
        assert len(set(values)) == 1
        assert values[0] == pytest.approx(expected[step], rel=1e-3)


POINTS = ["recovered", "here", "default group", "peers", "all groups", "connected"]
"""On the way to torch's groups."""


@pytest.mark.parametrize(("victim", "points"), [(0, POINTS[::2]), (RANKS - 1, POINTS[1::2])])
@pytest.mark.long
def test_a_rank_dies_while_torch_connects(start_job, uninterrupted, victim, points):
    """At these points, one after the other. Nobody waits for it until some limit is over."""
    pipeline = Pipeline(start_job(RANKS), copies=PRESETS["baft"] | {"hang_timeout": 2 * PATIENCE})
    for rank in range(RANKS):
        pipeline.start(rank, kill_at=points[0] if rank == victim else None)
    last = pipeline.ranks[victim]
    for point in [*points[1:], None]:
        pipeline.lose(last)
        last = pipeline.start(victim, kill_at=point)
    pipeline.finish_as(uninterrupted)


def test_a_rank_dies_while_gloo_connects(start_job, uninterrupted):
    """Those that gloo lets wait for it do so until the limit is over."""
    pipeline = Pipeline(start_job(RANKS), copies=PRESETS["baft"] | {"hang_timeout": 2.0})
    for rank in range(RANKS):
        pipeline.start(rank, kill_at="address is known" if rank == 1 else None)
    pipeline.lose(pipeline.ranks[1])
    pipeline.start(1)
    pipeline.finish_as(uninterrupted)


@pytest.mark.parametrize(("victim", "point"), [(0, "here"), (1, "peers"), (2, "step")])
@pytest.mark.long
def test_a_rank_hangs(start_job, uninterrupted, victim, point):
    """While torch connects its groups, or in a step: the others notice it at the limit, and it comes back later.

    With rank 0 the store hangs in which the others look for each other.
    """
    pipeline = Pipeline(start_job(RANKS), copies=PRESETS["baft"] | {"hang_timeout": 2.0})
    ranks = [pipeline.start(rank, stop_at=point if rank == victim else None) for rank in range(RANKS)]
    ranks[victim].wait_until_stopped()
    for each in ranks:
        if each is not ranks[victim]:
            each.wait_for("connection_lost")
    ranks[victim].signal(signal.SIGCONT)
    pipeline.finish_as(uninterrupted)


def test_nobody_waits_for_a_stopped_process_as_long_as_for_one_that_hangs(start_job, uninterrupted):
    """It answers no longer, so that waits in torch's groups end long before the limit of those that answer."""
    pipeline = Pipeline(start_job(RANKS), copies=PRESETS["baft"] | {"hang_timeout": 2 * PATIENCE})
    ranks = [pipeline.start(rank, stop_at="step" if rank == 2 else None) for rank in range(RANKS)]
    ranks[2].wait_until_stopped()
    for each in (ranks[0], ranks[1], ranks[3]):
        each.wait_for("connection_lost")
    ranks[2].signal(signal.SIGKILL)
    pipeline.lose(ranks[2])
    pipeline.start(2)
    pipeline.finish_as(uninterrupted)


def read_traces(folder):
    """By rank: copies, and windows of the network; microseconds of one clock."""
    found = []
    for rank in range(RANKS):
        events = json.loads((Path(folder) / f"{rank}.json").read_text())["traceEvents"]
        tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        spans = [e for e in events if e["ph"] == "X"]
        windows = [e for e in spans if e["cat"] == "window" and tracks[e["tid"]].startswith("network")]
        found.append(([e for e in spans if e["cat"] == "copy"], windows))
    return found


def is_within(copy, window):
    return window["ts"] - ROUNDING <= copy["ts"] and ends(copy) <= ends(window) + ROUNDING


def ends(event):
    return event["ts"] + event["dur"]


def check_bubbles(summary):
    """They are about as long as 1F1B would have them.

    A busy machine makes the difference: ranks that wait for a processor do not wait for each other.
    """
    found = re.search(r"; ([\d.]+) s of bubbles in a step, ([\d.]+) s by \(p - 1\) \* \(t_f \+ t_b\) of 1F1B", summary)
    assert found, summary
    measured, expected = map(float, found.groups())
    assert measured > 0
    assert expected > 0
    assert 0.1 < measured / expected < 300, "another unit"


@pytest.mark.parametrize("preset", PRESETS)
def test_copies_travel_in_bubbles(start_job, preset):
    """Each that was sent in a window begins in it, to the microsecond.

    How many are, and are over in time, at both ends, is for the machine to decide: steps may differ from the profile.
    """
    copies = PRESETS[preset] | {"profile_steps": PROFILE_STEPS, "copy_buffer_bytes": 1 << 16}
    pipeline = Pipeline(start_job(RANKS), copies=copies, trace=True, steps=STEPS, work=4, width=384)
    for rank in range(RANKS):
        pipeline.start(rank)
    for each in pipeline.finish():
        assert each["different"] == []
    (summary,) = {each.events("step")[-1]["summary"] for each in pipeline.ranks}
    check_bubbles(summary)
    counts = {each.events("step")[-1]["plans"] for each in pipeline.ranks}
    assert len(counts) == 1  # by all at the same step
    assert counts != {0}
    traces = read_traces(pipeline.job.folder)
    in_windows, in_time, at_both_ends = [], [], []
    for copies, windows in traces:
        assert copies
        for copy in (copy for copy in copies if copy["args"]["window"] is not None):
            number = copy["args"]["window"]
            own = [w for w in windows if w["args"]["number"] == number and w["ts"] <= copy["ts"] + ROUNDING][-1]
            assert copy["ts"] <= ends(own) + ROUNDING
            in_windows.append(copy)
            in_time += [copy] * is_within(copy, own)
            theirs = traces[copy["args"]["destination"]][1]
            at_both_ends += [copy] * any(is_within(copy, window) for window in theirs)
    assert in_windows
    assert in_time
    assert at_both_ends or preset != "baft"


def test_gradient_that_is_infinite_stops_all_ranks(start_job):
    pipeline = Pipeline(start_job(RANKS))
    for rank in range(RANKS):
        pipeline.start(rank, poison=3 if rank == 1 else None)
    for each in pipeline.ranks:
        assert each.join() == 1
        assert "NonFiniteLoss: step 3: the loss or a gradient is infinite or not a number, from rank 1" in each.log()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"preset": "gemini"}, "preset of a pipeline to be one of baft, moetion, .* got 'gemini'"),
        ({"preset": evermoe.presets.Baft()}, r"an evermoe.presets.PipelineBaft or PipelineMoetion, got Baft\("),
        ({"stages": 1}, "stages to be a whole number, >= 2, got 1"),
        ({"stage": 2}, "stage < 2, the number of stages, got 2"),
        ({"data_parallel": 2}, "data_parallel < 2, got 2"),
        ({"membership": None}, "expected membership.lighthouse .* to be its address, got None"),
        (
            {"membership": evermoe.Membership(lighthouse="http://localhost:1", job="x", role="spare")},
            "expected role .* to be train, got spare",
        ),
        (
            {"preset": evermoe.presets.PipelineMoetion(expert_selection="budget")},
            "expected expert_parallel=True, got False",
        ),
        ({"expert_parallel": 2}, "expected expert_parallel to be .* got 2"),
        (
            {
                "preset": evermoe.presets.PipelineBaft(sparse=True, snapshot_interval=2),
                "expert_parallel": evermoe.Placement(),
            },
            "sparse=True .* expected expert_parallel with rebalance_interval=0, got 100",
        ),
    ],
)
def test_arguments_out_of_range_are_named(wrong, words):
    module = torch.nn.Linear(2, 2)
    fine = {
        "stage": 0,
        "stages": 2,
        "data_parallel": 0,
        "data_parallel_size": 2,
        "membership": evermoe.Membership(lighthouse="http://localhost:1", job="x"),
    }
    with pytest.raises(ValueError, match=words):
        evermoe.PipelineSession(
            module, torch.optim.SGD(module.parameters(), lr=1.0), lambda session: None, **fine | wrong
        )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"profile_steps": -1}, "^expected profile_steps to be a whole number, >= 0, got -1"),
        ({"expert_selection": "sequential"}, "expert_selection to be one of budget, all or None, got 'sequential'"),
        ({"expert_selection": "budget", "sparse": True}, 'expert_selection="budget" .* expected sparse=False, got'),
        ({"snapshot_interval": 1, "sparse": True}, "sparse=True: expected snapshot_interval of 2 or more, .* got 1"),
        ({"replay": True, "sparse": True}, "replay=True .* expected sparse=False, got sparse=True"),
        ({"replay": True, "snapshot_interval": 2}, "expected snapshot_interval of 1 or None, got 2"),
    ],
)
def test_options_of_a_preset_that_do_not_fit_are_named(wrong, words):
    with pytest.raises(ValueError, match=words):
        evermoe.presets.PipelineMoetion(**wrong)
