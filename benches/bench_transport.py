"""Messages between two members, against iperf3 and torch's gloo on the same link, in turns in one run.

What is sent lies in memory, as the copies of units do, and is received into memory; iperf3 sends one small buffer again
and again, and keeps nothing. "UCX" is the same with `transport="ucx"`, where there is UCX (`evermoe[ucx]`): on loopback
that is UCX's own TCP. "GIL" is the share of the time in which another thread of the sender waits for Python's lock, by
gilknocker. Needs iperf3 (a package of most systems).
"""

import importlib.util
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections import deque
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from json import loads

import gilknocker
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common import Table, parse, parser
from evermoe.comm.courier import Courier, Message
from evermoe.comm.group import Group
from evermoe.comm.tags import SNAPSHOT_FIRST
from evermoe.comm.transport import Transport
from evermoe.recovery.fetch import MESSAGE_BYTES

LIMIT = timedelta(seconds=60)
MEMORY_BYTES = 256 << 20
"""Bytes at each end; they are sent over and over."""
TORCH_AT_ONCE = 2
"""Messages of torch's that are under way at a time."""


def main():
    made = parser(__doc__, seconds=2.0, threads=(1,), devices=("cpu",))
    made.add_argument("--mib", type=int, nargs="+", default=[1, 4, 16, 64], help="sizes of a message")
    made.add_argument("--rounds", type=int, default=5, help="turns of each")
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
    }
    table = Table("One pair of members on this machine's loopback", columns)
    with tempfile.TemporaryDirectory() as folder:
        server, port = start_iperf3()
        try:
            mp.spawn(run, args=(folder, port, arguments), nprocs=2)
        finally:
            server.kill()
            server.wait()
        for row in torch.load(f"{folder}/rows", weights_only=True):
            table.add(**row)
    table.write(arguments)


def start_iperf3():
    """A server of iperf3, and its port."""
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
    """TCP, and UCX where its package is installed or EVERMOE_UCX names its library."""
    has_ucx = "EVERMOE_UCX" in os.environ or importlib.util.find_spec("libucx") is not None
    return ("tcp", "ucx") if has_ucx else ("tcp",)


@contextmanager
def pair(rank, folder):
    """One of two members, connected: its group and what sends, by carrier; they meet in the folder."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = Group("127.0.0.1")
    transports = {carrier: Transport("127.0.0.1", "127.0.0.1", carrier=carrier) for carrier in carriers()}
    group.rebuild(dist.FileStore(f"{folder}/group", 2), rank, 2, torch.device("cpu"), LIMIT)
    for transport in transports.values():
        addresses = [address.decode() for address in group.all_gather_bytes(transport.address.encode())]
        transport.connect(1, rank, addresses, LIMIT, LIMIT)
    couriers = {carrier: Courier(transport, None, "courier") for carrier, transport in transports.items()}
    try:
        yield group, couriers
    finally:
        for carrier, courier in couriers.items():
            courier.close()
            transports[carrier].close()


def timed_once(members, nbytes):
    """Seconds until so many bytes have come to the other member, in messages of a recovery's size."""
    group, couriers = members
    parts = torch.ones(nbytes, dtype=torch.uint8).split(MESSAGE_BYTES)
    group.all_reduce(torch.zeros(1))
    start = time.perf_counter()
    by_courier(couriers["tcp"], group.rank, parts)
    group.all_reduce(torch.zeros(1))
    return time.perf_counter() - start


def run(rank, folder, port, arguments):
    """One of the two members."""
    with pair(rank, folder) as members:
        measure(*members, folder, port, arguments)


def measure(group, couriers, folder, port, arguments):
    """All sizes, of all that is compared."""
    rank = group.rank
    memory = torch.ones(MEMORY_BYTES, dtype=torch.uint8).share_memory_()
    knocker = gilknocker.KnockKnock(1000)
    rows = []
    for mib in arguments.mib:
        found = {name: [] for name in ("gloo", "iperf3", *couriers, *(f"gil {carrier}" for carrier in couriers))}
        parts = memory.split(mib << 20)
        for _ in range(arguments.rounds):
            for carrier, courier in couriers.items():
                knocker.start()
                knocker.reset_contention_metric()
                send = partial(by_courier, courier, rank, parts)
                found[carrier].append(timed(group, arguments.seconds, send, memory))
                found[f"gil {carrier}"].append(knocker.contention_metric)
                knocker.stop()
            found["gloo"].append(timed(group, arguments.seconds, partial(by_torch, rank, parts), memory))
            group.all_reduce(torch.zeros(1))
            if rank == 0:
                found["iperf3"].append(by_iperf3(port, arguments.seconds))
            group.all_reduce(torch.zeros(1))
        if rank == 0:
            rows += [row(mib, carrier, found) for carrier in couriers]
    if rank == 0:
        torch.save(rows, f"{folder}/rows")
    group.all_reduce(torch.zeros(1))


def row(mib, carrier, found):
    """Medians of one size and carrier; ratios of turns that follow each other."""

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
        "GIL": statistics.median(found[f"gil {carrier}"]),
    }


def timed(group, seconds, send_once, memory):
    """GB/s of sending the memory again and again."""
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
    """All parts, as snapshots are sent."""
    messages = [Message(part, 1 - rank, SNAPSHOT_FIRST + place) for place, part in enumerate(parts)]

    def receive():
        for transfer in [courier.receive(message) for message in messages]:
            courier.wait_received(transfer)

    assert courier.submit(receive if rank else lambda: courier.send(messages)).wait()


def by_torch(rank, parts):
    """All parts, by torch.distributed."""
    under_way = deque()
    for part in parts:
        if len(under_way) == TORCH_AT_ONCE:
            under_way.popleft().wait()
        under_way.append(dist.irecv(part, 0) if rank else dist.isend(part, 1))
    for work in under_way:
        work.wait()


def by_iperf3(port, seconds):
    """GB/s that iperf3 receives by one connection."""
    command = ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-t", f"{seconds:g}", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 8e9


if __name__ == "__main__":
    main()
