"""The schedule of failures that all candidates face. Pure: numbers and lines of text in, changes out."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from evermoe.options import count

LONGEST_SECONDS = 1e9
"""Most seconds that a trace may last."""


@dataclass(frozen=True)
class Change:
    """A worker that dies or joins.

    Args:
        action: `kill`: SIGKILL, with its node's memory; `join`: a new process on a new node.
        worker: number of the worker, those that begin from 0; each number is used once.
        step: the step in which a kill strikes, or after which a worker joins; None where `seconds` says when.
        seconds: since the first step began.
    """

    action: Literal["kill", "join"]
    worker: int
    step: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Schedule:
    """Changes in order of time, and how many removals were left out because too few workers would have been left."""

    changes: tuple[Change, ...]
    left_out: int = 0

    @property
    def deaths(self) -> dict[int, int]:
        """The step in which each worker dies that does so at a step."""
        return {each.worker: each.step for each in self.changes if each.action == "kill" and each.step is not None}

    def describe(self) -> str:
        """One line."""
        kills = sum(each.action == "kill" for each in self.changes)
        joins = len(self.changes) - kills
        left_out = f"; {count(self.left_out, 'removal')} left out, as too few workers would be left" * bool(
            self.left_out
        )
        return f"{count(kills, 'kill')} and {count(joins, 'join')}{left_out}"


def at_steps(kills: Mapping[int, int], join: int | None, workers: int) -> Schedule:
    """The schedule of `--kill` and `--join`.

        >>> at_steps({2: 20}, 40, 4).describe()
        '1 kill and 1 join'

    Args:
        kills: worker → step in whose middle it dies.
        join: the step at which one more worker joins, if any.
        workers: that begin.
    """
    changes = [Change("kill", worker, step=step) for worker, step in kills.items()]
    changes += [] if join is None else [Change("join", workers, step=join)]
    return Schedule(tuple(sorted(changes, key=lambda each: (each.step or 0, each.action != "kill"))))


def poisson(*, mtbf: float, replace_after: float, workers: int, least: int, seed: int, until: float) -> Schedule:
    """Failures at random: exponential times between them, of a worker drawn among those that are left.

    Args:
        mtbf: mean seconds between two failures in the whole job.
        replace_after: seconds from a failure to the start of a new worker.
        workers: that begin.
        least: workers that are always left; a failure that would leave fewer is left out.
        seed: of the random numbers.
        until: seconds that the schedule covers.
    """
    drawn = random.Random(seed)
    nodes, changes, left_out = _Nodes(workers), [], 0
    joins: list[float] = []
    now = 0.0
    while True:
        now += drawn.expovariate(1 / mtbf)
        while joins and joins[0] <= min(now, until):
            changes.append(Change("join", nodes.add(), seconds=joins.pop(0)))
        if now > until:
            return Schedule(tuple(changes), left_out)
        victim = drawn.choice(sorted(nodes.alive))
        if len(nodes.alive) <= least:
            left_out += 1
            continue
        nodes.alive.discard(victim)
        changes.append(Change("kill", victim, seconds=now))
        joins.append(now + replace_after)


def from_trace(
    lines: Iterable[str], *, workers: int, least: int, speedup: float = 1.0, start: float = 0.0, name: str = "trace"
) -> Schedule:
    """The schedule of a trace in Bamboo's format: `ms,add|remove,node`, in order of time.

    Workers take the place of the first `workers` nodes that are there at `start`. A removal of one of these is a kill;
    a node that is added while fewer than `workers` are left is a join. Nodes beyond are not ours: their removals and
    additions change nothing.

    Example, for two workers: of `0,add,a  0,add,b  0,add,c  1000,remove,c  2000,remove,a  3000,add,d` the nodes a and b
    are workers 0 and 1; worker 0 dies after 2 s, and d joins as worker 2 after 3 s.

    Args:
        lines: of the trace; blank ones are skipped.
        workers: that begin, and the most at a time.
        least: workers that are always left; a removal that would leave fewer is left out.
        speedup: the trace's seconds in one of ours.
        start: second of the trace at which ours begins.
        name: of the trace, for messages.

    Raises:
        ValueError: a line is not of this format or out of order, or there are too few nodes at `start`.
    """
    present: dict[str, None] = {}
    ours: dict[str, int] = {}
    nodes: _Nodes | None = None
    changes, left_out = [], 0
    for at, action, node in _events(lines, name):
        if nodes is None and at > start:
            nodes, ours = _begin(present, workers, start, name)
        if (action == "add") == (node in present):
            raise ValueError(f"{name}: at {at * 1000:.0f} ms node {node} {_SURPRISE[action]}")
        if action == "add":
            present[node] = None
        else:
            del present[node]
        if nodes is None:
            continue
        seconds = (at - start) / speedup
        if action == "add" and len(nodes.alive) < workers:
            ours[node] = nodes.add()
            changes.append(Change("join", ours[node], seconds=seconds))
        elif action == "remove" and node in ours:
            if len(nodes.alive) <= least:
                left_out += 1
                continue
            worker = ours.pop(node)
            nodes.alive.discard(worker)
            changes.append(Change("kill", worker, seconds=seconds))
    if nodes is None:
        _begin(present, workers, start, name)
    return Schedule(tuple(changes), left_out)


_SURPRISE = {"add": "is added, but is there already", "remove": "is removed, but is not there"}


class _Nodes:
    """Workers that live, and the number of the next."""

    def __init__(self, workers: int) -> None:
        self.alive, self._next = set(range(workers)), workers

    def add(self) -> int:
        """A new worker."""
        self.alive.add(self._next)
        self._next += 1
        return self._next - 1


def _begin(present: Mapping[str, None], workers: int, start: float, name: str) -> tuple[_Nodes, dict[str, int]]:
    if len(present) < workers:
        raise ValueError(
            f"{name}: expected at least {workers} nodes at second {start:g}, as many as --workers, got {len(present)}"
        )
    return _Nodes(workers), {node: worker for worker, node in zip(range(workers), present, strict=False)}


def _events(lines: Iterable[str], name: str) -> Iterable[tuple[float, Literal["add", "remove"], str]]:
    """Seconds, action and node of each line."""
    before = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 3 or not parts[0].isascii() or not parts[0].isdigit() or not parts[2]:
            raise ValueError(f"{name}, line {number}: expected ms,add|remove,node, got {line.strip()[:60]!r}")
        seconds = int(parts[0]) / 1000
        if parts[1] not in ("add", "remove") or not before <= seconds <= LONGEST_SECONDS:
            raise ValueError(
                f"{name}, line {number}: expected add or remove, and times that do not fall, got {line.strip()[:60]!r}"
            )
        before = seconds
        yield seconds, "add" if parts[1] == "add" else "remove", parts[2]
