"""The time of each step, the lag of copies and the losses that would be survived, as real jobs report them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evermoe import Checkpoints, ElasticSampler, Expert, Experts, Membership, Session
from evermoe.events import Begin, Checkpoint, Measured, Recovered
from evermoe.session.measures import IMBALANCE_EVERY, imbalances
from support.disks import fill, free
from support.harness import FEWEST, PATIENCE
from support.worker import SAMPLES, Fault, Model, dataset, wait_until_written

BATCH, TOKENS = 12, 8
"""Samples of a step, and tokens of each, in `support.worker`."""


def largest(tokens):
    """Tokens of the busiest expert over the mean, in the layer where that is largest."""
    return max(max(load) / np.mean(load) for load in tokens.values())


@pytest.mark.parametrize(
    ("preset", "lag"),
    [
        ("auto", {"replayed": {0}}),
        ("moetion", {"replayed": {*range(12)}}),
        ("lazarus", {}),
        ("gemini", {"snapshot": {0, 1}}),
    ],
)
@pytest.mark.few(2)
def test_each_step_is_measured_as_the_preset_copies(start_job, preset, lag):
    options = {
        "auto": FEWEST,
        "gemini": FEWEST,
        "moetion": FEWEST | {"profile_steps": 0},
    }  # else its budget is measured
    job = start_job(3, preset=preset, **options.get(preset, {}))
    workers = job.start_all({}, steps=11)
    assert [each.join() for each in workers] == [0, 0, 0], workers[0].log()
    found = {}
    for each in workers:
        measured = each.events("measured")
        assert [event["step"] for event in measured] == [*range(11)]
        assert {event["tokens"] for event in measured} == {BATCH * TOKENS}
        begun, ended = each.events("recovered")[-1]["time"], measured[-1]["time"]
        assert 0 < sum(event["seconds"] for event in measured) <= ended - begun + 0.1
        assert all(1 <= event["imbalance"] <= 3 for event in measured)
        copies = {event["step"]: event["tokens"] for event in each.events("copy") if event["after"] == "update"}
        for event in measured:
            counted = event["step"] // IMBALANCE_EVERY * IMBALANCE_EVERY
            assert event["expert_imbalance"] == pytest.approx(largest(copies[counted + 1]))
        for kind in {kind for event in measured for kind in event["lag"]}:
            found.setdefault(kind, set()).update(event["lag"][kind] for event in measured)
    assert found.keys() - {"local"} == lag.keys()
    for kind, steps in lag.items():
        assert found[kind] <= steps
    if preset == "gemini":
        check_sent_bytes(workers)
    if preset == "moetion":  # an eighth of the state of ten experts at each step: the oldest is older than that
        for step in range(6, 11):
            lags = [event["lag"].get("replayed", 0) for each in workers for event in each.events("measured", step=step)]
            assert max(lags) >= 4


def check_sent_bytes(workers):
    """Bytes that were sent are those that the threads have sent."""
    for each in workers:
        chunks, last = each.events("chunk_sent"), None
        for event in each.events():
            if event["event"] == "measured":
                sent = event["sent_bytes"]
                assert sent["replayed"] == 0
                assert last is None or last <= sent["snapshot"]
                last = sent["snapshot"]
        # The snapshot of the state after a step is sent during the next one; the first was made in the recovery.
        full = sum(event["total"] for event in chunks if event["sent"] == event["total"] and event["step"] <= 10)
        assert full <= last <= sum(event["total"] for event in chunks if event["sent"] == event["total"])


def test_losses_that_would_be_survived_are_reported_before_and_after_the_copies_are_made(start_job):
    job = start_job(3, **FEWEST)
    workers = a, _, c = job.start_all({"b": [Fault("forward", 5)]}, steps=10)
    assert [each.join() for each in workers] == [0, -9, 0]
    for each in (a, c):
        events = [
            event
            for event in each.events()
            if event["event"] in ("connection_lost", "joined", "coverage_changed", "recovered")
        ]
        start = max(place for place, event in enumerate(events) if event["event"] == "connection_lost")
        names = [event["event"] for event in events[start:]]
        assert names == ["connection_lost", "joined", "coverage_changed", "recovered", "coverage_changed"]
        joined, missing, _, full = events[start + 1 :]
        assert (joined["nodes"], joined["node"], joined["job"]) == (["a", "c"], each.name, job.name)
        assert joined["nodes"][joined["rank"]] == each.name
        assert (missing["is_complete"], full["is_complete"]) == (False, True)
        # What b has kept for others is gone: some units are on one node alone until they are copied.
        assert missing["survives_one"] < 1 == full["survives_one"]
        assert set(missing["fatal"]) & {"a", "c"}
        assert set(full["fatal"]) == {"a + c"}


def test_imbalance_is_that_of_the_worst_layer():
    layers = [Experts(Expert(8, 8), 2), Experts(Expert(8, 8), 3)]
    layers[0].matrix_RE = np.array([[1, 0], [0, 1]])
    layers[1].matrix_RE = np.array([[1, 1, 1], [1, 1, 1]])
    load_LE = np.array([[3, 1, 99], [1, 1, 4]])
    assert imbalances(load_LE, layers) == (1.5, 2.0)
    layers[0].matrix_RE = np.array([[1, 1], [1, 1]])
    assert imbalances(load_LE, layers) == (1.0, 2.0)
    assert imbalances(np.zeros((2, 3), int), layers) is None


def train(listen, steps, model=None, before=lambda session: None, **options):
    """Trains alone in this process."""
    model = model or Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    session = Session(model, optimizer, ElasticSampler(SAMPLES, 4), on_event=listen, **options)
    for step in session.steps(steps):
        before(session)
        with step:
            step.backward(model(dataset()[step.indices]))


def test_a_full_disk_is_a_lag_until_there_is_room_again(tmp_path, small_disk):
    events = []

    def listen(event):
        events.append(event)
        if isinstance(event, Begin):
            {3: lambda: fill(small_disk), 8: lambda: free(small_disk)}.get(event.step, lambda: None)()

    with pytest.warns(UserWarning, match="the checkpoint of step [34] was not written: .*No space left"):
        train(listen, 14, before=wait_until_written, checkpoints=Checkpoints(small_disk, interval=1))
    published = 0
    for event in events:
        if isinstance(event, Checkpoint):
            published = event.step
        if isinstance(event, Measured):
            assert event.lag["checkpoint"] == event.step + 1 - published
    lags = [event.lag["checkpoint"] for event in events if isinstance(event, Measured)]
    assert max(lags[:3]) <= 3
    assert max(lags) >= 5
    assert lags[-1] <= 3


def test_the_lag_of_checkpoints_counts_from_those_of_an_earlier_start(tmp_path):
    first, second = [], []
    for seen, steps in ((first, 6), (second, 8)):
        membership = Membership(job="twice", memory_dir=str(tmp_path / f"memory{steps}"))
        train(seen.append, steps, membership=membership, checkpoints=Checkpoints(tmp_path / "saved", interval=4))
    (recovered,) = (event for event in second if isinstance(event, Recovered))
    assert recovered.step == 6
    assert next(event.lag["checkpoint"] for event in second if isinstance(event, Measured)) == 1


def flush(session):
    """Waits until what `pec` has begun to save is on disk."""
    if write := session._driver.saving.saver.under_way:
        write.wait_at_most(PATIENCE)


def test_pec_says_how_far_what_is_on_disk_is_behind(tmp_path):
    events = []
    train(events.append, 6, preset="pec", before=flush, checkpoints=tmp_path / "saved")
    lags = [event.lag["persisted"] for event in events if isinstance(event, Measured)]
    assert len(lags) == 6
    assert set(lags) <= {0, 1}


def test_pec_on_a_full_disk_falls_behind(small_disk):
    events = []

    def listen(event):
        events.append(event)
        if isinstance(event, Begin):
            {4: lambda: fill(small_disk), 11: lambda: free(small_disk)}.get(event.step, lambda: None)()

    with pytest.warns(UserWarning, match="the save of step .* was not written: .*No space left on device"):
        train(listen, 12, preset="pec", checkpoints=small_disk)
    lags = [event.lag["persisted"] for event in events if isinstance(event, Measured)]
    assert lags[10] == lags[5] + 5 >= 6


def test_time_between_steps_counts_and_that_of_a_recovery_does_not(start_job):
    job = start_job(2, **FEWEST, join_interval=1)
    job.open_gate(2)
    slow = Fault("phase fetch", action="slow", seconds=1.5, nth=2)
    a, b = job.start_all({"b": [slow]}, names="ab", steps=8, late=0.3, gated=True)
    a.wait_for("gate", step=2)
    joiner = job.start("c", steps=8, late=0.3)
    joiner.wait_for("phase", phase="agree")
    job.open_gate(8)
    assert [each.join() for each in (a, b, joiner)] == [0, 0, 0]
    recovered, measured = a.events("recovered"), a.events("measured")
    assert len(recovered) == 2
    ends = [event["time"] for event in measured]
    for event in measured:
        since = max(each["time"] for each in [*recovered, *measured] if each["time"] < event["time"])
        assert 0.3 * (since in ends) < event["seconds"] <= event["time"] - since + 0.1
