"""Workers that sleep through the end of their job: what is finished stays, and they say that they came late."""

import signal

import pytest

from support.history import check_history
from support.worker import Fault

STEPS = 14
STOP = 5


def contents(folders):
    """Return the contents of all files of folders, by path."""
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.parametrize("restarts", [False, True], ids=["same Lighthouse", "new Lighthouse"])
@pytest.mark.parametrize(
    "preset, point",
    [("auto", "vote"), ("auto", "commit"), ("gemini", "snapshot_received"), ("pec", "forward"), ("pec", "commit")],
)
def test_worker_that_wakes_when_the_job_is_over(start_job, tmp_path, preset, point, restarts):
    saved = tmp_path / "saved"
    options = {"checkpoints": str(saved), "checkpoint_interval": 4}
    job = start_job(preset=preset, replication=2 if preset == "pec" else 3, **options)
    workers = a, b, c = job.start_all({"b": [Fault(point, STOP, "stop")]}, steps=STEPS)
    b.wait_until_stopped()
    assert [each.join() for each in (a, c)] == [0, 0]
    check_history(workers, away="b")
    places = [saved, *(job.node_memory(name) for name in "ac")]
    before = contents(places)
    if restarts:
        job.restart_lighthouse()
    committed = len(b.events("commit"))
    b.signal(signal.SIGCONT)
    code = b.join()
    if restarts:  # it knows of no later agreement, and finds the checkpoint of the last step
        assert (code, b.events("recovered")[-1]["step"]) == (0, STEPS)
    else:
        assert (code, b.events("failed")[0]["error"]) == (1, "LeftBehind")
    assert len(b.events("commit")) == committed
    after = contents(places)  # the disk may still have taken what the worker had copied before it slept
    assert [path for path in before if after.get(path) != before[path]] == []
    again = job.start_all({}, steps=STEPS)
    assert [each.join() for each in again] == [0, 0, 0]
    assert not any(each.events("commit") for each in again)


@pytest.mark.long
def test_worker_whose_operator_knows_that_nobody_else_is_left(start_job):
    job = start_job(replication=3)
    asleep = {"session": {"allow_solo_resume": True}}
    workers = a, b, c = [job.start("a"), job.start("b", Fault("vote", STOP, "stop"), **asleep), job.start("c")]
    b.wait_until_stopped()
    assert [each.join() for each in (a, c)] == [0, 0]
    check_history(workers, away="b")
    b.signal(signal.SIGCONT)
    assert b.join() == 0
    assert b.events("recovered")[-1]["members"] == 1
    assert b.events("commit")[-1]["step"] == b.options.steps - 1
