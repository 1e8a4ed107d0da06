"""The state of a unit whose replica is damaged is sent again, in windows of a step."""

from __future__ import annotations

from evermoe._native import RECORD_HEADER_BYTES
from evermoe.copies.replay.part import parts_of
from evermoe.state.training_state import TrainingState
from support.early_states import EarlyStatesWorker
from support.harness import FEWEST
from support.history import check_history, check_recovered
from support.optimizers import make_optimizer
from support.worker import Fault, Model

FLIPPED, KILLED = 10, 24
BUSY = 60
"""Multiplications in a step, during which the network is idle."""


def test_a_damaged_replica_gets_its_state_again_in_windows(start_job):
    """Of the units that were flipped, and of no others, full states travel once; then they serve a recovery."""
    job = start_job(2, preset="auto", **FEWEST, rebalance_interval=0, join_interval=50, profile_steps=4)
    faults = {"a": [Fault("vote", FLIPPED, "flip")], "b": [Fault("vote", KILLED)]}
    workers = a, b = [
        job.start(name, *faults[name], kind=EarlyStatesWorker, steps=KILLED + 4, work=BUSY) for name in "ab"
    ]
    assert [each.join() for each in workers] == [0, -9], a.log()
    flipped = set(a.events("flipped")[0]["units"])
    assert flipped
    assert {event["unit"] for event in a.events("damaged")} == flipped
    came = [record for event in a.events("early") for record in event["came"]]
    assert sorted(came) == sorted(nbytes for unit in flipped for nbytes in record_bytes(unit))
    sent = {when: sum(event["sent"].get(when, 0) for event in b.events("early")) for when in ("window", "idle")}
    assert sum(sum(event["sent"].values()) for event in b.events("early")) == sum(came)
    assert sent["window"], sent  # how much finds room there is for the machine to decide
    assert all(FLIPPED < event["step"] < KILLED for event in b.events("early"))
    check_history(workers)
    recovered = check_recovered(workers, a)
    assert (recovered["step"], recovered["steps_lost"], recovered["stale"]) == (KILLED, 0, {})


def record_bytes(unit):
    """Return the bytes of the records that carry a unit's full state."""
    model = Model()
    catalog = TrainingState(model, make_optimizer("adamw", model)).catalog
    return [RECORD_HEADER_BYTES + sum(spec.nbytes for spec in specs) for specs in parts_of(catalog.by_name[unit])]
