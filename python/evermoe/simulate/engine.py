"""Simulations for one seed or for several."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from evermoe import _native
from evermoe.options import checked
from evermoe.simulate.scenario import Scenario
from evermoe.simulate.schemes import BASELINES, SCHEMES, SchemeName, keeps_owners

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t at 95 %, two-sided, for 1 to 10 degrees of freedom. For more the normal 1.96 is at most 14 % too low."""


@dataclass(frozen=True)
class Happening:
    """Event of the job: `lost`, `resumed` or `restarted`."""

    seconds: float
    what: str
    step: int
    """Steps in the state."""
    members: int


@dataclass(frozen=True)
class Outcome:
    """Result of a simulation."""

    scheme: SchemeName
    seconds: float
    """Simulated seconds."""
    nanoseconds: Mapping[str, int]
    """Nanoseconds by cause; they add up to `seconds`."""
    ettr: float
    """Effective training time ratio: the share of time in which steps of the final state were computed."""
    goodput_tokens_per_second: float
    """Tokens of these steps per second, without those that experts lost."""
    goodput: float
    """The same over the rate of all nodes without failures and copies, with an even load."""
    steps: int
    """Steps in the final state."""
    undone_steps: int
    """Steps that were undone and repeated."""
    interrupted_steps: int
    """Steps that a loss interrupted."""
    repeated_tokens: float
    """Tokens of undone and interrupted steps."""
    lost_tokens: float
    """Tokens lost by experts that went back alone."""
    plt: float
    """Portion of lost tokens, averaged over layers."""
    losses: int
    """Lost members."""
    recoveries: int
    """Recoveries, the start and joins included."""
    moves: int
    """Moves of experts after a shift of the load."""
    restarts: int
    """Restarts of all processes."""
    checkpoint_loads: int
    """Returns of all members to a checkpoint."""
    copy_bytes: int
    """Bytes of copies sent to peers."""
    first_bytes: int
    """Bytes of first copies after a change."""
    recovery_bytes: int
    """Bytes that recoveries fetched from peers."""
    local_bytes: int
    """Bytes that recoveries took from copies in own memory."""
    store_bytes: int
    """Bytes written to the store."""
    read_bytes: int
    """Bytes read from the store."""
    memory_bytes: int
    """Bytes of state and copies on the fullest node."""
    missing_copy_bytes: int
    """Bytes of planned copies that did not fit into the nodes' host memory, under the plan that lacks the most; 0 if
    all fitted."""
    mean_members: float
    """Average number of nodes that trained."""
    fewest_members: int
    recovery_seconds: tuple[float, ...]
    """Seconds from each loss until training resumed."""
    happened: tuple[Happening, ...]
    """The first events."""

    @property
    def seconds_by_cause(self) -> dict[str, float]:
        """Return the seconds of each cause that took any."""
        return {name: spent / 1e9 for name, spent in self.nanoseconds.items() if spent}


def simulate(
    scenario: Scenario, scheme: SchemeName, *, seed: int, progress: Callable[[float], object] | None = None
) -> Outcome:
    """Simulate one preset or baseline. A seed determines the failures for all of them equally.

    Args:
        scenario: cluster, model, failures and options.
        scheme: one of `SCHEMES`.
        seed: seed of failures and of the load's drift.
        progress: called with the simulated share, 0 to 1; an exception of it ends the simulation.

    Raises:
        ValueError: with the field, what was expected and what came.
    """
    given = _scheme_fields(scenario, scheme)
    if scenario.options.shard_optimizer and not keeps_owners(scheme):
        fitting = ", ".join(name for name in SCHEMES if keeps_owners(name))
        raise ValueError(
            f"shard_optimizer=True leaves the optimizer's state of a module to one node, and {scheme} has no copies of "
            f"it: expected one of {fitting}"
        )
    found = json.loads(
        _native.simulate(scenario.to_json(), json.dumps(given), checked("seed", seed, int, least=0), progress)
    )
    happened = tuple(
        Happening(each["at"] / 1e9, each["what"], each["step"], each["members"]) for each in found["happened"]
    )
    found |= {"happened": happened, "recovery_seconds": tuple(found["recovery_seconds"])}
    return Outcome(**found)


def _scheme_fields(scenario: Scenario, name: SchemeName) -> dict[str, Any]:
    """Return the fields of `Scheme` in `src/simulate/scenario.rs`."""
    if name not in SCHEMES:
        raise ValueError(f"presets: expected some of {', '.join(SCHEMES)}, got {name!r}")
    if name not in BASELINES:
        return {"kind": "preset", "name": name}
    return {
        "kind": "restart",
        "name": name,
        "expert_parallel": scenario.expert_parallel or min(2, scenario.nodes),
        "drops_groups": name == "restart-groups",
        "checkpoint_interval": scenario.restart_interval,
        "join_seconds": scenario.join_seconds,
    }


@dataclass(frozen=True)
class Interval:
    """Mean over seeds, and half of its 95 % confidence interval."""

    mean: float
    half: float
    """Half width by Student's t; infinite for one seed."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the interval of independent samples.

        >>> Interval.of([1.0, 2.0, 3.0])
        Interval(mean=2.0, half=2.4843382...)
        """
        if len(values) < 2:
            return cls(values[0], math.inf)
        degrees = len(values) - 1
        student = STUDENT[degrees - 1] if degrees <= len(STUDENT) else 1.96 + 2.4 / degrees
        return cls(statistics.fmean(values), student * statistics.stdev(values) / math.sqrt(len(values)))


@dataclass(frozen=True)
class Sample:
    """Outcomes of one preset or baseline for several seeds."""

    scheme: SchemeName
    outcomes: tuple[Outcome, ...]

    def interval(self, name: str) -> Interval:
        """Return the interval of a number of `Outcome`, by its name.

        Raises:
            ValueError: `Outcome` has no such number.
        """
        numbers = {
            each.name for each in fields(Outcome) if isinstance(getattr(self.outcomes[0], each.name), int | float)
        }
        if name not in numbers:
            raise ValueError(f"name: expected one of {', '.join(sorted(numbers))}, got {name!r}")
        return Interval.of([float(getattr(outcome, name)) for outcome in self.outcomes])

    def seconds_by_cause(self) -> dict[str, float]:
        """Return the means over seeds."""
        causes = self.outcomes[0].nanoseconds
        means = {name: statistics.fmean(each.nanoseconds[name] for each in self.outcomes) / 1e9 for name in causes}
        return {name: seconds for name, seconds in means.items() if seconds}


def simulate_seeds(
    scenario: Scenario,
    scheme: SchemeName,
    *,
    seed: int,
    seeds: int,
    progress: Callable[[float], object] | None = None,
) -> Sample:
    """Simulate the seeds `seed` to `seed + seeds - 1`; otherwise as `simulate`."""
    outcomes = []
    for number in range(checked("seeds", seeds, int, least=1)):
        report = None if progress is None else (lambda part, number=number: progress((number + part) / seeds))
        outcomes.append(simulate(scenario, scheme, seed=seed + number, progress=report))
        if progress is not None:
            progress((number + 1) / seeds)
    return Sample(scheme, tuple(outcomes))
