"""The watch over members: a process that ends is noticed at once, however rarely its members are asked."""

from __future__ import annotations

import os
import threading

import pytest

from evermoe._native import Door, Watch
from evermoe.comm.group import Group
from evermoe.comm.reach import LOOPBACK, Place, Reach
from evermoe.comm.watch import Watch as GroupWatch
from support.harness import PATIENCE, SERVER

HOUR = 3_600_000


def answer(connection):
    """A member's door, until the process is killed or told to leave."""
    door = Door("a", "127.0.0.1")
    connection.send(door.port)
    connection.recv()


@pytest.fixture
def member():
    here, there = SERVER.Pipe()
    process = SERVER.Process(target=answer, args=(there,))
    process.start()
    yield process, here.recv()
    process.kill()
    process.join()


def seen(watch):
    """What the watch sees, within the patience of a test."""
    found = []
    thread = threading.Thread(target=lambda: found.append(watch.wait()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found


def test_a_killed_member_is_noticed_between_two_questions(member):
    process, port = member
    watch = Watch([("a", f"127.0.0.1:{port}")], 1, HOUR)  # which asks every quarter of an hour
    os.kill(process.pid, 9)
    assert seen(watch) == [(["a"], None)]


def test_a_watch_that_is_stopped_sees_nothing(member):
    _, port = member
    watch = Watch([("a", f"127.0.0.1:{port}")], 1, HOUR)
    watch.stop()
    assert seen(watch) == [([], None)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_member_whose_wait_failed_does_not_say_that_it_computes(fails):
    """Or those who ask next would take it, too, for one that they have waited for."""
    group, here, there = Group(), *(Reach(name, Place(LOOPBACK, LOOPBACK)) for name in "ab")
    limits = {"heartbeat_limit": 9.0, "hang_limit": 9.0}
    watch = GroupWatch(here, [group], **limits, on_silent=lambda why: None, on_left_out=lambda: None)
    watch.begin(7, {"b": there.address}, 0)
    watch.step_begins()
    group.on_wait(True)
    group.on_wait(False, not fails)  # the group is not dropped yet
    there.look_around({"a": here.address}, [])
    watch.end()
    assert there.said["a"][0] == (0 if fails else 7)
