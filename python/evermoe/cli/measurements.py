"""Measurements of this machine: links, memory, disk, and a short session in which a worker is killed."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from rich.console import Console

from evermoe._native import Arena, CopyEngine, digests
from evermoe.checkpoint.plain_files import flush, write_units
from evermoe.comm.transport import Transport
from evermoe.demo.driver import Run
from evermoe.demo.flags import add_arguments as add_demo_arguments
from evermoe.demo.flags import check
from evermoe.demo.summary import Event, commits, episodes
from evermoe.state.unit import TensorSpec, Unit

LIMIT = timedelta(seconds=30)
BYTES = 64 << 20
"""Bytes that one measurement sends, hashes, copies or writes."""
PINGS = 200
ROUNDS = 5


def measure_link() -> dict[str, float]:
    """Measure latency and bandwidth of messages between two local processes, over a session's transport."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_echo, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # otherwise a wait would outlast the end of that process
    transport = Transport("127.0.0.1", "127.0.0.1")
    try:
        ours.send(transport.address)
        if not ours.poll(LIMIT.total_seconds()):
            raise TimeoutError(f"measure: the other process did not start within {LIMIT.total_seconds():g} s")
        transport.connect(1, 0, [transport.address, ours.recv()], LIMIT, LIMIT)
        ping = statistics.median(_round_trip(transport, torch.zeros(1, dtype=torch.uint8)) for _ in range(PINGS)) / 2
        best = min(_round_trip(transport, torch.zeros(BYTES, dtype=torch.uint8)) for _ in range(ROUNDS)) / 2
        ours.send("all read")
        return {"network_latency_seconds": ping, "network_bytes_per_second": BYTES / max(best - ping, 1e-9)}
    finally:
        transport.close()
        process.join(timeout=LIMIT.total_seconds())
        if process.is_alive():
            process.kill()


def _round_trip(transport: Transport, message: torch.Tensor) -> float:
    start = time.perf_counter()
    coming = transport.receive(message, 1, 1)
    transport.send(message, 1, 0).wait()
    coming.wait()
    return time.perf_counter() - start


def _echo(pipe: Connection) -> None:
    """Body of the other process: return each message to its sender."""
    torch.set_num_threads(1)
    transport = Transport("127.0.0.1", "127.0.0.1")
    other = pipe.recv()
    pipe.send(transport.address)
    transport.connect(1, 1, [other, transport.address], LIMIT, LIMIT)
    for size in [1] * PINGS + [BYTES] * ROUNDS:
        message = torch.empty(size, dtype=torch.uint8)
        transport.receive(message, 0, 0).wait()
        transport.send(message, 0, 1).wait()
    pipe.poll(LIMIT.total_seconds())  # until the other has read all
    transport.close()


def measure_digests() -> dict[str, float]:
    """Measure bytes per second of digests, computed as in a recovery."""
    units = [[part.numpy()] for part in torch.ones(BYTES, dtype=torch.uint8).split(BYTES // 16)]
    return {"digest_bytes_per_second": BYTES / _best(lambda: digests(units))}


def measure_capture(folder: Path) -> dict[str, float]:
    """Measure bytes per second of captures into shared memory, by the thread that makes snapshots."""
    tensor = torch.ones(BYTES, dtype=torch.uint8)
    arena = Arena.create(folder / "arena", "{}", [("unit", BYTES)])
    engine = CopyEngine()
    versions = iter(range(1, ROUNDS + 2))

    def capture() -> None:
        made = engine.capture(arena, next(versions), [[(tensor.data_ptr(), tensor.nbytes)]], tensor)
        made.hurry()
        made.wait()

    try:
        return {"capture_bytes_per_second": BYTES / _best(capture)}
    finally:
        engine.shutdown()
        arena.unlink()


def measure_store(folder: Path) -> dict[str, float]:
    """Measure bytes per second to a disk, written as checkpoints are, and from it without the page cache."""
    specs = (TensorSpec("weights", (BYTES // 64,), torch.float32),)
    data = torch.randint(0, 256, (16, BYTES // 16), dtype=torch.uint8)
    units = {f"moe.experts.{at}": (Unit(f"moe.experts.{at}", specs, "moe", at), data[at]) for at in range(16)}
    path = folder / "units.safetensors"

    def write() -> None:
        path.unlink(missing_ok=True)
        write_units(path, units)
        flush(folder)

    written = _best(write, rounds=3)
    return {"store_write_bytes_per_second": BYTES / written, "store_read_bytes_per_second": BYTES / _read(path)}


def _read(path: Path) -> float:
    """Return the seconds to read a file that the page cache no longer holds, if the system can drop it."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        while file.read(1 << 24):
            pass
        return time.perf_counter() - start


def _best(action: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the minimum seconds of several rounds, after a warm-up round."""
    action()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return max(min(taken), 1e-9)


SESSION = ["--workers", "3", "--steps", "30", "--kill", "1@12", "--no-join", "--no-baseline", "--layers", "2"]
"""The demo's flags for the measured session."""


def measure_session(console: Console, flags: list[str] | None = None) -> tuple[dict[str, float], dict[str, Any]]:
    """Measure the phases of a recovery in a session whose worker is killed, and its steps.

    Returns:
        The constants; and for people the seconds of a step by number of members and the phases of each recovery.

    Raises:
        LaunchError: a worker failed.
    """
    began = time.time()
    events = _run(console, flags or SESSION)
    recoveries = episodes(events)
    first = min(event["time"] for rows in events.values() for event in rows if event["event"] == "begin")

    def mean(*phases: str) -> float:
        return statistics.fmean(sum(each.seconds.get(phase, 0.0) for phase in phases) for each in recoveries)

    constants = {
        "detect_seconds": mean("detect"),
        "agree_seconds": mean("agree"),
        "rebuild_seconds": mean("rebuild"),
        "survey_seconds": mean("fetch", "verify"),
        "start_seconds": first - began,
    }
    details = {
        "step_seconds": _steps_by_members(events),
        "phases": [each.seconds for each in recoveries],
        "flags": flags or SESSION,
    }
    return constants, details


def _run(console: Console, flags: Sequence[str]) -> Mapping[int, Sequence[Event]]:
    """Run a session of the demo and return the events of each worker."""
    parser = argparse.ArgumentParser()
    add_demo_arguments(parser)
    options = parser.parse_args(flags)
    kills = check(options)
    with tempfile.TemporaryDirectory(prefix="evermoe-measure-") as folder:
        run = Run(options, Path(folder), console=console, title="a real session")
        return run.run_workers(kills, None, options.steps, options.replication)


PERSISTING = ["--workers", "3", "--steps", "40", "--no-kill", "--no-join", "--no-baseline", "--preset", "pec"]
"""The demo's flags for the sessions of which one saves after every step."""
NEVER = ["--pec.save-interval", "1000"]
PERSISTING_ROUNDS = 3


def measure_persisting(console: Console, flags: Sequence[str] = ("--layers", "2")) -> dict[str, float]:
    """Measure the seconds that a concurrent save adds to a step: a session that saves after each step against one that
    never does.

    Raises:
        LaunchError: a worker failed.
    """
    extra: list[float] = []
    for _ in range(PERSISTING_ROUNDS):  # alternating, as other programs may use the same processors
        (saving,), (without,) = (
            _steps_by_members(_run(console, [*PERSISTING, *flags, *more])).values() for more in ([], NEVER)
        )
        extra.append(saving - without)
    return {"persist_seconds": max(statistics.median(extra), 0.0)}


def _steps_by_members(events: Mapping[int, Sequence[Event]]) -> dict[int, float]:
    """Return the median seconds between two commits, by the number of members."""
    rows = list(commits(events).values())
    found: dict[int, list[float]] = {}
    for before, after in zip(rows, rows[1:], strict=False):
        if before["members"] == after["members"]:
            found.setdefault(after["members"], []).append(after["time"] - before["time"])
    return {members: statistics.median(seconds) for members, seconds in found.items()}
