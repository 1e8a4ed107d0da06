"""Conclusions from a comparison, in sentences; every number is one of the table's."""

from __future__ import annotations

from evermoe.cli.plan.compare import Comparison, Heavy, Result
from evermoe.planning.placement import POLICIES
from evermoe.planning.survival import Survival

TOLERANCE = 0.05
"""Survival that `balanced` may give up for evenness."""
ROUNDING = 1e-12
"""Rounding error of an exact probability."""


def percent(part: float) -> str:
    """Format a share with one decimal; 100% and 0% appear only where they are exact, up to rounding.

    >>> percent(0.968), percent(0.99999), percent(1.0)
    ('96.8%', '>99.9%', '100%')
    """
    if part < ROUNDING or part > 1 - ROUNDING:
        return f"{part:.0%}"
    if part < 0.0005:
        return "<0.1%"
    return ">99.9%" if part >= 0.9995 else f"{part:.1%}"


def survived(survival: Survival) -> str:
    """Format a probability, with its error if it is not exact."""
    return percent(survival.probability) + (f"±{survival.error * 100:.1f}" if survival.error else "")


def worst(result: Result) -> float:
    """Return the load of the busiest node over the mean in the worst layer, with the balanced split, as the table
    shows it."""
    return round(max(result.balanced), 2)


def best(comparison: Comparison) -> tuple[Result, int | None]:
    """Return the recommended result, and the index of the number of failures that decided; None if balance alone did.

    Numbers of failures count up to the first at which even the safest result loses something, if it survives half of
    the cases. Where the safest result loses nothing, the recommended one must lose nothing; otherwise it may survive
    less by `TOLERANCE`. Among those that are safe enough the most even one wins.
    """
    results = comparison.results
    candidates, decisive = list(results), None
    for index in range(len(comparison.cluster.failures)):
        most = max(result.survival[index].probability for result in results)
        if most < 0.5:
            break
        sure = most > 1 - ROUNDING
        least = 1 - ROUNDING if sure else most - TOLERANCE
        safe = [
            result
            for result in candidates
            if result.survival[index].probability + result.survival[index].error >= least
        ]
        if safe:  # fewer losses come first, as they are more likely
            candidates, decisive = safe, index
        if not sure:
            break
    weighed = decisive or 0

    def rank(result: Result) -> tuple[float, ...]:
        survival = round(result.survival[weighed].probability, 3)
        return worst(result), -survival, round(max(result.even), 2), POLICIES.index(result.policy)

    return min(candidates, key=rank), decisive


def advise(comparison: Comparison) -> list[str]:
    """Return sentences for the operator, the most important first."""
    chosen, decisive = best(comparison)
    sentences = [_choice(comparison, chosen, decisive)]
    if chosen.distinct < 2:
        sentences.append(_single_loss(comparison, chosen))
    sentences.append(_copies(comparison, chosen))
    if comparison.heavy is not None:
        sentences.append(_heavy(comparison.heavy, comparison.cluster.slots))
    return sentences


def _choice(comparison: Comparison, chosen: Result, decisive: int | None) -> str:
    index = decisive or 0
    lost = comparison.cluster.losses(comparison.cluster.failures[index])
    even = f"busiest node {worst(chosen):.2f} × the mean"
    safe = f"{survived(chosen.survival[index])} of all losses of {lost} survived"
    if len(comparison.results) == 1:
        return f"{chosen.policy}: {even} in the worst layer, {safe}."
    why = "" if decisive is not None else f"No policy survives half of all losses of {lost}, so evenness decides. "
    rival = _rival(comparison, chosen, index)
    if rival is None:
        return f"{why}Take {chosen.policy}: {even} in the worst layer, {safe}; no other policy is better at either."
    return (
        f"{why}Take {chosen.policy}: {even} in the worst layer against {worst(rival):.2f} with {rival.policy}, and "
        f"{safe} against {survived(rival.survival[index])}."
    )


def _rival(comparison: Comparison, chosen: Result, index: int) -> Result | None:
    """Return the result that survives most if it was not chosen, else the most even one; None if neither is better."""
    others = [result for result in comparison.results if result is not chosen]
    safest = max(others, key=lambda result: (result.survival[index].probability, -worst(result)))
    if safest.survival[index].probability > chosen.survival[index].probability:
        return safest
    evenest = min(others, key=lambda result: (worst(result), -result.survival[index].probability))
    return evenest if worst(evenest) < worst(chosen) else None


def _single_loss(comparison: Comparison, chosen: Result) -> str:
    cluster = comparison.cluster
    if len(cluster.domains) == 1:
        return f"There is only one {cluster.unit}: no placement survives its loss."
    one = f"One lost {cluster.unit} loses experts"
    single, experts = int((comparison.replicas == 1).sum()), comparison.replicas.shape[1]
    if single:
        needed = cluster.slots_for(experts, 2)
        few = f"{one}, as {single} of {comparison.replicas.size} have a single replica"
        if needed <= cluster.slots:
            return f"{few}: --min-replicas 2 gives each two in the same {cluster.slots} slots per node."
        return (
            f"{few}: {needed} slots per node instead of {cluster.slots} (2 × {experts} / {cluster.nodes}, rounded up) "
            "give each two; the remaining slots go to the hot experts."
        )
    if chosen.policy in ("balanced", "safest"):
        return f"{one}, as the sizes of the domains leave no room for a second replica: use more equal domains."
    return (
        f"{one} although each has two replicas or more: {chosen.policy} puts them into one {cluster.unit}; balanced "
        "and safest avoid that where they can."
    )


def _copies(comparison: Comparison, chosen: Result) -> str:
    cluster = comparison.cluster
    if cluster.domain_size > 1:
        return (
            "Copies in host memory, Session(replication=2), keep each expert on one more node than trains on it; they "
            "do not look at domains."
        )
    losses = min(chosen.distinct, cluster.nodes - 1)
    if losses == 0:
        return "Copies in host memory need a second node; checkpoints on disk protect a single one."
    return (
        "This counts active replicas only: copies in host memory, Session(replication=2), keep each expert on one more "
        f"node, so that any loss of {comparison.cluster.losses(losses)} is survived."
    )


def _heavy(heavy: Heavy, slots: int) -> str:
    each = "its single replica" if heavy.replicas == 1 else f"each of its {heavy.replicas} replicas"
    return (
        f"Expert {heavy.expert} of layer {heavy.layer} is too hot for any placement, as {each} bears "
        f"{heavy.times_mean:.2f} × a node's mean load: {heavy.slots} slots per node instead of {slots} would avoid "
        "that."
    )
