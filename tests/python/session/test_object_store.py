"""Jobs whose checkpoints are in S3, on a real server: that is killed and started again, and is all that is left."""

from __future__ import annotations

import pytest

from evermoe.persist.checkpoint_store import find
from evermoe.persist.place import locate
from support.history import check_history, check_recovered
from support.worker import Fault

URL = "s3://bucket/run"


def found(limit=20.0):
    """Steps of the checkpoints that are there."""
    return sorted(version & (1 << 40) - 1 for version in find(locate(URL, patience=limit)))


@pytest.mark.parametrize("faults", [{}, {"b": [Fault("forward", 9)]}], ids=["all live", "a worker dies meanwhile"])
def test_a_job_continues_while_the_server_of_its_checkpoints_is_killed_and_started_again(start_job, s3, faults):
    job = start_job(checkpoint_dir=URL, checkpoint_every=4, checkpoint_patience=2.0)
    job.open_gate(7)
    workers = job.start_all(faults, gated=True, steps=14, environment=s3.environment())
    for each in workers:
        each.wait_for("gate", step=7)
    assert found() == [4]
    s3.kill()
    job.open_gate(11)
    left = [each for each in workers if each.name not in faults]
    for each in left:
        each.wait_for("gate", step=11)
    s3.start()
    job.open_gate(1 << 60)
    assert [each.join() for each in workers] == [-9 if each.name in faults else 0 for each in workers]
    check_history(workers)
    for each in left:
        assert [event["step"] for event in each.events("checkpoint")] == [4, 12, 14]
        assert "the checkpoint of step 8 was not written: rank" in each.log()
    assert any("this recovery does without checkpoints" in each.log() for each in left) == bool(faults)
    assert found() == [12, 14]
    assert not any(s3.environment()["AWS_SECRET_ACCESS_KEY"] in each.log() for each in workers)


def test_a_job_starts_elsewhere_from_the_bucket_alone(start_job, s3):
    """Other machines, another region's name and address, another number of workers: nothing but the bucket is left."""
    first = start_job(2, checkpoint_dir=URL, checkpoint_every=4)
    before = first.start_all({}, "ab", steps=6, environment=s3.environment())
    assert [each.join() for each in before] == [0, 0]
    s3.kill()
    s3.move()
    s3.start()
    elsewhere = start_job(3, checkpoint_dir=URL)
    region = s3.environment() | {"AWS_REGION": "eu-central-1"}
    after = elsewhere.start_all({}, steps=12, environment=region)
    assert [each.join() for each in after] == [0, 0, 0]
    for each in after:
        assert check_recovered(before, each)["step"] == 6
        assert each.events("done")[0]["step"] == 12
    check_history(after)


def test_a_job_that_cannot_reach_the_server_at_its_start_says_so_and_stops(start_job, s3):
    s3.kill()
    job = start_job(1, checkpoint_dir=URL, checkpoint_patience=1.0)
    (worker,) = job.start_all({}, "a", steps=2, environment=s3.environment())
    assert worker.join() == 1
    assert "ConnectionRefusedError" in worker.log() and "s3://bucket/run/" in worker.log()
