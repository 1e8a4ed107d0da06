"""Runs simulations, for one seed or for several."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from evermoe import _native
from evermoe.options import checked
from evermoe.simulate.scenario import Scenario
from evermoe.simulate.schemes import SCHEMES, SchemeName, keeps_owners, scheme_fields

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t at 95 %, both sides, for 1 to 10 degrees of freedom; 1.96 at most 14 % below it for more."""


@dataclass(frozen=True)
class Happening:
    """Something that happened to the job: `lost`, `resumed` or `restarted`."""

    seconds: float
    what: str
    step: int
    """Steps that the state had taken."""
    members: int


@dataclass(frozen=True)
class Outcome:
    """What came of a simulation."""

    scheme: SchemeName
    seconds: float
    """In all."""
    nanoseconds: Mapping[str, int]
    """By cause; they add up to `seconds`."""
    ettr: float
    """Effective training time ratio: the part of the time in which steps that count were computed."""
    goodput_tokens_per_second: float
    """Tokens of these steps, without those that experts lost, for each second."""
    goodput: float
    """The same, over what all nodes would train without failures and copies, with an even load."""
    steps: int
    """Steps that count."""
    undone_steps: int
    """Steps that were undone, and taken again."""
    interrupted_steps: int
    """Steps that a loss interrupted."""
    repeated_tokens: float
    """Tokens of steps that were undone or interrupted."""
    lost_tokens: float
    """Tokens that experts lost as they went back alone."""
    plt: float
    """Portion of lost tokens, averaged over layers."""
    losses: int
    """Members that were lost."""
    recoveries: int
    """The start and newcomers included."""
    moves: int
    """Times that experts moved as the load had shifted."""
    restarts: int
    """Times that all processes were started again."""
    checkpoint_loads: int
    """Times that all went back to a checkpoint."""
    copy_bytes: int
    """Of copies to peers."""
    first_bytes: int
    """Of first copies, after a change."""
    recovery_bytes: int
    """That recoveries fetched from peers."""
    local_bytes: int
    """That recoveries took from copies in own memory."""
    store_bytes: int
    """That were written to the store."""
    read_bytes: int
    """That were read from it."""
    memory_bytes: int
    """That state and copies took on the fullest node."""
    mean_members: float
    """Nodes that trained, on average."""
    fewest_members: int
    recovery_seconds: tuple[float, ...]
    """From each loss until training went on."""
    happened: tuple[Happening, ...]
    """The first events."""

    @property
    def seconds_by_cause(self) -> dict[str, float]:
        """Seconds of what took any."""
        return {name: spent / 1e9 for name, spent in self.nanoseconds.items() if spent}


def simulate(
    scenario: Scenario, scheme: SchemeName, *, seed: int, progress: Callable[[float], object] | None = None
) -> Outcome:
    """Simulates one way to survive; the same for a seed, which decides for all schemes alike what fails when.

    Args:
        scenario: cluster, model, failures and options.
        scheme: a name of `SCHEMES`.
        seed: of failures and of the load's drift.
        progress: is told how much is over, 0 to 1; what it raises ends the simulation.

    Raises:
        ValueError: with the field, what was expected and what came.
    """
    given = scheme_fields(
        scheme,
        expert_parallel=_expert_parallel(scenario, scheme),
        checkpoint_interval=scenario.restart_interval,
        join_seconds=scenario.join_seconds,
    )
    if scenario.options.dense == "sharded" and not keeps_owners(scheme):
        fitting = ", ".join(name for name in SCHEMES if keeps_owners(name))
        raise ValueError(
            f"dense='sharded' leaves the optimizer's state of a module to one node, and {scheme} has no copies of it: "
            f"expected one of {fitting}"
        )
    found = json.loads(
        _native.simulate(scenario.to_json(), json.dumps(given), checked("seed", seed, int, least=0), progress)
    )
    happened = tuple(
        Happening(each["at"] / 1e9, each["what"], each["step"], each["members"]) for each in found["happened"]
    )
    found |= {"happened": happened, "recovery_seconds": tuple(found["recovery_seconds"])}
    return Outcome(**found)


def _expert_parallel(scenario: Scenario, scheme: SchemeName) -> int:
    if scenario.expert_parallel is not None:
        return scenario.expert_parallel
    return min(2, scenario.nodes) if scheme == "restart-groups" else 1


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and half of its 95 % confidence interval."""

    mean: float
    half: float
    """Infinite for one seed; Student's t for more."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Of independent samples.

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
    """Outcomes of one scheme for several seeds."""

    scheme: SchemeName
    outcomes: tuple[Outcome, ...]

    def interval(self, name: str) -> Interval:
        """Of a number of `Outcome`, by its name.

        Raises:
            ValueError: it has no such number.
        """
        numbers = {
            each.name for each in fields(Outcome) if isinstance(getattr(self.outcomes[0], each.name), int | float)
        }
        if name not in numbers:
            raise ValueError(f"name: expected one of {', '.join(sorted(numbers))}, got {name!r}")
        return Interval.of([float(getattr(outcome, name)) for outcome in self.outcomes])

    def seconds_by_cause(self) -> dict[str, float]:
        """Means over the seeds."""
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
    """Simulates one way to survive for the seeds `seed` to `seed + seeds - 1`; else as `simulate`."""
    outcomes = []
    for number in range(checked("seeds", seeds, int, least=1)):
        tell = None if progress is None else (lambda part, number=number: progress((number + part) / seeds))
        outcomes.append(simulate(scenario, scheme, seed=seed + number, progress=tell))
        if progress is not None:
            progress((number + 1) / seeds)
    return Sample(scheme, tuple(outcomes))
