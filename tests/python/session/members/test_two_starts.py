"""A job that is started a second time, with a Lighthouse of its own, while the first run lives."""

import signal

import pytest

from evermoe.checkpoint.checkpoint_folder import find
from support.harness import wait_until
from support.history import check_history

STEPS, GATE = 12, 4


def files(*folders):
    """All files below folders, but for the worker's outputs; checkpoints' files with their sizes."""
    return sorted((str(path), path.stat().st_ino) for folder in folders for path in folder.rglob("*"))


@pytest.mark.parametrize("nodes", ["ab", "cd"])
@pytest.mark.few(2)
@pytest.mark.timeout(240)
@pytest.mark.quick("the job is started a second time with another Lighthouse")
def test_the_second_run_is_refused_by_name_and_the_next_one_resumes(start_job, tmp_path, nodes):
    """On the same nodes, whose memory it would use, and on other nodes with the same checkpoint folder."""
    saved = tmp_path / "saved"
    first = start_job(2, checkpoints=str(saved), checkpoint_interval=1, keep_checkpoints=3)
    places = {
        "job": first.name,
        "memory_dir": str(first.memory),
        "checkpoints": str(saved),
        "checkpoint_interval": 1,
    }
    first.open_gate(GATE)
    workers = first.start_all({}, names="ab", steps=STEPS, gated=True)
    for each in workers:
        each.wait_for("gate", step=GATE)
    written = [f"step-{step:08d}" for step in (1, 2, 3, 4)]  # the first one awaits its verification
    wait_until(lambda: sorted(each.name for each in saved.glob("step-*")) == written, "the checkpoint of step 4")
    before = files(saved, first.node_memory("a"), first.node_memory("b"))

    second = start_job(2, **places, keep_checkpoints=3, hang_timeout=2.0)
    refused = second.start_all({}, names=nodes, steps=STEPS)
    assert [each.join() for each in refused] == [1, 1]
    folder = saved if nodes == "cd" else first.node_memory("a")
    for each in refused:
        assert f"FolderInUse: {'the checkpoint store' if nodes == 'cd' else 'the job'}" in each.log()
        assert f"is in use by another run of job {first.name!r}, which process" in each.log()
        assert f"with the Lighthouse {first.address.removeprefix('http://')}" in each.log()
        assert any(f"held on this machine by process {other.pid}" in each.log() for other in workers)
        assert each.events("checkpoint") == []
    assert str(folder) in "".join(each.log() for each in refused)
    assert files(saved, first.node_memory("a"), first.node_memory("b")) == before

    first.open_gate(GATE + 3)  # it has not noticed
    for each in workers:
        each.wait_for("gate", step=GATE + 3)
    for each in workers:
        each.signal(signal.SIGKILL)
    third = start_job(2, **places, keep_checkpoints=3)  # at once: the dead give their folders up
    again = third.start_all({}, names="ab", steps=STEPS)
    assert [each.join() for each in again] == [0, 0]
    assert again[0].events("recovered")[0]["step"] >= GATE + 2
    check_history([*workers, *again])
    assert max(version % 2**40 for version in find(saved)) == STEPS


def test_a_restarted_worker_belongs_to_the_run_whose_other_members_are_stopped(start_job):
    """A process that is stopped keeps the folder: those that the same Lighthouse names are of its run all the same."""
    job = start_job(2)
    job.open_gate(GATE)
    stopped, killed = workers = job.start_all({}, names="ab", steps=STEPS, gated=True, session={"node": "a"})
    for each in workers:
        each.wait_for("gate", step=GATE)
    stopped.signal(signal.SIGSTOP)
    stopped.wait_until_stopped()
    killed.signal(signal.SIGKILL)
    again = job.start_all({}, names="cd", steps=STEPS, session={"node": "a"})
    assert [each.join() for each in again] == [0, 0]
