"""Processes that end while a thread of theirs is inside native code: prints their exit codes.

python exits.py KIND...
"""

from __future__ import annotations

import atexit
import datetime
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseClient

from evermoe.comm.group import Group
from evermoe.comm.lighthouse import start_lighthouse
from evermoe.comm.membership import MembershipManager
from evermoe.comm.messages import Identity
from evermoe.comm.task import Task, run_in_thread
from evermoe.config.membership import Membership
from evermoe.process import native_calls

CODE = 3
"""Exit code of the script."""
SOON = datetime.timedelta(seconds=1)
"""Time until a call returns: after the script's end, and while the interpreter is about to end."""
EXIT_SECONDS = 60.0
"""Time that calls get to return, in the processes here."""
NEVER = datetime.timedelta(hours=1)
NOBODY = 1
"""A port at which nobody listens."""


class _Slow:
    """Prolongs the end of the interpreter until a thread is back from native code."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(2.5)


def _membership() -> tuple[MembershipManager, Any]:
    """A member of a job, at a Lighthouse that waits for another one."""
    lighthouse = start_lighthouse(heartbeat_timeout=60, join_timeout=60, bind="127.0.0.1:0")
    address = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
    options = Membership(lighthouse=address, job="exits", node="a", members=2)
    identity = Identity("exits", "layout")
    member = MembershipManager(options, lighthouse=address, identity=identity, node="a", device=torch.device("cpu"))
    LighthouseClient(address, NEVER).heartbeat("another", NEVER)
    return member, lighthouse


def speaks_for_the_dead() -> Any:
    """A member reports to the Lighthouse that another one has ended."""
    member, lighthouse = _membership()
    member.reach.ended.add("c")
    with member.requests._ended.reporting_ended(member.requests.lighthouses.current, [member.id, "b", "c"]):
        _wait_for("evermoe-ended")
    return member, lighthouse


def inquires() -> Any:
    """A member asks for newcomers, and its session is not closed."""
    member, lighthouse = _membership()
    member.requests._inquiry.begin_asking({}, 1)
    _wait_for("evermoe-inquiry")
    return member, lighthouse


def connects() -> Any:
    """A member connects to a store that is gone."""
    task = Task(lambda: dist.TCPStore("127.0.0.1", NOBODY, is_master=False, wait_for_workers=False, timeout=SOON))
    run_in_thread(task, "evermoe-early-clients", ())
    return task


def waits_for_a_member() -> Any:
    """A thread waits for a member that is alive and sends nothing."""
    store, groups = dist.HashStore(), [Group(), Group()]

    def connect(rank: int) -> None:
        groups[rank].rebuild(store, rank, 2, torch.device("cpu"), NEVER)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    native_calls.close_at_exit(groups[0]._mesh)
    run_in_thread(Task(lambda: groups[0].all_reduce(torch.zeros(1))), "evermoe-buckets", ())
    return groups


def computes() -> Any:
    """A thread computes for long, as that of a replica does."""
    matrix = torch.randn(500, 500)

    def compute() -> None:
        end = time.monotonic() + SOON.total_seconds()
        while time.monotonic() < end:
            matrix @ matrix

    task = Task(compute)
    run_in_thread(task, "evermoe-replica", ())
    return task


KEPT: list[Any] = []
"""Is freed when the interpreter ends."""
KINDS = {each.__name__: each for each in (speaks_for_the_dead, inquires, connects, waits_for_a_member, computes)}


def _wait_for(name: str) -> None:
    while not any(each.name == name for each in threading.enumerate()):
        time.sleep(0.01)


def _run(kind: str) -> int:
    """Starts the process of a kind."""
    pid = os.fork()
    if pid:
        return pid
    native_calls.EXIT_SECONDS = EXIT_SECONDS
    atexit.register(lambda: os.write(1, f"{kind} at exit\n".encode()))
    KEPT.extend((_Slow(), KINDS[kind]()))
    sys.exit(CODE)


def main(kinds: list[str]) -> None:
    torch.set_num_threads(1)
    started = {_run(kind): kind for kind in kinds}
    begin = time.monotonic()
    while started:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        print(f"{started.pop(pid)} {code} {time.monotonic() - begin:.1f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(KINDS))
