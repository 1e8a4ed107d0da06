"""Jobs whose checkpoints are in S3 or Azure, on a real server: that is killed, started again, or all that is left."""

from __future__ import annotations

import signal

import pytest

from evermoe.checkpoint.checkpoint_store import find, find_manifests
from evermoe.checkpoint.manifest import SAVE
from evermoe.checkpoint.object_store import locate
from evermoe.state.training_state import TrainingState
from evermoe.state.version import step_of
from support.harness import FEWEST, wait_until
from support.history import check_history, check_recovered
from support.optimizers import make_optimizer
from support.proxy import Fault as Trouble
from support.proxy import proxy_to
from support.worker import Fault, Model

OPTIMIZER = "sgd"
"""Of jobs of `pec`: it counts nothing for the experts of a layer together, so what is restored is what was saved."""


@pytest.fixture
def url(own_server):
    return f"{own_server.url}/run"


def found(url, limit=20.0):
    """Return the steps of the checkpoints in the store."""
    return sorted(version & (1 << 40) - 1 for version in find(locate(url, patience=limit)))


@pytest.mark.parametrize("faults", [{}, {"b": [Fault("forward", 9)]}], ids=["all live", "a worker dies meanwhile"])
@pytest.mark.few(1)
def test_a_job_continues_while_the_server_of_its_checkpoints_is_killed_and_started_again(
    start_job, own_server, url, faults
):
    job = start_job(checkpoints=url, checkpoint_interval=4, store_timeout=2.0)
    job.open_gate(7)
    workers = job.start_all(faults, gated=True, steps=14, environment=own_server.environment())
    for each in workers:
        each.wait_for("gate", step=7)
    assert found(url) == [4]
    own_server.kill()
    job.open_gate(11)
    left = [each for each in workers if each.name not in faults]
    for each in left:
        each.wait_for("gate", step=11)
    own_server.start()
    job.open_gate(1 << 60)
    assert [each.join() for each in workers] == [-9 if each.name in faults else 0 for each in workers]
    check_history(workers)
    for each in left:
        assert [event["step"] for event in each.events("checkpoint")] == [4, 12, 14]
        assert "the checkpoint of step 8 was not written: rank" in each.log()
    assert any("this recovery does without checkpoints" in each.log() for each in left) == bool(faults)
    assert found(url) == [12, 14]
    assert not any(own_server.secret in each.log() for each in workers)


def test_a_job_starts_elsewhere_from_the_bucket_alone(start_job, own_server, url):
    """Other machines, another region's name and address, another number of workers: nothing but the bucket is left.

    A job that cannot reach the server at its start says so, and stops.
    """
    first = start_job(2, checkpoints=url, checkpoint_interval=4)
    before = first.start_all({}, "ab", steps=6, environment=own_server.environment())
    assert [each.join() for each in before] == [0, 0]
    own_server.kill()
    job = start_job(1, checkpoints=url, store_timeout=1.0)
    (worker,) = job.start_all({}, "a", steps=2, environment=own_server.environment())
    assert worker.join() == 1
    assert "ConnectionRefusedError" in worker.log() and f"{url}/" in worker.log()
    own_server.move()
    own_server.start()
    elsewhere = start_job(3, checkpoints=url)
    region = own_server.environment() | {"AWS_REGION": "eu-central-1"}
    after = elsewhere.start_all({}, steps=12, environment=region)
    assert [each.join() for each in after] == [0, 0, 0]
    for each in after:
        assert check_recovered(before, each)["step"] == 6
        assert each.events("done")[0]["step"] == 12
    check_history(after)


# ---- single units


def saved(url, limit=20.0):
    """Return the durable units of `pec`, by unit and step."""
    model = Model()
    layout = TrainingState(model, make_optimizer(OPTIMIZER, model)).catalog.layout
    found = find_manifests(locate(url, patience=limit), layout, (SAVE,))
    return {(each.unit, step_of(each.version)): each for manifest in found for each in manifest.saved}


def restored(worker):
    """Return digests of the state with which the worker resumed after its latest recovery."""
    recovered = worker.events("recovered")[-1]
    return [each for each in worker.events("copy", after="phase") if each["time"] <= recovered["time"]][-1]["digests"]


def test_experts_of_a_node_that_is_gone_come_back_from_the_bucket(start_job, own_server, url):
    job = start_job(3, preset="pec", checkpoints=url, **FEWEST, rebalance_interval=0, join_interval=50)
    job.open_gate(6)
    options = {"gated": True, "environment": own_server.environment(), "optimizer": OPTIMIZER}
    workers = a, b, c = job.start_all({}, steps=10, **options)
    for each in workers:
        each.wait_for("gate", step=6)
    wait_until(lambda: {step for unit, step in saved(url) if unit == "session"} >= {6}, "step 6 is saved")
    b.signal(signal.SIGKILL)
    b.process.join()
    job.lose_node("b")
    before = saved(url)
    job.open_gate(1 << 60)
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    for each in (a, c):
        recovered = each.events("recovered")[-1]
        assert (recovered["step"], recovered["steps_lost"], recovered["lost_units"]) == (6, 0, [])
        stale, digests = recovered["stale"], restored(each)
        assert stale, "one member alone had these experts"
        found = {unit: before[unit, step] for unit, step in stale.items() if unit in digests}
        assert {unit: digests[unit] for unit in found} == {unit: entry.digest for unit, entry in found.items()}
        assert "cannot be saved" not in each.log() and "the save of step" not in each.log()
    assert {unit for each in (a, c) for unit in restored(each)} >= stale.keys()


def test_a_job_of_pec_starts_elsewhere_from_the_bucket_alone(start_job, own_server, url):
    first = start_job(3, preset="pec", checkpoints=url, **FEWEST)
    first.open_gate(6)
    options = {"environment": own_server.environment(), "optimizer": OPTIMIZER}
    before = first.start_all({}, gated=True, steps=10, **options)
    for each in before:
        each.wait_for("gate", step=6)
    wait_until(lambda: {step for unit, step in saved(url) if unit == "session"} >= {6}, "step 6 is saved")
    for each in before:
        each.signal(signal.SIGKILL)
    assert [each.join() for each in before] == [-9, -9, -9]
    held = saved(url)
    elsewhere = start_job(2, preset="pec", checkpoints=url)
    after = elsewhere.start_all({}, "de", steps=9, **options)
    assert [each.join() for each in after] == [0, 0]
    check_history(after)
    for each in after:
        recovered = each.events("recovered")[0]
        assert recovered["lost_units"] == []
        assert recovered["step"] in (5, 6), "not all members had saved their part of the last step"
        digests = restored(each)
        for unit in digests.keys() - {"session"}:  # which counts what was lost
            step = recovered["stale"].get(unit, recovered["step"])
            assert held[unit, step].digest == digests[unit], (unit, step)
        assert each.events("done")[0]["step"] == 9
    assert found(url) == [9]


@pytest.mark.parametrize("faults", [{}, {"b": [Fault("forward", 9)]}], ids=["all live", "a worker dies meanwhile"])
@pytest.mark.long
def test_pec_continues_while_its_server_is_killed_and_started_again(start_job, own_server, url, faults):
    job = start_job(preset="pec", checkpoints=url, store_timeout=2.0, replication=2)
    job.open_gate(7)
    options = {"gated": True, "environment": own_server.environment(), "optimizer": OPTIMIZER}
    workers = job.start_all(faults, steps=14, **options)
    for each in workers:
        each.wait_for("gate", step=7)
    own_server.kill()
    job.open_gate(12)
    left = [each for each in workers if each.name not in faults]
    for each in left:
        each.wait_for("gate", step=12)
        assert each.events("measured")[-1]["lag"]["persisted"] >= 4
    own_server.start()
    job.open_gate(13)
    wait_until(lambda: max(step for unit, step in saved(url) if unit == "session") >= 12, "saves continue")
    job.open_gate(1 << 60)
    assert [each.join() for each in workers] == [-9 if each.name in faults else 0 for each in workers]
    check_history(workers)
    assert any("the save of step" in each.log() for each in left)
    assert any(f"units cannot be saved to {url}" in each.log() for each in left) == bool(faults)


@pytest.mark.parametrize("faults", [{}, {"b": [Fault("forward", 7)]}], ids=["all live", "a worker dies meanwhile"])
@pytest.mark.long
def test_a_store_that_answers_nothing_holds_up_no_step_of_pec(start_job, own_server, url, faults):
    """Requests hang, also those that are under way; a recovery gives up on the store after its seconds."""
    with proxy_to(own_server.port) as proxy:
        job = start_job(preset="pec", checkpoints=url, replication=2, hang_timeout=60.0)
        job.open_gate(5)
        options = {"gated": True, "environment": own_server.environment(proxy.port), "optimizer": OPTIMIZER}
        workers = job.start_all(faults, steps=14, **options)
        for each in workers:
            each.wait_for("gate", step=5)
        proxy.fault = lambda request: Trouble("hold")
        job.open_gate(12)
        left = [each for each in workers if each.name not in faults]
        for each in left:
            each.wait_for("gate", step=12, limit=90.0)
            assert each.events("measured")[-1]["lag"]["persisted"] >= 6
            if faults:
                recovered = each.events("recovered")[-1]
                assert recovered["time"] - recovered["started_at"] < 45
                assert any(f"units cannot be saved to {url}: " in one.log() for one in left)
        proxy.reset()
        job.open_gate(13)
        wait_until(lambda: max(step for unit, step in saved(url) if unit == "session") >= 12, "saves continue")
        job.open_gate(1 << 60)
        assert [each.join() for each in workers] == [-9 if each.name in faults else 0 for each in workers]
    check_history(workers)
