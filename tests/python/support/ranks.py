"""Runs a function on several ranks of a real gloo group, each in a process or a thread of its own."""

from __future__ import annotations

import os
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evermoe.comm.courier import Courier
from evermoe.comm.group import Group
from evermoe.comm.transport import Transport
from evermoe.copies.replay.exchange import ReplayExchange
from evermoe.errors import PeerLost
from evermoe.state.training_state import TrainingState
from support.harness import SERVER

PATIENCE = 100.0
"""Seconds for all ranks: on a busy machine the first graph of several ranks takes more than half of it."""


def sum_gradients(parameters: Sequence[torch.nn.Parameter], group: Group) -> None:
    """Sum the gradients of parameters that all ranks have; collective."""
    for gradient in (each.grad for each in parameters if each.grad is not None):
        group.all_reduce(gradient)


def run_ranks(folder: Path, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(group, *arguments)` on each rank; what they return (tensors and containers of them), by rank."""
    place = folder / uuid.uuid4().hex
    place.mkdir()
    processes = [SERVER.Process(target=_run, args=(place, size, r, function, arguments)) for r in range(size)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(PATIENCE)
        failures = [path.read_text() for path in sorted(place.glob("*.failed"))]
        assert [process.exitcode for process in processes] == [0] * size, "\n".join(failures)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [torch.load(place / f"{rank}.result", weights_only=True) for rank in range(size)]


def run_each(
    folder: Path, size: int, function: Callable[..., Any], cases: Sequence[Sequence[Any]]
) -> Iterator[list[Any]]:
    """Yield the results by rank of `function(group, *case)` for one case after the other, in the same processes."""
    yield from map(list, zip(*run_ranks(folder, size, _each, function, list(cases)), strict=True))


def _each(group: Group, function: Callable[..., Any], cases: list[Sequence[Any]]) -> list[Any]:
    found = []
    for case in cases:
        torch.manual_seed(1000 + group.rank)
        try:
            found.append(function(group, *case))
        except BaseException as error:
            error.add_note(f"case: {case}")
            raise
    return found


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `function(group, *arguments)` in a group of one, which needs no process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000)
        return function(Group(), *arguments)


def run_threads(folder: Path, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(group, *arguments)` on each rank, in a thread each; what they return, by rank.

    For functions that draw no random numbers of torch's default generator, and write no module's attributes.
    """
    place = folder / uuid.uuid4().hex
    place.mkdir()

    def run(rank: int) -> Any:
        group = _join(place, size, rank)
        try:
            result = function(group, *arguments)
            group.all_reduce(torch.zeros(1))  # nobody closes its sockets while another still reads
        except BaseException as error:
            group.drop(f"rank {rank} has failed: {error}")
            raise
        return result

    with ThreadPoolExecutor(size) as pool:
        tasks = [pool.submit(run, rank) for rank in range(size)]
        failed = [error for task in tasks if (error := task.exception(PATIENCE)) is not None]
    for error in sorted(failed, key=lambda error: isinstance(error, PeerLost)):  # the cause, if it is known
        raise error
    return [task.result() for task in tasks]


def _join(place: Path, size: int, rank: int) -> Group:
    group = Group()
    store = dist.FileStore(str(place / "store"), size)
    group.rebuild(store, rank, size, torch.device("cpu"), timedelta(seconds=PATIENCE / 2))
    group.all_reduce(torch.zeros(1))  # all are connected: one that drops its group at once would end others' connecting
    return group


def _run(place: Path, size: int, rank: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1000 + rank)
    group = _join(place, size, rank)
    try:
        torch.save(function(group, *arguments), place / f"{rank}.result")
        group.all_reduce(torch.zeros(1))  # nobody closes its sockets while another still reads
    except BaseException:
        (place / f"{rank}.failed").write_text(f"rank {rank}, pid {os.getpid()}\n{traceback.format_exc()}")
        raise


def members(group: Group, folder: str, limit: float) -> tuple[Group, Transport]:
    """A group and a transport like a session's; both wait for `limit` seconds."""
    found, seconds = Group(), timedelta(seconds=limit)
    store = dist.FileStore(f"{folder}/couriers", group.size)
    found.rebuild(store, group.rank, group.size, torch.device("cpu"), seconds)
    found.transport = connected(group, limit)
    return found, found.transport


def connected(group: Group, limit: float) -> Transport:
    """A transport between the ranks, whose messages take `limit` seconds at most."""
    transport = Transport("127.0.0.1", "127.0.0.1")
    addresses = [data.decode() for data in group.all_gather_bytes(transport.address.encode())]
    transport.connect(1, group.rank, addresses, timedelta(seconds=limit), timedelta(seconds=PATIENCE))
    return transport


def trained_and_kept(
    group: Group, state: TrainingState, copies: ReplayExchange, courier: Courier, step: int
) -> dict[str, dict[str, Tensor]]:
    """By unit, the bytes after a step of what this rank sends (`mine`) and keeps (`theirs`); ends the copies."""
    mine = {name: torch.empty(state.catalog.by_name[name].nbytes, dtype=torch.uint8) for name in copies.sender._units}
    for name, data in mine.items():
        state.read(name, data)
    theirs = {unit: copies.read(unit, at) for unit, at, _ in copies.stored() if at == step}
    group.all_reduce(torch.zeros(1))  # nobody closes its connections while the other one still reads
    copies.close()
    courier.close()
    return {"mine": mine, "theirs": theirs}
