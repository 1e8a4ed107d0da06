"""`pec` in real processes: what its reports say of lost tokens, against a count that knows nothing of a session."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from evermoe.checkpoint.manifest import MANIFEST, read_manifest
from evermoe.state.version import step_of
from support.harness import FEWEST, wait_until
from support.history import check_history
from support.lineage import check_losses
from support.worker import EVERYTHING, Fault

NAMES = "abcd"


class Blow(NamedTuple):
    """Workers that are killed in a step."""

    step: int
    victims: str = NAMES
    point: str = "vote"
    gone: str = ""
    """Nodes whose memory goes with them."""


def start_next(job, name, blows, **options):
    """A worker that is killed by the first of the blows that is for it.

    If all are to be killed, each waits at the point: a worker that died before the others would be a loss to them.
    """
    faults = [
        Fault(each.point, each.step, action="hang" if each.victims == NAMES else "kill")
        for each in blows
        if name in each.victims
    ]
    return job.start(name, *faults[:1], gated=True, lineage=True, **options)


def gate_of(blows):
    """Step before which all wait: after a blow that some survive, so that the others can come back."""
    return blows[0].step + 2 if blows and blows[0].victims != NAMES else EVERYTHING


def run(job, blows, steps, **options):
    """Trains to the end through all blows; the checked recoveries."""
    job.open_gate(gate_of(blows))
    running = {name: start_next(job, name, blows, steps=steps, **options) for name in NAMES}
    for at, blow in enumerate(blows):
        left = blows[at + 1 :]
        if blow.victims == NAMES:
            for each in running.values():
                each.wait_for("fault", 120, point=blow.point)
            for each in running.values():
                each.process.kill()
        for name in blow.victims:
            assert running[name].join(120) == -9, running[name].log()
        for name in blow.gone:
            job.lose_node(name)
        if blow.victims == NAMES:
            job.open_gate(gate_of(left))
        else:
            for name in set(NAMES) - set(blow.victims):
                running[name].wait_for("gate", step=blow.step + 2)
        for name in blow.victims:
            running[name] = start_next(job, name, left, steps=steps, **options)
        if blow.victims != NAMES:
            job.take_in(*(running[name] for name in blow.victims), until=gate_of(left))
    assert [each.join(120) for each in running.values()] == [0] * len(NAMES)
    assert {each.events("done")[0]["step"] for each in running.values()} == {steps}
    check_history(job.workers, undone=True)
    return check_losses(job.workers)


def start(start_job, tmp_path, **options):
    settings = {"preset": "pec", "checkpoints": str(tmp_path / "saved"), **FEWEST, "rebalance_interval": 0}
    return start_job(len(NAMES), **settings | options)


@pytest.mark.parametrize(
    "blow",
    [Blow(30, "b"), Blow(30), Blow(31, gone="c"), Blow(31, gone=NAMES), Blow(30, point="copy")],
    ids=["one", "all", "all and a node", "all and every node", "all as copies begin"],
)
def test_a_fault_costs_what_the_report_says(start_job, tmp_path, blow):
    job = start(start_job, tmp_path, experts_per_snapshot=2, experts_per_save=1, save_interval=3)
    found = run(job, [blow], 60)
    assert len(found[0].reports) == len(NAMES)
    assert any(each.is_new and each.state.lost_now for each in found)


def is_saved(folder, step):
    """Return whether a state after this number of steps, or more, is saved."""
    return any(step_of(read_manifest(path.parent).version) >= step for path in folder.glob(f"save-*/{MANIFEST}"))


def test_a_crash_that_leaves_no_memory_repeats_numbers_of_groups_and_no_sample(start_job, tmp_path):
    """One worker dies, and the others in the next attempt at the step: their group has left nothing behind.

    The group after the crash has its number, and commits the same step with the samples divided otherwise.
    """
    settings = {"experts_per_snapshot": 2, "experts_per_save": 1, "save_interval": 3, "rebalance_interval": 0, **FEWEST}
    job = start_job(3, preset="pec", checkpoints=str(tmp_path / "saved"), **settings)
    job.open_gate(5)
    faults = {"a": [Fault("vote", 5)], "b": [Fault("begin", 5, nth=2)], "c": [Fault("begin", 5, nth=2)]}
    before = job.start_all(faults, steps=8, gated=True)
    for each in before:
        each.wait_for("gate", step=5)
    wait_until(lambda: is_saved(tmp_path / "saved", 3), "step 3 is saved")
    job.open_gate(EVERYTHING)
    assert [each.join() for each in before] == [-9] * 3
    for name in "abc":
        job.lose_node(name)
    after = job.start_all({}, steps=8)
    assert [each.join() for each in after] == [0] * 3
    last = before[1].events("share")[-1]
    assert after[0].events("commit", step=5, generation=last["generation"])
    assert last["step"] == 5
    check_history(job.workers, undone=True)


@pytest.mark.long
@pytest.mark.parametrize("selection", ["load-aware", "sequential"])
@pytest.mark.parametrize(
    "blows",
    [
        [Blow(113, "b")],
        [Blow(70, "c"), Blow(157)],
        [
            Blow(22, "b"),
            Blow(44),
            Blow(66, "c", point="copy"),
            Blow(88, gone="a"),
            Blow(110, "ad"),
            Blow(132, gone=NAMES),
            Blow(154, "b", "forward"),
            Blow(176, point="copy", gone="d"),
        ],
    ],
    ids=["1 fault", "2 faults", "8 faults"],
)
def test_faults_of_all_kinds_cost_what_the_reports_say(start_job, tmp_path, blows, selection):
    sizes = {"experts_per_snapshot": 2, "experts_per_save": 1, "save_interval": 4, "snapshot_interval": 2}
    job = start(start_job, tmp_path, expert_selection=selection, checkpoint_interval=50, **sizes)
    found = run(job, blows, 200)
    assert sum(each.is_new for each in found) >= len(blows)
    assert sum(bool(each.state.lost_now) for each in found) >= len(blows)


@pytest.mark.long
def test_more_experts_are_copied_when_more_tokens_were_lost_than_may_be(start_job, tmp_path):
    """A node's experts lose all 27 steps, since none was saved again: 3 of 10 experts, about 0.3 of the tokens.

    A crash of all costs the steps since each expert's snapshot. With one snapshot per step and layer of 6 or 4 experts
    that is 2.5 or 1.5 steps on average, and one more for a snapshot in progress: at most 0.2 of 15 steps.
    """
    limit, sizes = 0.25, {"experts_per_snapshot": 1, "experts_per_save": 1, "save_interval": 50}
    job = start(start_job, tmp_path, max_lost_token_fraction=limit, **sizes)
    found = [each.state for each in run(job, [Blow(15), Blow(27, "b"), Blow(42)], 48)]
    expected, grows = 1, []
    for state in found:
        if state.lost_now:
            grows.append(state.plt > limit)
            expected = min(expected << grows[-1], 6)
        assert state.each == [expected] * 2
    assert grows[:2] == [False, True]


@pytest.mark.parametrize(
    "second", [Fault("phase verify", nth=2), Fault("copy", 30, nth=2)], ids=["before it is counted", "after that"]
)
@pytest.mark.long
def test_a_loss_counts_once_where_a_second_member_dies_in_the_recovery(start_job, tmp_path, second):
    job = start(start_job, tmp_path, experts_per_snapshot=2, experts_per_save=1, save_interval=4)
    faults = {"b": [Fault("vote", 30)], "c": [second]}
    workers = job.start_all(faults, NAMES, steps=36, lineage=True)
    assert [each.join(120) for each in workers] == [0, -9, -9, 0]
    check_history(workers, undone=True)
    last = check_losses(workers)[-1]
    assert last.is_new
    assert last.state.lost_now


@pytest.mark.long
def test_owners_go_back_and_lose_what_the_report_says(start_job, tmp_path):
    job = start(start_job, tmp_path, shard_optimizer=True, experts_per_save=1, save_interval=4)
    found = run(job, [Blow(27, "b"), Blow(46)], 56)
    assert any(report["steps_lost"] for each in found for report in each.reports)
    assert any(each.state.lost_now for each in found)


@pytest.mark.long
def test_moetion_counts_the_same_way(start_job, tmp_path):
    job = start(start_job, tmp_path, preset="moetion", remote_bytes_per_step=30_000, local_bytes_per_step=60_000)
    found = run(job, [Blow(22, "b"), Blow(40)], 48)
    assert sum(bool(each.state.lost_now) for each in found) == 2
