"""Waits for gloo that another thread can end: a second thread waits on behalf of each thread, as long as that lives."""

from __future__ import annotations

import threading
from datetime import timedelta

from evermoe.comm.waits import Wait

LIMIT = timedelta(seconds=30)


class Work:
    """Stand-in for a wait in gloo; it ends when `may_end` is set."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def wait(self, limit: timedelta) -> None:
        assert self.may_end.wait(limit.total_seconds())


def waiters() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "evermoe-wait"]


def in_a_thread(work: Work, times: int) -> list[threading.Thread]:
    """Return the waiters of a thread that has waited this number of times and ended."""
    found: list[threading.Thread] = []
    before = set(waiters())

    def run() -> None:
        for _ in range(times):
            assert Wait(work).run(LIMIT) is None
        found.extend(set(waiters()) - before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


def test_a_thread_that_ends_leaves_no_waiter_behind():
    work = Work()
    work.may_end.set()
    for _ in range(3):
        (waiter,) = in_a_thread(work, times=4)
        waiter.join(LIMIT.total_seconds())
        assert not waiter.is_alive()


def test_an_abandoned_waiter_ends_with_its_work():
    work, waits = Work(), []
    before = set(waiters())

    def run() -> None:
        waits.append(Wait(work))
        assert waits[0].run(LIMIT) == "the wait was ended"

    thread = threading.Thread(target=run)
    thread.start()
    while not set(waiters()) - before:
        thread.join(0.01)
    (waiter,) = set(waiters()) - before
    waits[0].end_wait()
    thread.join(LIMIT.total_seconds())
    assert not thread.is_alive() and waiter.is_alive()
    work.may_end.set()
    waiter.join(LIMIT.total_seconds())
    assert not waiter.is_alive()
