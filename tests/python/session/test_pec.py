"""`pec` in real processes: what its reports say of lost tokens, against a count that knows nothing of a session."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from support.harness import FEWEST
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
    """A worker that is killed by the first of the blows that is for it."""
    fault = next((Fault(each.point, each.step) for each in blows if name in each.victims), None)
    return job.start(name, *[fault] * (fault is not None), gated=True, lineage=True, **options)


def gate_of(blows):
    """Step before which all wait: after a blow that some survive, so that the others can come back."""
    return blows[0].step + 2 if blows and blows[0].victims != NAMES else EVERYTHING


def run(job, blows, steps, **options):
    """Trains to the end through all blows; the checked recoveries."""
    job.open_gate(gate_of(blows))
    running = {name: start_next(job, name, blows, steps=steps, **options) for name in NAMES}
    for at, blow in enumerate(blows):
        left = blows[at + 1 :]
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
    settings = {"preset": "pec", "checkpoint_dir": str(tmp_path / "saved"), **FEWEST, "rebalance_every": 0}
    return start_job(len(NAMES), **settings | options)


@pytest.mark.parametrize(
    "blow",
    [Blow(30, "b"), Blow(30), Blow(31, gone="c"), Blow(31, gone=NAMES), Blow(30, point="copy")],
    ids=["one", "all", "all and a node", "all and every node", "all as copies begin"],
)
def test_a_fault_costs_what_the_report_says(start_job, tmp_path, blow):
    job = start(start_job, tmp_path, experts_per_snapshot=2, experts_per_save=1, save_every=3)
    found = run(job, [blow], 60)
    assert len(found[0].reports) == len(NAMES)
    assert any(each.is_new and each.state.lost_now for each in found)
