"""Waits for other members on the CPU: signals interrupt them, and forked processes leave the connections open."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from evermoe.errors import PeerLost
from support.harness import PATIENCE
from support.ranks import run_ranks


class Interrupted(Exception):
    """Raised by a signal handler."""


def wait_with_a_handler(group, folder, raises):
    """Rank 1 sends only once rank 0's handler has run, which waits in the main thread."""
    came = Path(folder) / f"came {raises}"

    def handle(number, frame):
        came.touch()
        if raises:
            raise Interrupted

    mine = torch.zeros(1)
    if group.rank == 0:
        signal.signal(signal.SIGUSR1, handle)
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        if raises:
            with pytest.raises(Interrupted):
                group.exchange([], [(mine, 1)])
            return group.broken, 0.0
        group.exchange([], [(mine, 1)])
    else:
        end = time.monotonic() + PATIENCE
        while not came.exists() and time.monotonic() < end:
            time.sleep(0.01)
        if not raises:
            group.exchange([(torch.ones(1), 0)], [])
    return group.broken, float(mine)


def test_a_signal_is_handled_while_its_member_waits_and_the_wait_continues(tmp_path):
    assert run_ranks(tmp_path, 2, wait_with_a_handler, str(tmp_path), False) == [(None, 1.0), (None, 0.0)]


def end_by_a_handler(group, folder):
    found = wait_with_a_handler(group, folder, True)
    with pytest.raises(PeerLost, match="a signal has ended the wait" if group.rank == 0 else "closed"):
        group.all_reduce(torch.zeros(1))
    group.rebuild(None, 0, 1, torch.device("cpu"), group._mesh.timeout)
    return found


def test_the_exception_of_a_signal_handler_ends_a_wait_and_the_connections(tmp_path):
    run_ranks(tmp_path, 2, end_by_a_handler, str(tmp_path))


def free_in_a_fork(group):
    child = os.fork()
    if child == 0:
        group._mesh._native = None
        os._exit(0)
    os.waitpid(child, 0)
    return float(group.all_reduce(torch.ones(1)))


def test_a_forked_process_that_frees_its_copy_leaves_the_connections_open(tmp_path):
    assert run_ranks(tmp_path, 2, free_in_a_fork) == [2.0, 2.0]
