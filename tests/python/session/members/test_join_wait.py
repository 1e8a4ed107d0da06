"""Newcomers that are let in together, after a time in which others may come: Lazarus' scaling up."""

from __future__ import annotations

import pytest
import torch

import evermoe
from support.harness import wait_until
from support.history import check_history
from support.worker import EVERYTHING

WAIT = 4.0
"""Seconds that newcomers are collected for: longer than one takes to come."""


def start(start_job, names="ab", **session):
    """Members that are held at a step, in a job that collects newcomers."""
    job = start_job(len(names), join_wait=WAIT, **session)
    job.open_gate(8)
    workers = job.start_all({}, names, gated=True, steps=400, slow=0.05)
    for each in workers:
        each.wait_for("gate", step=8)
    return job, workers


def heard(job, *members):
    """When the Lighthouse named a newcomer together with one of the members, which reads that in one of its steps."""

    def times():
        found = [
            event["time"]
            for each in members
            for event in each.events("protocol")
            if event["said"].get("event") == "overheard"
            and any(not each["standing"]["established"] for each in event["said"]["participants"])
        ]
        if not found:
            job.open_gate(1 + min(each.events("gate")[-1]["step"] for each in members))
        return found

    return min(wait_until(times, "a member hears of the newcomer"))


def test_newcomers_of_some_seconds_come_in_together(start_job):
    job, (a, b) = start(start_job)
    job.take_in(c := job.start("c", steps=400), until=13)
    since = heard(job, a, b)
    d = job.start("d", steps=400)
    d.wait_for("phase", phase="agree")
    job.open_gate(EVERYTHING)
    joined = a.wait_for("recovered", members=4, limit=60.0)
    assert [event["members"] for event in a.events("recovered")] == [2, 4]
    assert joined["time"] - since > WAIT
    for each in (a, b, c, d):
        each.wait_for("commit", members=4)
        each.process.kill()
    check_history([a, b, c, d])


@pytest.mark.long
def test_a_loss_lets_newcomers_in_at_once(start_job):
    job, (a, b, c) = start(start_job, "abc", replication=3)
    job.take_in(d := job.start("d", steps=400), until=13)
    since = heard(job, a, b, c)
    c.process.kill()
    job.open_gate(EVERYTHING)
    joined = a.wait_for("recovered", count=2)
    assert (joined["members"], joined["failure"]) == (3, "process")
    assert joined["time"] - since < WAIT
    for each in (a, b, d):
        each.wait_for("commit", generation=joined_generation(a))
        each.process.kill()


def joined_generation(worker):
    return worker.events("joined")[-1]["generation"]


def test_newcomers_must_not_wait_longer_than_they_look_for_an_agreement():
    with pytest.raises(
        ValueError, match="join_wait = 60 s, and give up after quorum_timeout = 60 s: expected a shorter"
    ):
        evermoe.Membership(join_wait=60, quorum_timeout=60)


def test_lazarus_splits_tokens_evenly_unless_the_layer_says_how():
    torch.manual_seed(0)
    for given, preset, expected in (
        (None, "lazarus", "even"),
        (None, "auto", "balanced"),
        ("balanced", "lazarus", "balanced"),
        ("even", "auto", "even"),
    ):
        layer = evermoe.MoE(8, 8, 4, token_split=given)
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
        session = evermoe.Session(layer, optimizer, evermoe.ElasticSampler(16, 4), preset=preset, replication=1)
        assert layer.experts.token_split == expected
        session.close()
