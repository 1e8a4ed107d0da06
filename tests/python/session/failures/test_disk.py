"""A folder that cannot be written to: told at the start, survived while training, never a reason to lose the state."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import threading

import pytest
import torch

from evermoe import Checkpoints, ElasticSampler, Membership, Session, load_weights
from evermoe.checkpoint import unit_files
from evermoe.checkpoint.checkpoint_folder import find, find_manifests
from evermoe.checkpoint.manifest import SAVE
from evermoe.checkpoint.plain_files import write_units
from evermoe.errors import PersistFailed
from evermoe.events import Begin, Checkpoint, Recovered
from evermoe.presets import Auto, Pec
from evermoe.state.copy_marks import SAVED
from evermoe.state.training_state import TrainingState
from evermoe.state.version import step_of
from support.disks import BALLAST, fill, free, freeze, shrink, small_memories, thaw
from support.harness import FEWEST, wait_until
from support.history import check_history
from support.worker import SAMPLES, WRITTEN_SECONDS, Fault, Model, dataset, wait_until_written


def make():
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), fused=True)


OFTEN = Auto(snapshot_interval=1)


def run(tmp_path, folder, until, at=None, *, job="disk", interval=0, preset=OFTEN, sessions=None, waits=True):
    """Trains alone in this process, and does `at[step]()` before a step; returns its events.

    The session is added to `sessions` before the first step. Where it `waits`, no checkpoint is late.
    """
    (model, optimizer), events = make(), []

    def listen(event):
        events.append(event)
        if isinstance(event, Begin):
            (at or {}).get(event.step, lambda: None)()

    memory = tmp_path / "memory"
    memory.mkdir(exist_ok=True)
    session = Session(
        model,
        optimizer,
        ElasticSampler(SAMPLES, 4),
        preset=preset,
        membership=Membership(job=job, memory_dir=str(memory)),
        checkpoints=Checkpoints(folder, interval=interval),
        on_event=listen,
    )
    if sessions is not None:
        sessions.append(session)
    for step in session.steps(until):
        if waits:
            wait_until_written(session)
        with step:
            step.backward(model(dataset()[step.indices]))
    return events


def written(events):
    return [event.step for event in events if isinstance(event, Checkpoint)]


def leftovers(folder):
    return [path.name for path in folder.iterdir() if ".writing" in path.name or path.name.startswith(".probe")]


# ---- at the start


def test_a_file_in_place_of_the_folder_is_an_error_at_the_start(tmp_path):
    (tmp_path / "saved").touch()
    with pytest.raises(OSError, match=r"checkpoints: .*/saved cannot be written to: .* or give another folder"):
        run(tmp_path, tmp_path / "saved", 2)


def test_a_read_only_folder_is_an_error_at_the_start(tmp_path, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OSError, match="cannot be written to: Read-only file system"):
        run(tmp_path, small_disk, 2)


def test_a_full_disk_is_an_error_at_the_start_and_leaves_nothing(tmp_path, small_disk):
    fill(small_disk)
    with pytest.raises(OSError, match="cannot be written to: No space left"):
        run(tmp_path, small_disk, 2)
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


def test_another_running_job_is_refused_at_the_start(tmp_path):
    def start_another():
        with pytest.raises(ValueError, match="belongs to job 'one', which is running; this is job 'two'"):
            run(tmp_path, tmp_path / "saved", 2, job="two")

    run(tmp_path, tmp_path / "saved", 3, {1: start_another}, job="one")
    assert written(run(tmp_path, tmp_path / "saved", 4, job="two")) == [4]


def test_another_model_is_refused_at_the_start(tmp_path):
    run(tmp_path, tmp_path / "saved", 1)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="has checkpoints of job 'disk', which trained another model"):
        Session(model, torch.optim.SGD(model.parameters()), ElasticSampler(4, 2), checkpoints=tmp_path / "saved")


# ---- while training


@pytest.mark.parametrize("kind", ["full", "a file in its place"])
def test_training_continues_and_the_next_checkpoint_is_tried(tmp_path, request, kind):
    if kind == "full":
        folder = request.getfixturevalue("small_disk")
        spoil, mend = (lambda: fill(folder)), (lambda: free(folder))
    else:
        folder, moved = tmp_path / "saved", tmp_path / "moved"
        spoil = lambda: (folder.rename(moved), folder.touch())  # noqa: E731
        mend = lambda: (folder.unlink(), moved.rename(folder))  # noqa: E731
    with pytest.warns(UserWarning, match="checkpoint of step 4 was not written: rank 0: .*Training continues"):
        events = run(tmp_path, folder, 9, {3: spoil, 5: mend}, interval=2)
    assert written(events) == [2, 6, 8, 9]
    assert sorted(path.name for path in find(folder).values()) == ["step-00000008", "step-00000009"]
    wait_until(lambda: not leftovers(folder), "failed drafts are removed")


def test_a_full_disk_takes_no_good_checkpoint_away(tmp_path, small_disk):
    def check():
        assert len(find(small_disk)) == 2
        wait_until(lambda: not leftovers(small_disk), "failed drafts are removed")
        free(small_disk)

    with pytest.warns(UserWarning, match="was not written") as told:
        run(tmp_path, small_disk, 12, {5: lambda: fill(small_disk), 11: check}, interval=2)
    assert [warning.message.args[0].split(" was")[0][-1] for warning in told] == ["6", "8", "0"]


def test_the_state_stays_in_memory_when_the_last_checkpoint_cannot_be_written(tmp_path, small_disk):
    with pytest.raises(
        PersistFailed, match=r"all steps are taken, but the last checkpoint, of step 5, .*No space left"
    ):
        run(tmp_path, small_disk, 5, {2: lambda: fill(small_disk)})
    assert find(small_disk) == {}
    with pytest.warns(UserWarning, match="Job 'disk' continues, and tries to write each scheduled checkpoint"):
        events = run(tmp_path, small_disk, 7, {5: lambda: free(small_disk)})
    assert [event.step for event in events if isinstance(event, Recovered)] == [5]
    assert written(events) == [7]
    wait_until(lambda: not leftovers(small_disk), "failed drafts are removed")


def test_one_member_that_cannot_write_is_named_and_all_continue(start_job, tmp_path):
    saved = tmp_path / "saved"
    job = start_job(2, checkpoints=str(saved), checkpoint_interval=4)
    job.open_gate(7)
    workers = job.start_all({}, "ab", gated=True, steps=14)
    for each in workers:
        each.wait_for("gate", step=7)
    os.rename(saved, tmp_path / "moved")
    saved.touch()
    job.open_gate(9)
    for each in workers:
        each.wait_for("gate", step=9)
    saved.unlink()
    os.rename(tmp_path / "moved", saved)
    job.open_gate(1 << 60)
    assert [each.join() for each in workers] == [0, 0]
    check_history(workers)
    for each in workers:
        assert [event["step"] for event in each.events("checkpoint")] == [4, 12, 14]
        assert "the checkpoint of step 8 was not written: rank 0: " in each.log()
    wait_until(lambda: not leftovers(saved), "failed drafts are removed")


def saves(ledger, place):
    """Steps of the saves of an expert that count."""
    return [step_of(version) for version in ledger.marks.marks(SAVED)[:, place[0], place[1], 0] if version]


def test_pec_continues_without_its_folder(tmp_path, small_disk):
    sessions = []

    def mend():
        assert sessions[0]._driver.saving.saver._has_warned
        free(small_disk)

    with pytest.warns(UserWarning, match=r"the save of step 3 was not written: .*No space left"):
        at = {2: lambda: fill(small_disk), 6: mend}
        events = run(tmp_path, small_disk, 8, at, sessions=sessions, preset=Pec())
    assert written(events) == [8]


def test_pec_counts_no_expert_as_saved_that_never_gets_to_the_disk(tmp_path, small_disk):
    sessions = []

    def check():
        """Of the saves since step 2, the one of the latest step may be under way; the others have failed."""
        ledger = sessions[0]._protection.ledger
        marks = {unit: saves(ledger, place) for unit, place in ledger._places.items()}
        assert len(marks) == 10
        assert not [unit for unit, steps in marks.items() if {3, 4, 5, 6} & set(steps)]
        old = [ledger._places[unit] for unit, steps in marks.items() if max(steps) <= 2]
        assert len(old) >= 4
        newest_LE = ledger.marks.marks(SAVED)[0, ..., 1]
        for unit, place in ledger._places.items():
            assert ledger.selection.at_risk[place] == ledger.total_LE[place] - newest_LE[place], unit

    with pytest.warns(UserWarning, match=r"the save of step 3 was not written: .*No space left"):
        at = {2: lambda: fill(small_disk), 8: check, 9: lambda: free(small_disk)}
        run(tmp_path, small_disk, 12, at, sessions=sessions, preset=Pec(experts_per_save=1))


# ---- during training


def test_a_slow_disk_does_not_hold_up_training(tmp_path, monkeypatch):
    """The checkpoint is of its step, whatever training does until it is on disk; those due meanwhile are left out."""
    saved, weights, sessions, may_write = tmp_path / "saved", {}, [], threading.Event()

    def write_late(path, units):
        assert may_write.wait(WRITTEN_SECONDS)
        return write_units(path, units)

    def note():
        weights.update(copy.deepcopy(sessions[0].model.state_dict()))

    def let_write():
        assert find(saved) == {}
        may_write.set()
        wait_until_written(sessions[0])

    def check():
        model, _ = make()
        load_weights(model, saved / "step-00000003")
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())

    monkeypatch.setattr(unit_files, "write_units", write_late)
    at = {3: note, 7: let_write, 8: lambda: wait_until_written(sessions[0]), 9: check}
    with pytest.warns(UserWarning, match="checkpoint of step 6 is skipped: that of step 3 is still being written"):
        events = run(tmp_path, saved, 11, at, sessions=sessions, waits=False, interval=3)
    assert written(events) == [3, 9, 11]


@pytest.mark.parametrize("preset", ["auto", "gemini", "pec"])
def test_a_disk_that_stops_holds_up_no_member_s_training(start_job, dying_disk, preset):
    """Whatever is written to it waits in the kernel, as on a disk that has died; the lag shows, and all catch up."""
    job = start_job(2, checkpoints=str(dying_disk), checkpoint_interval=1, preset=preset)
    job.open_gate(3)
    workers = job.start_all({}, "ab", gated=True, waits_for_disk=False, steps=14)
    for each in workers:
        each.wait_for("gate", step=3)
    freeze(dying_disk)
    job.open_gate(12)
    for each in workers:
        each.wait_for("gate", step=12)
        lag = each.events("measured", step=11)[0]["lag"]
        assert lag["checkpoint"] >= 8
        assert preset != "pec" or lag["persisted"] >= 8
        assert "is skipped: that of step" in each.log()
    thaw(dying_disk)
    job.open_gate(1 << 60)
    assert [each.join() for each in workers] == [0, 0]
    check_history(workers)
    for each in workers:
        assert each.events("checkpoint")[-1]["step"] == 14
        assert len(each.events("recovered")) == 1, "nobody was given up for its disk"


@pytest.mark.long
def test_a_death_while_the_disk_stands_still_holds_up_nobody(start_job, dying_disk):
    """The survivors' interrupted write is void, and still waits; the next one gets to the disk after it."""
    job = start_job(3, checkpoints=str(dying_disk), checkpoint_interval=1)
    job.open_gate(3)
    workers = job.start_all({"c": [Fault("reduce", 6)]}, gated=True, waits_for_disk=False, steps=14)
    for each in workers:
        each.wait_for("gate", step=3)
    freeze(dying_disk)
    job.open_gate(12)
    for each in workers[:2]:
        each.wait_for("gate", step=12)
    thaw(dying_disk)
    job.open_gate(1 << 60)
    assert [each.join() for each in workers] == [0, 0, -9]
    check_history(workers)
    for each in workers[:2]:
        assert each.events("checkpoint")[-1]["step"] == 14


def test_a_checkpoint_that_a_death_interrupts_is_begun_again(start_job, tmp_path):
    job = start_job(checkpoints=str(tmp_path / "saved"), checkpoint_interval=5)
    workers = job.start_all({"b": [Fault("reduce", 5)]}, steps=9)
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    for each in workers[::2]:
        assert [event["step"] for event in each.events("checkpoint")] == [6, 9]


# ---- what is read again


@pytest.mark.parametrize("ends_at", [4, 6])
def test_pec_takes_experts_from_a_checkpoint_where_it_has_newer_ones(tmp_path, ends_at):
    saved = tmp_path / "saved"
    options = {"preset": Pec(experts_per_save=1), "interval": 4}

    def end():
        wait_until(lambda: newest_saved(saved) >= ends_at, "what is saved of the step is durable")
        raise ZeroDivisionError

    if ends_at == 4:  # a job that ends waits for its checkpoint
        run(tmp_path, saved, 4, **options)
    else:
        with pytest.raises(ZeroDivisionError):
            run(tmp_path, saved, 9, {ends_at: end}, **options)
    (recovered,) = (event for event in run(tmp_path, saved, 7, **options) if isinstance(event, Recovered))
    assert recovered.step == ends_at
    assert bool(recovered.stale) == (ends_at > 4)
    assert all(step >= 4 for step in recovered.stale.values())


def newest_saved(folder):
    """Steps in the newest save."""
    found = find_manifests(folder, TrainingState(*make()).catalog.layout, (SAVE,))
    return max((step_of(each.version) for each in found), default=0)


# ---- shared memory


def test_memory_without_room_for_old_and_new_copies_does_not_end_the_job(start_job, small_disk):
    job = start_job(2, preset="gemini", memory_dir=str(small_disk), join_interval=1)
    with small_memories(job, small_disk, "abc") as nodes:
        job.open_gate(3)
        workers = job.start_all({}, "ab", gated=True)
        for each in workers:
            each.wait_for("gate", step=3)
        for node in nodes[:2]:
            shrink(node, 1.5)
        workers.append(job.start("c"))
        workers[-1].wait_for("phase", phase="agree")
        job.open_gate(1 << 60)
        assert [each.join() for each in workers] == [0, 0, 0]
    check_history(workers)
    assert all(each.events("recovered")[-1]["members"] == 3 for each in workers)
    assert all("Earlier copies are removed" in each.log() for each in workers[:2])


@pytest.mark.parametrize("preset", ["gemini", "baft", "auto", "moetion"])
def test_memory_without_room_for_the_copies_of_fewer_members_takes_fewer_copies(start_job, small_disk, preset):
    """And the next death costs no more than what had no copy."""
    job = start_job(3, preset=preset, memory_dir=str(small_disk), join_interval=50, **FEWEST)
    with small_memories(job, small_disk, "abc") as nodes:
        job.open_gate(3)
        workers = job.start_all({}, "abc", gated=True, steps=8)
        for each in workers:
            each.wait_for("gate", step=3)
        for node in nodes[:2]:
            shrink(node, 1.02)
        workers[2].process.kill()
        job.open_gate(1 << 60)
        assert [each.join() for each in workers] == [0, 0, -9]
    check_history(workers)
    for each in workers[:2]:
        recovered = each.events("recovered")[-1]
        assert (recovered["members"], recovered["steps_lost"], recovered["lost_units"]) == (2, 0, [])
        assert "are kept with fewer copies" in each.log()
        assert "fewer copies" in each.events("protection_planned")[-1]["summary"]
        assert each.events("verified")[0]["digests_mismatched"] == 0


def test_memory_that_is_gone_before_new_copies_take_it_ends_no_job(start_job, small_disk):
    """Where it was free when they were planned, which are then made while training waits, or left out."""
    job = start_job(3, preset="gemini", memory_dir=str(small_disk), join_interval=50, **FEWEST)
    with small_memories(job, small_disk, "abc") as nodes:
        faults = {"a": [Fault("protection_planned", nth=2, action="fill")], "c": [Fault("forward", 3)]}
        workers = job.start_all(faults, "abc", steps=8)
        assert [each.join() for each in workers] == [0, 0, -9]
        assert (nodes[0] / BALLAST).exists()
    check_history(workers)
    a, b, _ = workers
    assert re.search(
        r"no memory for copies: .*reserving the arena .*: it needs \d+ bytes", a.events("recovered")[-1]["reason"]
    )
    for each in (a, b):
        assert [event["steps_lost"] for event in each.events("recovered")] == [0, 0, 0]
        assert each.events("verified")[0]["digests_mismatched"] == 0
    assert "Earlier copies are removed" in a.log()


def test_memory_that_is_too_small_at_the_start_is_said_at_once(start_job, small_disk):
    job = start_job(2, preset="gemini", memory_dir=str(small_disk), quorum_timeout=20.0)
    with small_memories(job, small_disk, "ab") as nodes:
        for node in nodes:
            subprocess.run(["mount", "-o", "remount,size=64k", node], check=True)
        workers = job.start_all({}, "ab")
        assert [each.join() for each in workers] == [1, 1]
    for each in workers:
        assert each.events("failed")[0]["error"] in ("OSError", "JoinTimeout")
    assert any(each.events("failed")[0]["error"] == "OSError" for each in workers)
