"""Finds members whose scripts run different numbers of forwards in a step, which no exchange survives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from evermoe.comm.begun import Begun
from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.errors import UnequalForwards
from evermoe.moe.experts import Experts

Attempt = dict[str, Any]
"""Report of a member about its attempt at a step, for JSON."""


class StepCalls:
    """Calls that this member's script has begun in the latest step, kept until a failure asks for them.

    A member that ends its step after fewer forwards than another waits in the reduction of gradients, and the other in
    a forward, until the time limit. A member that failed has ended no step.

    Args:
        layers: by module path.
        group: in which the layers exchange.
        node: of this member, for people.
    """

    def __init__(self, layers: Mapping[str, Experts], group: Group, node: str) -> None:
        self._layers, self._group, self._node = layers, group, node
        self._attempt: tuple[int, int, int] | None = None
        """Step, generation and rank of the latest attempt."""
        self._end: tuple[list[int], int] | None = None
        """Counts at the end of the step; None until then."""
        self._begun = group.begun
        """Collectives of this attempt, without those by which members agree after a failure."""

    def begin(self, step: int, generation: int) -> None:
        """Begin a step; the layers count from zero."""
        self._attempt = step, generation, self._group.rank
        self._group.begun = self._begun = Begun()
        self._end = None

    def end(self) -> None:
        """End the step."""
        self._end = self._counts()

    def _counts(self) -> tuple[list[int], int]:
        """Return the forwards begun by each layer, and the exchanges begun."""
        return [layer.count.begun for layer in self._layers.values()], self._begun.count

    def check(self, everyone: Group) -> None:
        """Compare the calls of all members when they were interrupted; collective.

        Raises:
            UnequalForwards: names the members and their calls.
        """
        mine: Attempt | None = None
        if self._attempt is not None:
            step, generation, rank = self._attempt
            forwards, exchanges = self._end or self._counts()
            mine = {"step": step, "generation": generation, "rank": rank, "node": self._node}
            mine |= {"forwards": dict(zip(self._layers, forwards, strict=True)), "exchanges": exchanges}
            mine["has_ended"] = self._end is not None
        compare_attempts(mine, everyone, _difference)


def compare_attempts(
    mine: Attempt | None, everyone: Group, difference: Callable[[Attempt, Attempt], str | None]
) -> None:
    """Compare the attempts of all members at a step that was interrupted; collective.

    Args:
        mine: `step`, `generation` and whether it `has_ended`, and what `difference` needs; None without an attempt.
        everyone: all members.
        difference: returns what another member has done beyond one that has ended its step; None if nothing.

    Raises:
        UnequalForwards: there is a difference between two attempts at the same step.
    """
    found = [each for each in gather_json(everyone, mine) if each is not None]
    for ended, other in itertools.permutations(found, 2):
        is_same_attempt = all(ended[name] == other[name] for name in ("step", "generation"))
        problem = difference(ended, other) if is_same_attempt and ended["has_ended"] else None
        if problem:
            raise UnequalForwards(f"step {ended['step']}: {problem}")


def _difference(ended: Attempt, other: Attempt) -> str | None:
    """Return the difference if a member has begun more calls than one that has ended its step."""
    who, fewer = (f"rank {each['rank']} on {each['node']}" for each in (other, ended))
    for path, count in other["forwards"].items():
        if count > ended["forwards"].get(path, 0):
            return (
                f"{who} ran {count} forwards of layer {path}, {fewer} ran {ended['forwards'].get(path, 0)}. A forward "
                "is an exchange among all members, so all must run as many in each step, whatever their shares: "
                "`for part in step.micro_batches(n)` gives each of them n parts"
            )
    if other["exchanges"] > ended["exchanges"]:
        return (
            f"{who} began {other['exchanges']} exchanges in its forwards and backwards, {fewer} {ended['exchanges']}, "
            "with as many forwards of each layer: all must backpropagate as many of them in each step"
        )
    return None
