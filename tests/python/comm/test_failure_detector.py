"""The failure detector: it detects the end of a process at once, even if it rarely probes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading

import pytest

from evermoe._native import FailureDetector, ProbeServer, probe_all
from evermoe.comm.endpoint import LOOPBACK, Endpoint
from evermoe.comm.failure_detector import FailureDetector as GroupWatch
from evermoe.comm.group import Group
from evermoe.comm.reachability import Reachability
from support.harness import PATIENCE, SERVER

HOUR = 3_600_000


def answer(connection):
    """Run a member's probe server until the process is killed or asked to leave."""
    server = ProbeServer("a", "127.0.0.1")
    connection.send(server.port)
    connection.recv()


@pytest.fixture
def member():
    ours, theirs = SERVER.Pipe()
    process = SERVER.Process(target=answer, args=(theirs,))
    process.start()
    yield process, ours.recv()
    process.kill()
    process.join()


def seen(watch):
    """Return the finding of the detector, within the time limit of a test."""
    found = []
    thread = threading.Thread(target=lambda: found.append(watch.wait()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found


def test_a_killed_member_is_detected_between_two_probes(member):
    process, port = member
    watch = FailureDetector([("a", f"127.0.0.1:{port}")], 1, HOUR)  # which asks every quarter of an hour
    os.kill(process.pid, 9)
    assert seen(watch) == [(["a"], True, None)]


def open_and_fork(connection):
    """Run a probe server, and a child that inherits open descriptors and outlives the process, like a data loader."""
    server = ProbeServer("a", "127.0.0.1")
    child = os.fork()
    if not child:
        while True:
            signal.pause()
    connection.send((server.port, child))
    connection.recv()


def test_a_killed_member_is_detected_although_a_child_lives():
    ours, theirs = SERVER.Pipe()
    process = SERVER.Process(target=open_and_fork, args=(theirs,))
    process.start()
    port, child = ours.recv()
    try:
        watch = FailureDetector([("a", f"127.0.0.1:{port}")], 1, HOUR)
        process.kill()
        assert seen(watch) == [(["a"], True, None)]
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)
        process.join()


def test_a_probe_server_answers_many_probes_and_slow_ones():
    server = ProbeServer("a", "127.0.0.1")
    address = ("127.0.0.1", server.port)
    with contextlib.ExitStack() as visits:
        silent = [visits.enter_context(socket.create_connection(address)) for _ in range(100)]
        slow = visits.enter_context(socket.create_connection(address))
        for byte in bytes(16):  # two probes, each a nonce of 8 bytes
            slow.send(bytes([byte]))
        slow.settimeout(PATIENCE)
        assert len(slow.makefile("rb").read(48)) == 48  # what it says in 16 bytes, and 8 that prove it, twice
        assert probe_all([("a", f"127.0.0.1:{server.port}")] * 50, round(1000 * PATIENCE)) == ([(0, 0)] * 50, [])
        del server
        for each in silent:
            each.settimeout(PATIENCE)
            assert each.recv(1) == b""
    answers, _ = probe_all([("a", f"127.0.0.1:{address[1]}")], round(1000 * PATIENCE))
    assert answers == [None]  # refused, unless another process has the port now


def test_a_stopped_detector_finds_nothing(member):
    _, port = member
    watch = FailureDetector([("a", f"127.0.0.1:{port}")], 1, HOUR)
    watch.stop()
    assert seen(watch) == [([], False, None)]


@pytest.fixture
def watched():
    """Yield the group of a member in a step, and a function: whether its probe server reports that it computes."""
    group, unused = Group(), Group()
    unused.drop("there are no replica nodes")
    ours, theirs = (Reachability(name, Endpoint(LOOPBACK, LOOPBACK)) for name in "ab")
    limits = {"heartbeat_timeout": 9.0, "hang_timeout": 9.0}
    watch = GroupWatch(ours, [group, unused], **limits, on_silent=lambda why: None, on_left_out=lambda: None)
    watch.begin_watch(7, {"b": theirs.address}, 0)
    watch.activity.begin_step()

    def computes():
        theirs.probe_group({"a": ours.address}, [])
        return theirs.answers["a"][0] == 7

    yield group, computes
    watch.end_watch()


@pytest.mark.parametrize("fails", [False, True])
def test_a_member_whose_wait_failed_does_not_report_that_it_computes(watched, fails):
    """Otherwise members that probe next would count it among those that they have waited for."""
    group, computes = watched
    assert computes()
    group.on_wait(True)
    group.on_wait(False, not fails)  # the group is not dropped yet
    assert computes() != fails


def test_a_wait_that_succeeds_after_the_group_broke_does_not_report_it_either(watched):
    """Such as a wait for copies of the interrupted step that were complete."""
    group, computes = watched
    group.on_wait(True)
    group.drop("others did not come")
    group.on_wait(False, False)
    group.on_wait(True)
    group.on_wait(False, True)
    assert not computes()


def test_a_member_that_begins_to_wait_after_the_group_broke_was_late(watched):
    group, computes = watched
    group.drop("others have given up")
    group.on_wait(True)
    assert computes()
