"""The schedule of failures that all candidates face. Pure: numbers in, changes out."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from evermoe.options import count


@dataclass(frozen=True)
class Change:
    """Death or join of a worker.

    Args:
        action: `kill`: SIGKILL, with its node's memory; `join`: a new process on a new node.
        worker: number of the worker, from 0 for the first ones; each number is used once.
        step: the step in which a kill strikes, or after which a worker joins; None if `seconds` gives the time.
        seconds: seconds since the first step began.
    """

    action: Literal["kill", "join"]
    worker: int
    step: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Schedule:
    """Changes in order of time, and the number of removals that were left out because too few workers would remain."""

    changes: tuple[Change, ...]
    left_out: int = 0

    @property
    def deaths(self) -> dict[int, int]:
        """Step in which each worker dies, for deaths at a step."""
        return {each.worker: each.step for each in self.changes if each.action == "kill" and each.step is not None}

    def describe(self) -> str:
        """Return a description in one line."""
        kills = sum(each.action == "kill" for each in self.changes)
        joins = len(self.changes) - kills
        left_out = f"; {count(self.left_out, 'removal')} left out, as too few workers would be left" * bool(
            self.left_out
        )
        return f"{count(kills, 'kill')} and {count(joins, 'join')}{left_out}"


def at_steps(kills: Mapping[int, int], join: int | None, workers: int) -> Schedule:
    """Return the schedule of `--kill` and `--join`.

        >>> at_steps({2: 20}, 40, 4).describe()
        '1 kill and 1 join'

    Args:
        kills: worker → step in whose middle it dies.
        join: the step at which a new worker joins, if any.
        workers: number of workers at the start.
    """
    changes = [Change("kill", worker, step=step) for worker, step in kills.items()]
    changes += [] if join is None else [Change("join", workers, step=join)]
    return Schedule(tuple(sorted(changes, key=lambda each: (each.step or 0, each.action != "kill"))))


def poisson(*, mtbf: float, replace_after: float, workers: int, least: int, seed: int, until: float) -> Schedule:
    """Return random failures: exponential times in between, each of a random live worker.

    Args:
        mtbf: mean seconds between two failures of the job.
        replace_after: seconds from a failure to the start of a new worker.
        workers: number of workers at the start.
        least: minimum of live workers; a failure that would leave fewer is skipped.
        seed: seed of the random numbers.
        until: length of the schedule in seconds.
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
    events: Iterable[tuple[float, bool, Sequence[int]]],
    *,
    workers: int,
    least: int,
    speedup: float = 1.0,
    start: float = 0.0,
) -> Schedule:
    """Return the schedule of a trace of nodes that come and go.

    Workers correspond to the first `workers` nodes that exist at `start`. A removal of one of these is a kill. A node
    that is added while fewer than `workers` are alive is a join. Removals and additions of other nodes change nothing.

    Example, for two workers: nodes 0, 1 and 2 exist; node 2 is removed at 1 s; node 0 is removed at 2 s and
    returns at 3 s. Nodes 0 and 1 are workers 0 and 1; worker 0 dies after 2 s, and worker 2 joins after 3 s.

    Args:
        events: in order of time: second, whether nodes come or go, and their numbers; see
            `evermoe.simulate.Failure.trace`.
        workers: number of workers at the start, and at most.
        least: workers that are always left; a removal that would leave fewer is left out.
        speedup: the trace's seconds in one of ours.
        start: second of the trace at which ours begins.

    Raises:
        ValueError: there are too few nodes at `start`.
    """
    present: dict[int, None] = {}
    ours: dict[int, int] = {}
    nodes: _Nodes | None = None
    changes, left_out = [], 0
    for at, comes, node in ((at, comes, node) for at, comes, which in events for node in which):
        if nodes is None and at > start:
            nodes, ours = _begin(present, workers, start)
        if nodes is None:
            if comes:
                present[node] = None
            else:
                del present[node]
            continue
        seconds = (at - start) / speedup
        if comes and len(nodes.alive) < workers:
            ours[node] = nodes.add()
            changes.append(Change("join", ours[node], seconds=seconds))
        elif not comes and node in ours:
            worker = ours.pop(node)
            if len(nodes.alive) <= least:  # the worker stays, without a node of the trace
                left_out += 1
                continue
            nodes.alive.discard(worker)
            changes.append(Change("kill", worker, seconds=seconds))
    if nodes is None:
        _begin(present, workers, start)
    return Schedule(tuple(changes), left_out)


class _Nodes:
    """Live workers, and the number of the next one."""

    def __init__(self, workers: int) -> None:
        self.alive, self._next = set(range(workers)), workers

    def add(self) -> int:
        """Add a worker and return its number."""
        self.alive.add(self._next)
        self._next += 1
        return self._next - 1


def _begin(present: Mapping[int, None], workers: int, start: float) -> tuple[_Nodes, dict[int, int]]:
    if len(present) < workers:
        raise ValueError(
            f"--trace: expected at least {workers} nodes at second {start:g}, as many as --workers, got {len(present)}"
        )
    return _Nodes(workers), {node: worker for worker, node in zip(range(workers), present, strict=False)}
