"""A wall clock that is set while members wait: gloo's waits follow it, those of a session do not."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from evermoe.comm import waits as waits_module
from evermoe.comm.endpoint import LOOPBACK, Endpoint
from evermoe.comm.failure_detector import FailureDetector
from evermoe.comm.group import Group
from evermoe.comm.reachability import Reachability
from evermoe.comm.waits import Wait
from evermoe.errors import PeerLost
from support.harness import PATIENCE
from support.ranks import members, run_ranks

HOUR = 3600.0


def waits_for_an_absent_rank(group, folder):
    """Return the seconds until a collective ends. Gloo alone would end it in an hour, as the clock was set back."""
    found, _ = members(group, folder, HOUR)
    result = None
    if group.rank == 0:
        unused, offset = Group(), [0.0]
        unused.drop("there are no replica nodes")
        ours, theirs = (Reachability(name, Endpoint(LOOPBACK, LOOPBACK)) for name in "ab")
        watch = FailureDetector(
            ours,
            [found, unused],
            heartbeat_timeout=HOUR,
            hang_timeout=1.0,
            on_silent=found.drop,
            on_left_out=lambda: None,
        )
        watch.begin_watch(7, {"b": theirs.address}, 0)
        wall = time.time
        waits_module.time = SimpleNamespace(monotonic=time.monotonic, time=lambda: wall() - offset[0])
        threading.Timer(0.2, lambda: offset.__setitem__(0, HOUR)).start()
        began = time.monotonic()
        with pytest.raises(PeerLost):
            found.all_reduce(torch.zeros(1))
        result = time.monotonic() - began, found.timed_out, found.broken
        watch.end_watch()
    group.all_reduce(torch.zeros(1))
    return result


def gives_up_early(group, folder):
    """Return whether members count as late if gloo times out long before the limit, as the clock was set forward."""
    found, _ = members(group, folder, 0.2)
    found._gloo.timeout = timedelta(seconds=HOUR)
    if group.rank == 0:
        with pytest.raises(PeerLost, match=r"(?i)timed out"):
            found.all_reduce(torch.zeros(1))
    group.all_reduce(torch.zeros(1))
    return found.timed_out


def test_a_collective_ends_in_time_though_the_clock_was_set_back(tmp_path):
    seconds, timed_out, why = run_ranks(tmp_path, 2, waits_for_an_absent_rank, str(tmp_path))[0]
    assert 1.0 <= seconds < PATIENCE / 2
    assert timed_out
    assert "the wall clock was set back by 3600 s" in why


def test_no_member_is_late_if_the_clock_was_set_forward(tmp_path):
    assert run_ranks(tmp_path, 2, gives_up_early, str(tmp_path)) == [False, False]


class SetBack:
    """A message for which gloo waits longer than the time by which the clock was set back."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def wait(self, limit: timedelta) -> None:
        self.may_end.wait(limit.total_seconds() + HOUR)


def test_a_wait_for_a_message_times_out_although_the_clock_was_set_back():
    work = SetBack()
    assert "the wall clock was set back" in (Wait(work).run(timedelta(seconds=0.1)) or "")
    work.may_end.set()
