"""A pipeline's copies in real processes: versions of several steps, equal shares, one fetch for the ranks of a node."""

from __future__ import annotations

import re
import shutil

import pytest

from support.harness import PATIENCE
from support.pipeline_worker import MICROBATCHES
from support.pipelines import BORDER_BYTES, PRESETS, RANKS, Pipeline, run_undisturbed


def begun(rank):
    """Steps taken in the versions that a rank has copied, in the order in which they began."""
    return list(dict.fromkeys(event["copied"] for event in rank.events("step")))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_loss_undoes_the_steps_since_the_newest_whole_version(start_job, preset):
    steps, copies = 14, PRESETS[preset] | {"snapshot_interval": 3}
    pipeline = Pipeline(start_job(RANKS), copies=copies, attempts="means", steps=steps)
    plans = {rank: {"kill_in_step": 8, "kill_with": rank ^ 1} for rank in (2, 3)}
    started = [pipeline.start(rank, **plans.get(rank, {})) for rank in range(RANKS)]
    for each in started[RANKS // 2 :]:
        pipeline.lose(each)
        pipeline.start(each.options.rank)
    done = pipeline.finish()
    again = started[0].events("recovered")[-1]["step"]
    assert again in (4, 7)
    assert {each.events("recovered")[-1]["steps_undone"] for each in started[:2]} == {8 - again}
    assert begun(started[0])[:3] == [1, 4, 7]
    assert [each["different"] for each in done] == [[]] * RANKS
    losses = pipeline.losses()
    assert all(len(set(values)) == 1 for values in losses.values())  # those that were repeated, too
    survivors = done[: RANKS // 2]
    assert all(each["resent"] > 0 and each["computed"] == each["forwards"] for each in survivors)
    assert {each["forwards"] for each in survivors} == {MICROBATCHES * steps}, "nothing is computed again"
    for each in pipeline.ranks:
        logged = max(event["logged"] for event in each.events("step"))
        assert 3 * BORDER_BYTES <= logged <= 2 * 3 * BORDER_BYTES, "of the steps of a version, and of the next one"


@pytest.mark.long
def test_a_stage_whose_state_is_set_aside_is_lost_with_it(start_job, tmp_path):
    """While the newcomers of a stage compute steps again, the other stage has older bytes in place of its state.

    When one of the newcomers is lost then, these do not count as the state that its peer has reached.
    """
    common = {"attempts": "means", "steps": 14, "copies": PRESETS["baft"] | {"snapshot_interval": 3}}
    expected, _ = run_undisturbed(tmp_path, **common)
    pipeline = Pipeline(start_job(RANKS), **common)
    lost = {2: {"kill_in_copy": 6, "kill_with": 3}, 3: {"kill_in_copy": 6, "kill_with": 2}}
    started = [pipeline.start(rank, **lost.get(rank, {})) for rank in range(RANKS)]
    for each in started[2:]:
        pipeline.lose(each)
    newcomers = [pipeline.start(2), pipeline.start(3, kill_in_step=6)]
    pipeline.lose(newcomers[1])
    third = pipeline.start(3, kill_at="connected")
    third.process.join(PATIENCE)  # its node lives
    for each in started[:2]:
        each.process.kill()
    for each in started[:2]:
        pipeline.lose(each)
    for rank in (0, 1, 3):
        pipeline.start(rank)
    done = pipeline.finish()
    assert [each["digests"] for each in done] == [each["digests"] for each in expected]
    assert [each["different"] for each in done] == [[]] * RANKS
    assert {event["step"] for event in newcomers[0].events("recovered")} == {4}


def protections(rank):
    """For each recovery of a rank whether its copies were complete before training continued."""
    said = [event["said"] for event in rank.events("protocol")]
    return [each["is_whole"] for each in said if each.get("event") == "protected"]


@pytest.mark.long
def test_copies_of_before_stay_until_those_made_beside_the_next_step_are_whole(start_job, tmp_path):
    """A stage is lost, and those in its place at once after their recovery: from the same copies once more."""
    common = {"attempts": "means", "steps": 7, "width": 768, "copies": PRESETS["baft"]}
    expected, _ = run_undisturbed(tmp_path, **common)
    pipeline = Pipeline(start_job(RANKS), **common)
    plans = {rank: {"kill_in_step": 3, "kill_with": rank ^ 1} for rank in (2, 3)}
    started = [pipeline.start(rank, **plans.get(rank, {})) for rank in range(RANKS)]
    for each in started[2:]:
        pipeline.lose(each)
    second = [pipeline.start(rank, kill_at="recovered") for rank in (2, 3)]
    for each in second:
        pipeline.lose(each)
    for rank in (2, 3):
        pipeline.start(rank)
    done = pipeline.finish()
    assert [each["digests"] for each in done] == [each["digests"] for each in expected]
    assert [each["different"] for each in done] == [[]] * RANKS
    assert {tuple(protections(each)) for each in started[:2]} == {(True, False, False)}, "at the start all wait"


@pytest.mark.long
def test_bubbles_that_are_too_short_for_a_version_share_it_out(start_job):
    copies = PRESETS["baft"] | {"profile_steps": 4, "copy_buffer_bytes": 1 << 9}
    pipeline = Pipeline(start_job(RANKS), copies=copies, steps=60)
    for rank in range(RANKS):
        pipeline.start(rank)
    done = pipeline.finish()
    assert [each["different"] for each in done] == [[]] * RANKS
    for each in pipeline.ranks:
        events = each.events("step")
        planned = next(event["step"] for event in events if event["plans"] == events[-1]["plans"])
        summary = events[-1]["summary"]
        steps = int(re.search(r"a version takes (\d+) steps", summary)[1])
        assert steps > 1
        found = [step for step in begun(each) if step > planned + 1]
        assert found == [*range(found[0], found[0] + steps * len(found), steps)]
        assert len(found) >= 1 + (events[-1]["step"] - found[0]) // steps


@pytest.mark.long
def test_ranks_of_a_stage_send_equal_shares(start_job):
    """Three layers of equal size, which two ranks could not share without a division."""
    pipeline = Pipeline(start_job(RANKS), copies=PRESETS["baft"], layers=3)
    for rank in range(RANKS):
        pipeline.start(rank)
    done = pipeline.finish()
    assert [each["different"] for each in done] == [[]] * RANKS
    sent = [each["sent_bytes"] for each in done]
    assert min(sent) > 1_000_000
    assert max(sent) <= 1.01 * min(sent)
    assert any("[" in name for name in done[0]["digests"])


def test_what_the_ranks_of_a_stage_lack_crosses_to_their_node_once(start_job):
    """A node with both ranks of a stage is lost: one of them fetches each unit, and the other gets it from that one."""
    pipeline = Pipeline(start_job(RANKS), ranks_per_node=2, steps=20, copies=PRESETS["baft"])
    started = [pipeline.start(rank) for rank in range(RANKS)]
    started[2].wait_for("step", step=3)
    for each in started[2:]:
        each.process.kill()
    for each in started[2:]:
        each.process.join(PATIENCE)
    shutil.rmtree(pipeline.job.node_memory("n1"))
    newcomers = [pipeline.start(rank) for rank in (2, 3)]
    done = pipeline.finish()
    assert [each["different"] for each in done] == [[]] * RANKS
    recovered = [each.events("recovered")[0] for each in newcomers]
    assert {each["fetched_units"] for each in recovered} == {len(done[2]["digests"])}
    far = [each["far_bytes"] for each in recovered]
    assert sum(far) == done[2]["state_bytes"]
    assert min(far) > 0.4 * sum(far)  # they share the fetching, too


@pytest.mark.parametrize("lost", [(3,), (2, 3)], ids=["rank", "stage"])
def test_after_a_death_only_missing_copies_are_sent(start_job, lost):
    """The copies of the others' units that the lost ranks kept: the loss that counts comes when all were complete."""
    pipeline = Pipeline(start_job(RANKS), copies=PRESETS["baft"], attempts="means", verifies=True)
    plans = {rank: {"kill_in_step": 4, "kill_with": rank ^ 1 if len(lost) > 1 else None} for rank in lost}
    started = [pipeline.start(rank, **plans.get(rank, {})) for rank in range(RANKS)]
    for rank in lost:
        pipeline.lose(started[rank])
    for each in [pipeline.start(rank, kill_at="connected") for rank in lost]:
        pipeline.lose(each)
    for rank in lost:
        pipeline.start(rank)
    done = pipeline.finish()
    assert [each["different"] for each in done] == [[]] * RANKS
    last = [each.events("recovered")[-1] for each in pipeline.ranks if each.process.exitcode == 0]
    assert len(last) == RANKS
    missing = done[0]["state_bytes"] * len(lost) // 2
    again = str(last[0]["step"])
    assert 0.9 * missing < sum(each["sent"][again] for each in done) < 1.1 * missing, (
        "digests and padding are sent, too"
    )
