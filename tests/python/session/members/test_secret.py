"""Jobs with a secret: members that have it train, others are ignored, and their own logs say why."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from evermoe._native import ProbeServer, Secret, probe_all
from evermoe.comm.group import Group
from evermoe.comm.messages import SECRET_VARIABLE, job_secret
from evermoe.comm.sealed_store import SealedStore
from support.history import check_history, check_recovered
from support.worker import Fault

RIGHT, WRONG = "correct horse battery", "another horse battery"
WHY = {
    WRONG: "its EVERMOE_SECRET differs from this worker's",
    None: "it has an EVERMOE_SECRET, this worker has none",
}


def test_job_with_a_secret_starts_despite_a_worker_with_another_and_survives_a_death(start_job):
    job = start_job()
    outside = job.start("0", secret=WRONG)
    outside.wait_for("phase", phase="agree")
    workers = job.start_all({"b": [Fault("vote", 5)]}, secret=RIGHT)
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    for survivor in workers[::2]:
        assert check_recovered(workers, survivor)["members"] == 2
    outside.process.kill()
    outside.join()
    assert outside.events("commit") == []


def test_short_secret_is_refused_and_not_repeated(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "hunter2")
    with pytest.raises(ValueError, match="16 characters or more, got 7") as refused:
        job_secret()
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("secret", [WRONG, None], ids=["wrong", "none"])
@pytest.mark.long
def test_worker_without_the_secret_is_ignored_and_its_log_says_why(start_job, secret):
    job = start_job(2)
    workers = job.start_all({}, "ab", steps=100_000, secret=RIGHT)
    workers[0].wait_for("commit", step=6)
    outside = job.start("c", session={"members": 1, "quorum_timeout": 3.0}, secret=secret)
    assert outside.join() == 1
    failed = outside.events("failed")[0]
    assert failed["error"] == "JoinTimeout"
    assert f"claims to be of job '{job.name}', but {WHY[secret]}" in failed["message"]
    assert outside.events("commit") == [], "it does not start the job again, although it waits for one member alone"
    last = workers[0].events("commit")[-1]["step"]
    workers[0].wait_for("commit", step=last + 20)
    for each in workers:
        each.process.kill()
        assert each.join() == -9
        assert each.log().count("ignoring 'c-") == 1, each.log()
        assert len({event["pid"] for event in each.events()}) == 1
    check_history(workers)


def expected_tag(secret, purpose, *parts):
    """As `src/secret.rs` says, by Python's own HMAC."""
    text = b"".join(struct.pack("<Q", len(part)) + part for part in (purpose.encode(), *parts))
    return hmac.digest(secret.encode(), text, hashlib.sha256)


def test_tags_are_those_of_pythons_hmac():
    for parts in ([], [b""], [b"a", b"bc"], [bytes(1000)]):
        tag = Secret(RIGHT).tag("a purpose", parts)
        assert tag == expected_tag(RIGHT, "a purpose", *parts)
        assert Secret(RIGHT).is_tag(tag, "a purpose", parts)
        assert not Secret(WRONG).is_tag(tag, "a purpose", parts)


def test_door_answers_those_alone_that_have_the_secret():
    server = ProbeServer("a", "127.0.0.1", Secret(RIGHT))
    members = [("a", f"127.0.0.1:{server.port}")]
    assert probe_all(members, 5000, Secret(RIGHT)) == ([(0, 0)], [])
    assert probe_all([("b", members[0][1])], 5000, Secret(RIGHT)) == ([None], [])
    assert probe_all(members, 5000, Secret(WRONG)) == ([None], [])
    assert probe_all(members, 300) == ([None], [])
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
        stranger.sendall(bytes(40))
        assert stranger.recv(40) == b"", "it says nothing"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as member:
        member.sendall(b"12345678" + expected_tag(RIGHT, "probe", b"a", b"12345678"))
        said = bytes(16)
        assert member.recv(48) == said + expected_tag(RIGHT, "answer", b"a", b"12345678", said)


def test_open_door_does_not_answer_for_one_with_a_secret():
    server = ProbeServer("a", "127.0.0.1")
    assert probe_all([("a", f"127.0.0.1:{server.port}")], 5000, Secret(RIGHT)) == ([None], [])


def test_store_refuses_what_strangers_have_stored(tmp_path):
    shared = dist.FileStore(str(tmp_path / uuid.uuid4().hex), 1)
    shared.set_timeout(timedelta(seconds=5))
    sealed = SealedStore(shared, Secret(RIGHT))
    sealed.set("epoch/key", b"\x00\xffvalue")
    sealed.wait(["epoch/key"], timedelta(seconds=1))
    assert sealed.check(["epoch/key"])
    assert (sealed.get("epoch/key"), sealed.add("count", 2)) == (b"\x00\xffvalue", 2)
    copied = shared.get("epoch/key")
    for key, value in {"epoch/plain": b"value", "epoch/other": copied, "epoch/empty": b""}.items():
        shared.set(key, value)
        with pytest.raises(RuntimeError, match=f"'{key}' .* was not set by a member with this job's secret"):
            sealed.get(key)
    with pytest.raises(RuntimeError, match="was not set by a member"):
        SealedStore(shared, Secret(WRONG)).get("epoch/key")


def test_group_whose_members_have_different_secrets_is_not_connected(tmp_path):
    def connect(rank, secret):
        shared = dist.FileStore(str(tmp_path / "store"), 2)
        shared.set_timeout(timedelta(seconds=5))
        store = SealedStore(shared, Secret(secret))
        group = Group()
        with pytest.raises(RuntimeError):
            group.rebuild(store, rank, 2, torch.device("cpu"), timedelta(seconds=5))
        group.drop("the test is over")

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(connect, rank, secret) for rank, secret in enumerate([RIGHT, WRONG])]:
            each.result(30)
