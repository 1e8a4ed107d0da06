"""Messages between two members, compared with iperf3 and torch's gloo on the same link, in turns in one run.

Messages are read from memory, as the copies of units are, and received into memory. iperf3 sends one small buffer
repeatedly and stores nothing. "UCX" is the same with `transport="ucx"`, if UCX is installed (`evermoe[ucx]`): on
loopback that is UCX's own TCP. The other columns are about Python's lock:

* "GIL": the share of the time in which another thread of the sender waits for the lock, by gilknocker;
* "idle GIL": what such a thread measures at the same time in another process, where no thread holds the lock: it is the
  wait for a processor;
* "held": the share of the time in which the sending thread computes, outside calls that release the lock. It excludes
  waits for a processor, but includes the clock itself;
* "lost", from separate turns: the share of the time in which a thread of the sender that spins in Python neither runs
  nor waits for a processor, by the kernel's count.

Needs Linux and iperf3 (a package of most systems).
"""

import importlib.util
import math
import os
import shutil
import socket
import statistics
import subprocess
import threading
import time
from collections import defaultdict, deque
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from json import loads
from pathlib import Path

import gilknocker
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common import Table, parse, parser, run_ranks
from evermoe.comm.courier import Courier, Message
from evermoe.comm.group import Group
from evermoe.comm.tags import SNAPSHOT_FIRST
from evermoe.comm.transport import Transport
from evermoe.recovery.fetch import MESSAGE_BYTES

LIMIT = timedelta(seconds=60)
MEMORY_BYTES = 256 << 20
"""Bytes at each end, which are sent repeatedly."""
TORCH_AT_ONCE = 2
"""Messages of gloo in flight at a time."""


def main():
    made = parser(__doc__, seconds=2.0, threads=(1,), devices=("cpu",))
    made.add_argument("--mib", type=int, nargs="+", default=[1, 4, 16, 64], help="message sizes in MiB")
    made.add_argument("--rounds", type=int, default=5, help="turns of each candidate (%(default)s)")
    arguments = parse(made)
    if shutil.which("iperf3") is None:
        print("skipped: iperf3 is not on PATH (apt install iperf3)")
        return
    columns = {
        "MiB": "4d",
        "carrier": "7s",
        "GB/s": "6.2f",
        "of iperf3": "9.2f",
        "of gloo": "8.2f",
        "iperf3 GB/s": "11.2f",
        "gloo GB/s": "10.2f",
        "GIL": "6.2%",
        "idle GIL": "8.2%",
        "held": "6.2%",
        "lost": "6.2%",
    }
    table = Table("One pair of members on this machine's loopback", columns)
    server, port = start_iperf3()
    try:
        rows, _ = run_ranks(run, 2, port, arguments)
    finally:
        server.kill()
        server.wait()
    for row in rows:
        table.add(**row)
    table.write(arguments)


def start_iperf3():
    """Start a server of iperf3. Return it and its port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = subprocess.Popen(["iperf3", "-s", "-B", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
        else:
            return server, port


def carriers():
    """Return TCP, and UCX if its package is installed or EVERMOE_UCX names its library."""
    has_ucx = "EVERMOE_UCX" in os.environ or importlib.util.find_spec("libucx") is not None
    return ("tcp", "ucx") if has_ucx else ("tcp",)


@contextmanager
def pair(rank, folder):
    """Connect one of two members through the folder. Return its group, and its couriers by carrier."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = Group()
    transports = {carrier: Transport("127.0.0.1", "127.0.0.1", carrier=carrier) for carrier in carriers()}
    group.rebuild(dist.FileStore(f"{folder}/group", 2), rank, 2, torch.device("cpu"), LIMIT)
    for transport in transports.values():
        addresses = [address.decode() for address in group.all_gather_bytes(transport.address.encode())]
        transport.connect(1, rank, addresses, LIMIT, LIMIT)
        transport._links = Native(transport._links)
    couriers = {carrier: Courier(transport, None, "courier") for carrier, transport in transports.items()}
    try:
        yield group, couriers
    finally:
        for carrier, courier in couriers.items():
            courier.close()
            transports[carrier].close()


def timed_once(members, nbytes):
    """Return the seconds to send `nbytes` to the other member, in messages of the size that a recovery uses."""
    group, couriers = members
    parts = torch.ones(nbytes, dtype=torch.uint8).split(MESSAGE_BYTES)
    group.all_reduce(torch.zeros(1))
    start = time.perf_counter()
    by_courier(couriers["tcp"], group.rank, parts)
    group.all_reduce(torch.zeros(1))
    return time.perf_counter() - start


def run(rank, folder, port, arguments):
    """Run one of the two members."""
    with pair(rank, folder) as members:
        return measure(*members, port, arguments)


def measure_idle_wait(pipe):
    """Measure, in an otherwise idle process, the wait for the lock between two messages on the pipe."""
    knocker = gilknocker.KnockKnock(1000)
    while pipe.recv():
        knocker.start()
        knocker.reset_contention_metric()
        pipe.recv()
        pipe.send(knocker.contention_metric)
        knocker.stop()


class Native:
    """Wraps links and transfers of the extension module, whose calls release the lock, and times their computing."""

    seconds = 0.0

    def __init__(self, inner):
        self._inner = inner

    def _call(self, call, *arguments):
        start = time.thread_time()
        result = call(*arguments)
        Native.seconds += time.thread_time() - start
        return result

    def send(self, *arguments):
        return Native(self._call(self._inner.send, *arguments))

    def receive(self, *arguments):
        return Native(self._call(self._inner.receive, *arguments))

    def wait(self, milliseconds):
        return self._call(self._inner.wait, milliseconds)

    def end(self, reason):
        self._inner.end(reason)


def spin(stop, found):
    """Compute in Python until `stop` is set."""
    scheduled = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def off_lock():
        ran, waited, _ = map(int, scheduled.read_text().split())
        return ran + waited

    start, before = time.perf_counter_ns(), off_lock()
    while not stop.is_set():
        sum(range(1000))
    found.append(max(0.0, 1 - (off_lock() - before) / (time.perf_counter_ns() - start)))


class Locks:
    """Measures the wait for Python's lock in this process and in an idle one."""

    def __init__(self):
        self._pipe, other = mp.get_context("spawn").Pipe()
        self._idle = mp.get_context("spawn").Process(target=measure_idle_wait, args=(other,), daemon=True)
        self._idle.start()
        self._knocker = gilknocker.KnockKnock(1000)

    def measure(self, thread, work):
        """Call `work`. Return its result and the lock columns of the table; `thread` is the sending thread."""
        clock = time.pthread_getcpuclockid(thread.ident)
        self._pipe.send(True)
        self._knocker.start()
        self._knocker.reset_contention_metric()
        computed, start = time.clock_gettime(clock) - Native.seconds, time.perf_counter()
        result = work()
        held = (time.clock_gettime(clock) - Native.seconds - computed) / (time.perf_counter() - start)
        waited = self._knocker.contention_metric
        self._knocker.stop()
        self._pipe.send(True)
        return result, {"GIL": waited, "idle GIL": self._pipe.recv(), "held": held}

    def lost(self, work):
        """Return the share of the time in which a spinning Python thread neither runs nor waits for a processor."""
        stop, found = threading.Event(), []
        thread = threading.Thread(target=spin, args=(stop, found))
        thread.start()
        work()
        stop.set()
        thread.join()
        return found[0]

    def close(self):
        """End the other process."""
        self._pipe.send(False)
        self._idle.join()


def measure(group, couriers, port, arguments):
    """Measure all sizes and candidates. Return the rows of the table, on rank 0."""
    rank = group.rank
    memory = torch.ones(MEMORY_BYTES, dtype=torch.uint8).share_memory_()
    locks = Locks()
    rows = []
    for mib in arguments.mib:
        found = defaultdict(list)
        parts = memory.split(mib << 20)
        for _ in range(arguments.rounds):
            for carrier, courier in couriers.items():
                send = partial(by_courier, courier, rank, parts)
                work = partial(timed, group, arguments.seconds, send, memory)
                speed, shares = locks.measure(courier._thread, work)
                found[carrier].append(speed)
                for name, share in (shares | {"lost": locks.lost(work) if rank == 0 else work()}).items():
                    found[carrier, name].append(share)
            found["gloo"].append(timed(group, arguments.seconds, partial(by_torch, rank, parts), memory))
            group.all_reduce(torch.zeros(1))
            if rank == 0:
                found["iperf3"].append(by_iperf3(port, arguments.seconds))
            group.all_reduce(torch.zeros(1))
        if rank == 0:
            rows += [row(mib, carrier, found) for carrier in couriers]
    locks.close()
    group.all_reduce(torch.zeros(1))
    return rows


def row(mib, carrier, found):
    """Return medians of one size and carrier. Ratios are of consecutive turns."""

    def ratio(to):
        return statistics.median(a / b for a, b in zip(found[carrier], found[to], strict=True))

    return {
        "MiB": mib,
        "carrier": carrier.upper(),
        "GB/s": statistics.median(found[carrier]),
        "of iperf3": ratio("iperf3"),
        "of gloo": ratio("gloo"),
        "iperf3 GB/s": statistics.median(found["iperf3"]),
        "gloo GB/s": statistics.median(found["gloo"]),
    } | {name: statistics.median(found[carrier, name]) for name in ("GIL", "idle GIL", "held", "lost")}


def timed(group, seconds, send_once, memory):
    """Return the GB/s of sending the memory repeatedly."""
    send_once()
    group.all_reduce(torch.zeros(1))
    start, times, more = time.perf_counter(), 0, torch.ones(1)
    while more:
        send_once()
        times += 1
        more = torch.tensor([float(time.perf_counter() - start < seconds)]) * (group.rank == 0)
        group.all_reduce(more)
    return times * memory.nbytes / (time.perf_counter() - start) / 1e9


def by_courier(courier, rank, parts):
    """Send all parts as snapshots are sent."""
    messages = [Message(part, 1 - rank, SNAPSHOT_FIRST + place) for place, part in enumerate(parts)]

    def receive():
        for transfer in [courier.begin_receive(message) for message in messages]:
            courier.wait_received(transfer)

    assert courier.submit(receive if rank else lambda: courier.send_messages(messages)).wait()


def by_torch(rank, parts):
    """Send all parts by torch.distributed."""
    under_way = deque()
    for part in parts:
        if len(under_way) == TORCH_AT_ONCE:
            under_way.popleft().wait()
        under_way.append(dist.irecv(part, 0) if rank else dist.isend(part, 1))
    for work in under_way:
        work.wait()


def by_iperf3(port, seconds):
    """Return the GB/s that iperf3 receives by one connection. Seconds are rounded up: for iperf3, 0 means no limit."""
    command = ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-t", str(math.ceil(seconds)), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 8e9


if __name__ == "__main__":
    main()
