"""Plan of a recovery after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from evermoe import _native
from evermoe._native import RecoveryPlan
from evermoe.planning._arguments import count, names


def recovery_plan(
    units: Sequence[tuple[str, int]],
    holdings: Sequence[Sequence[tuple[str, int, int, str]]],
    needs: Sequence[Sequence[str]],
    *,
    may_lag: Sequence[str] = (),
    nodes: Sequence[str] | None = None,
) -> RecoveryPlan:
    """Plan the version to resume from after a failure, and all transfers that it needs.

    The target is the newest version at which every unit has a holder; version 0, the state before the first
    step, counts only if no rank has a later one. Where holders differ, the digest that most ranks have is
    right; who was outvoted is listed in `conflicts`, sends nothing, and fetches what it needs. A rank takes a
    unit from its running model, else from its own replica or snapshot (`source == destination`), else from the
    memory of another with the fewest bytes to send, and only if no memory has it from what is persisted.

    Units of `may_lag`, which partial policies do not copy at each step, need no holder at the target: each is
    taken, by all ranks that need it, at its newest version up to the target; `stale` lists the older ones.

        >>> full = [("w", 5, 7, "active"), ("x", 5, 8, "active")]
        >>> plan = recovery_plan([("w", 64), ("x", 64)], [full, []], [["w"], ["x"]])
        >>> plan.version, plan.transfers
        (5, [('x', 0, 1, 'active')])
        >>> plan = recovery_plan([("w", 64), ("x", 64)], [[full[0], ("x", 3, 6, "snapshot")]], [["x"]], may_lag=["x"])
        >>> plan.version, plan.stale, plan.transfers
        (5, [('x', 3)], [('x', 0, 0, 'snapshot')])

    Ranks of one node that lack a unit get it over its link once: one of them fetches it, and the others get it from
    that one (BAFT's recovery of a data-parallel group).

        >>> plan = recovery_plan([("w", 64)], [full[:1], [], []], [[], ["w"], ["w"]], nodes=["a", "b", "b"])
        >>> plan.transfers
        [('w', 0, 1, 'active'), ('w', 1, 2, 'active')]

    Args:
        units: (name, bytes) of every unit of the model.
        holdings: for each rank, (unit, version, digest, kind) of all that it has. Kinds, the cheapest to read first:
            "active" in the running model, "replayed" in a replica that repeats its gradients, "snapshot" in host
            memory, "persisted" in files, which every rank that can read them lists.
        needs: for each rank, the units that it is to run.
        may_lag: units that may be older than the target.
        nodes: of each rank; None for a node of its own.
    """
    sized = [(name, count("units", size)) for name, size in units]
    held = [
        [(name, count("holdings", version), count("holdings", digest), kind) for name, version, digest, kind in rank]
        for rank in holdings
    ]
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes or ()))}
    by_rank = list(range(len(needs))) if nodes is None else [numbers[node] for node in nodes]
    needed = [names("needs", rank) for rank in needs]
    return _native.recovery_plan(sized, held, needed, names("may_lag", may_lag), by_rank)


Lagging = Literal["never", "if needed", "always"]


def usable_holdings(
    members: Sequence[tuple[bool, bool]], holdings: Sequence[Sequence[tuple[str, int, int, str]]]
) -> list[list[tuple[str, int, int, str]]]:
    """Return the holdings that a recovery may use: those left by an earlier start are not progress of the running job.

    A job that begins takes the members' own models as of version 0; one that was seen to run is never started again
    from a model that was just built.

        >>> usable_holdings([(False, True)], [[("w", 0, 7, "active")]])
        [[]]

    Args:
        members: by rank, whether it has state of the running job, and whether it has seen the job run.
        holdings: by rank, (unit, version, digest, kind) of what it has.

    Raises:
        ValueError: a kind that does not exist.
    """
    return _native.usable_holdings(list(members), [list(held) for held in holdings])
