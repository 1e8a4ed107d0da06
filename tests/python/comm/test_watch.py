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


@pytest.fixture
def watched():
    """A member's watch in a step of group 7, its group, and whether it says to another one that it computes."""
    group, unused = Group(), Group()
    unused.drop("there are no replica nodes")
    here, there = (Reach(name, Place(LOOPBACK, LOOPBACK)) for name in "ab")
    limits = {"heartbeat_limit": 9.0, "hang_limit": 9.0}
    watch = GroupWatch(here, [group, unused], **limits, on_silent=lambda why: None, on_left_out=lambda: None)
    watch.begin(7, {"b": there.address}, 0)
    watch.step_begins()

    def computes():
        there.look_around({"a": here.address}, [])
        return there.said["a"][0] == 7

    yield group, computes
    watch.end()


@pytest.mark.parametrize("fails", [False, True])
def test_a_member_whose_wait_failed_does_not_say_that_it_computes(watched, fails):
    """Or those who ask next would take it, too, for one that they have waited for."""
    group, computes = watched
    assert computes()
    group.on_wait(True)
    group.on_wait(False, not fails)  # the group is not dropped yet
    assert computes() != fails


def test_what_ends_after_the_group_has_broken_does_not_say_so_either(watched):
    """Copies of the interrupted step, for example, which were complete."""
    group, computes = watched
    group.on_wait(True)
    group.drop("others did not come")
    group.on_wait(False, False)
    group.on_wait(True)
    group.on_wait(False, True)
    assert not computes()


def test_who_begins_to_wait_when_the_group_has_broken_was_late(watched):
    group, computes = watched
    group.drop("others have given up")
    group.on_wait(True)
    assert computes()
