"""Strangers at the Lighthouse: members warn once and continue. An operator's promotion."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest

from evermoe._native import PROTOCOL, encode_promotion
from evermoe.comm._torchft import coordination
from evermoe.comm.messages import Identity, Messages
from support.history import check_history
from support.messages import told


def send(job, sender, data, until):
    """Asks the Lighthouse as a member does, until it shall no more."""
    client = coordination().LighthouseClient(job.address, timedelta(seconds=5))
    while not until.is_set():
        try:
            client.quorum(sender, timedelta(seconds=2), world_size=1, data=data)
        except (RuntimeError, TimeoutError):
            until.wait(0.05)  # a set that it asked too late for


@pytest.fixture
def stranger(start_job):
    """`stranger(job, id, data)` sends something to a job's Lighthouse until the test, or `until`, is over."""
    threads = []

    def start(job, sender, data, until=None):
        until = until or threading.Event()
        thread = threading.Thread(target=send, args=(job, sender, data, until), daemon=True)
        thread.start()
        threads.append((thread, until))

    yield start
    for thread, until in threads:
        until.set()
        thread.join(10)
        assert not thread.is_alive()


def test_operators_word_is_of_no_use_once_the_members_have_gone_on():
    messages = Messages("a", Identity("job", "layout"), "http://lighthouse", None)

    def is_promoted(newest, *words):
        data = {"a": told(messages, newest)} | {f"p{at}": json.loads(word) for at, word in enumerate(words)}
        members = [SimpleNamespace(replica_id=name, data=each) for name, each in data.items()]
        assert len(messages.read_members(members, is_established=True)) == 1
        return messages.is_promoted

    def word(generation, job="job"):
        return encode_promotion("p0", job, generation)

    assert not is_promoted(3)
    assert not is_promoted(3, word(None))
    assert is_promoted(3, word(3))
    assert not is_promoted(4, word(3))
    assert not is_promoted(3, word(3, "another"))


def test_a_job_ignores_strangers_and_a_member_of_another_protocol_with_one_warning_each(start_job, stranger):
    """`comm/test_messages.py` has all kinds of messages."""
    job = start_job(2)
    stranger(job, "0-stranger", None)
    job.open_gate(4)
    workers = job.start_all({}, "ab", gated=True, steps=20)
    workers[0].wait_for("gate", step=4)
    stranger(job, "0-new", {"evermoe": PROTOCOL + 1, "job": job.name, "established": False})
    job.open_gate(20)
    assert [each.join() for each in workers] == [0, 0]
    check_history(workers)
    for each in workers:
        assert each.log().count("ignoring '0-stranger'") == 1, each.log()
        assert f"ignoring '0-new' at the Lighthouse: it speaks protocol {PROTOCOL + 1}" in each.log()
