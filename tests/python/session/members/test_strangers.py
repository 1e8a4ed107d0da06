"""Whatever strangers send to the Lighthouse, members warn once and continue; another protocol is named."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest

from evermoe._native import PROTOCOL, encode_promotion
from evermoe.comm._torchft import torchft
from evermoe.comm.messages import Identity, Messages
from support.history import check_history
from support.messages import told

HALF = {"layout": "5e", "options": {}, "arithmetic": "", "job": "other", "standing": {}}
"""Some of the fields that members send."""


def send(job, sender, data, until):
    """Asks the Lighthouse as a member does, until it shall no more."""
    client = torchft().coordination.LighthouseClient(job.address, timedelta(seconds=5))
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


@pytest.mark.parametrize(
    "data",
    [
        None,
        HALF,
        {"evermoe": PROTOCOL, "job": "any", "established": True, "message": "{}"},
        {"evermoe": PROTOCOL + 1, "job": "another", "established": True},
        {"evermoe": [], "message": {"evermoe": {}}},
    ],
    ids=["nothing", "half", "empty", "newer", "nonsense"],
)
def test_strangers_message_is_ignored_with_one_warning(start_job, stranger, data):
    job = start_job(2)
    stranger(job, "0-stranger", data)
    workers = job.start_all({}, "ab", steps=12)
    assert [each.join() for each in workers] == [0, 0]
    check_history(workers)
    for each in workers:
        assert each.log().count("ignoring '0-stranger'") == 1, each.log()


def test_deep_data_are_a_strangers(caplog):
    deep = {}
    for _ in range(100_000):
        deep = {"message": deep}
    messages = Messages("a", Identity("job", "layout"), "http://lighthouse", None)
    members = [SimpleNamespace(replica_id="deep", data=deep), SimpleNamespace(replica_id="odd", data={"\ud800": 1})]
    for _ in range(2):
        assert messages.read_members(members, is_established=False) == []
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "ignoring 'deep' at the Lighthouse",
        "ignoring 'odd' at the Lighthouse",
    ]


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


def test_member_of_another_protocol_is_refused_on_its_own_side(start_job, stranger):
    job = start_job(1)
    stranger(job, "0-old", {"evermoe": PROTOCOL + 1, "job": job.name, "established": True, "new": {}})
    worker = job.start("a")
    assert worker.join() == 1
    failed = worker.events("failed")[0]
    assert failed["error"] == "ValueError"
    assert (
        f"speaks protocol {PROTOCOL} and that of 0-old in job '{job.name}' protocol {PROTOCOL + 1}" in failed["message"]
    )


def test_running_job_ignores_a_member_of_another_protocol(start_job, stranger):
    job = start_job(2)
    job.open_gate(4)
    workers = job.start_all({}, "ab", gated=True, steps=20)
    workers[0].wait_for("gate", step=4)
    stranger(job, "0-new", {"evermoe": PROTOCOL + 1, "job": job.name, "established": False})
    job.open_gate(20)
    assert [each.join() for each in workers] == [0, 0]
    check_history(workers)
    for each in workers:
        assert f"ignoring '0-new' at the Lighthouse: it speaks protocol {PROTOCOL + 1}" in each.log()
