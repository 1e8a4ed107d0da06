"""Reports of members that others wait for: written once, read by the others, and compared."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from evermoe.comm.group import Group
from evermoe.comm.hang_reports import HangReports, stacks
from support.harness import wait_until


@pytest.fixture
def member():
    """`member(id, collective)`: one that is connected to the same store, after a collective of these numbers."""
    store = dist.HashStore()

    def make(name, numbers, *, waits):
        group = Group()
        group.broken = None
        for _ in range(3):
            group.begun.add("all_reduce", torch.ones(numbers))
        group.waiting = time.monotonic() if waits else None
        reports = HangReports([group], hang_timeout=0.02)
        reports.connect(name, store)
        reports.note(computes=not waits)
        time.sleep(0.02)
        watch = threading.Thread(target=reports.write_long)
        watch.start()
        watch.join()
        wait_until(lambda: store.check([name]), f"the report of {name}")
        return reports

    return make


def log_of(caplog, reports, late, members):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "evermoe"):
        reports.log_reports(late, members)
    return [record.getMessage() for record in caplog.records]


def test_the_stacks_of_a_late_member_and_its_latest_collective(member, caplog):
    a = member("a", 7, waits=True)
    member("b", 7, waits=False)
    (said,) = log_of(caplog, a, ["b"], ["b", "c"])
    assert said.startswith("b computed for ")
    assert "s after collective 3, all_reduce of float32[7]. Its threads then:\n  thread MainThread:\n" in said
    assert "in test_the_stacks_of_a_late_member" in said


def test_members_that_wait_in_different_collectives(member, caplog):
    a = member("a", 7, waits=True)
    member("b", 7, waits=True)
    assert log_of(caplog, a, [], ["b"]) == []
    member("c", 8, waits=True)
    (said,) = log_of(caplog, a, [], ["b", "c"])
    assert said == (
        "members waited in different collectives: a in collective 3, all_reduce of float32[7]; "
        "b in collective 3, all_reduce of float32[7]; c in collective 3, all_reduce of float32[8]"
    )


def test_stacks_of_all_threads():
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, name=name) for name in ("script", "evermoe-own")]
    for each in threads:
        each.start()
    with ThreadPoolExecutor(1) as another:
        found = another.submit(stacks).result()
    over.set()
    for each in threads:
        each.join()
    parts = dict(part.split(":\n", 1) for part in found.split("  thread ")[1:])
    assert next(iter(parts)) == "MainThread"
    assert parts["script"].count("File ") > parts["evermoe-own"].count("File ") == 1
