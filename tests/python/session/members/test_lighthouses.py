"""Jobs with several Lighthouses: one may go, and two halves of a job never both resume."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from evermoe.comm._torchft import coordination
from evermoe.comm.lighthouse import own_address, start_lighthouse
from evermoe.comm.messages import Identity, Messages
from evermoe.config.membership import Membership, split_addresses
from support.harness import FEWEST, HEARTBEAT_LIMIT, wait_until
from support.history import check_history
from support.messages import told
from support.worker import Fault

JOIN_LIMIT = 5.0


class Lighthouse:
    """One of a job's, on loopback."""

    def __init__(self) -> None:
        self._server = start_lighthouse(heartbeat_timeout=HEARTBEAT_LIMIT, join_timeout=JOIN_LIMIT, bind="127.0.0.1:0")
        self.port = int(self._server.address().rsplit(":", 1)[1])
        self.address = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server = None

    def restart(self) -> None:
        """A new one at the old address, without any memory."""
        bind = f"127.0.0.1:{self.port}"
        self._server = start_lighthouse(heartbeat_timeout=HEARTBEAT_LIMIT, join_timeout=JOIN_LIMIT, bind=bind)


@pytest.fixture
def two():
    lighthouses = [Lighthouse(), Lighthouse()]
    yield lighthouses
    for each in lighthouses:
        each.stop()


def addresses(lighthouses):
    return ",".join(each.address for each in lighthouses)


@pytest.mark.quick("one of several Lighthouses is gone, and members are lost meanwhile")
def test_majority_continues_with_the_next_lighthouse(start_job, two):
    job = start_job(lighthouse=addresses(two), **FEWEST)
    job.open_gate(5)
    workers = job.start_all({"b": [Fault("vote", 7)]}, gated=True, steps=20)
    for each in workers:
        each.wait_for("gate", step=5)
    two[0].stop()
    job.open_gate(20)
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    assert workers[0].events("recovered")[-1]["members"] == 2


@pytest.mark.long
def test_majority_leaves_a_frozen_lighthouse(start_job, two):
    options = f"heartbeat_timeout={HEARTBEAT_LIMIT}, join_timeout={JOIN_LIMIT}, bind='127.0.0.1:0'"
    code = f"from evermoe.comm.lighthouse import *; s = start_lighthouse({options}); print(s.address()); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-u", "-c", code], **pipes) as frozen:
        try:
            first = f"http://127.0.0.1:{frozen.stdout.readline().strip().rsplit(':', 1)[1]}"
            job = start_job(lighthouse=f"{first},{two[1].address}", **FEWEST)
            job.open_gate(5)
            workers = job.start_all({"b": [Fault("vote", 7)]}, gated=True, steps=20)
            for each in workers:
                each.wait_for("gate", step=5)
            frozen.send_signal(signal.SIGSTOP)
            job.open_gate(20)
            assert [each.join() for each in workers] == [0, -9, 0]
            check_history(workers)
        finally:
            frozen.kill()


@pytest.mark.long
def test_newcomer_finds_the_job_at_another_lighthouse_than_the_first(start_job, two):
    """The first one is back without any memory: the newcomer must not begin a job of its own."""
    two[0].stop()
    job = start_job(lighthouse=addresses(two), members=1, join_interval=1)
    job.open_gate(5)
    workers = [job.start("a", gated=True, steps=400)]
    times_moved = lambda: workers[0].log().count(f"{two[0].address} is silent")  # noqa: E731
    wait_until(lambda: times_moved() >= 3, "a new job begins once all have answered")
    assert not workers[0].events("gate")
    two[0].restart()
    workers[0].wait_for("gate", step=5)
    two[0].stop()
    before = times_moved()
    wait_until(lambda: times_moved() > before, "it has moved on")
    two[0].restart()
    workers.append(job.start("b", gated=True, steps=400))
    job.open_gate(400)
    assert [each.join() for each in workers] == [0, 0]
    assert workers[0].events("recovered")[-1]["members"] == 2
    check_history(workers)


@pytest.mark.parametrize("secret", ["", "correct horse battery"])
@pytest.mark.long
def test_minority_waits_for_the_others_or_for_its_operator(start_job, two, monkeypatch, secret):
    monkeypatch.setenv("EVERMOE_SECRET", secret)
    job = start_job(lighthouse=addresses(two), replication=3, quorum_timeout=120.0, **FEWEST)
    workers = job.start_all({name: [Fault("vote", 7)] for name in "bc"}, steps=12, secret=secret or None)
    wait_until(lambda: "1 of the last 3 members are here" in workers[0].log(), "it says that it waits")
    for each in two:
        assert "1 of the last" not in promote(each.address, "another-job", 1).stdout
    assert workers[0].process.is_alive()
    if secret:
        refused = promote(two[0].address, job.name, 3, EVERMOE_SECRET="another horse battery")
        assert (refused.returncode, workers[0].process.is_alive()) == (2, True), refused.stderr
    done = promote(two[0].address, job.name, 40)
    assert done.returncode == 0, done.stderr
    assert f"job {job.name} continues with a-" in done.stdout
    assert [each.join() for each in workers] == [0, -9, -9]
    check_history(workers)


@pytest.mark.parametrize("leaver", [0, 1])
def test_one_of_two_leaves_and_the_other_continues(start_job, two, leaver):
    job = start_job(lighthouse=addresses(two), members=2)
    job.open_gate(5)
    workers = [job.start(name, gated=True, steps=20) for name in "ab"]
    for each in workers:
        each.wait_for("gate", step=5)
    workers[leaver].signal(signal.SIGTERM)
    job.open_gate(20)
    assert workers[leaver].join() == 143
    assert workers[1 - leaver].join() == 0
    check_history(workers)


@pytest.mark.long
def test_members_that_have_heard_a_promotion_and_ask_no_more_have_resumed(two):
    """A short job may be over before the operator's command asks again."""
    messages = Messages("a", Identity("job", "layout"), two[0].address, None)
    client = coordination().LighthouseClient(two[0].address, timedelta(seconds=5))

    def ask_until_promoted():
        while not messages.is_promoted:
            answer = client.quorum("a", timedelta(seconds=5), world_size=1, data=told(messages, generation=3))
            messages.read_members(answer.participants, is_established=True)

    with ThreadPoolExecutor() as pool:
        member = pool.submit(ask_until_promoted)
        done = promote(two[0].address, "job", 10)
        member.result(timeout=20)
    assert (done.returncode, done.stdout.strip()) == (0, "job job continues with a"), done.stderr


def promote(address, job, limit, **environment):
    arguments = ["-m", "evermoe", "lighthouse", "promote", address, "--job", job, "--limit", str(limit)]
    environment = os.environ | environment
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=90, check=False, env=environment
    )


@pytest.mark.parametrize("wrong", ["", "http://a:1,", "http://a:1,b", "http://a:1,http://a:1/", "http://a,http://b:1"])
def test_wrong_addresses_are_refused(wrong):
    with pytest.raises(ValueError, match="lighthouse: expected"):
        split_addresses(wrong)


def test_going_on_alone_with_several_lighthouses_is_refused():
    two = {"lighthouse": "http://localhost:1,http://localhost:2", "job": "x"}
    with pytest.raises(ValueError, match="evermoe lighthouse promote"):
        Membership(**two, allow_solo_resume=True)


@pytest.mark.parametrize("wrong", ["http://localhost", "localhost:29510", "http://localhost:1/path"])
def test_address_to_host_needs_a_port(wrong):
    with pytest.raises(ValueError, match="lighthouse: expected"):
        own_address(wrong)


def test_own_address_is_the_one_of_this_machine_that_nobody_has():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match="another program listens"):
            own_address(f"http://203.0.113.1:{port},http://127.0.0.1:{port}")
    assert own_address(f"http://203.0.113.1:{port},http://127.0.0.1:{port}") == f"127.0.0.1:{port}"
    with pytest.raises(ValueError, match="none of"):
        own_address("http://203.0.113.1:1,http://198.51.100.1:1")
    lighthouse = Lighthouse()
    try:
        assert own_address(lighthouse.address) is None
    finally:
        lighthouse.stop()
