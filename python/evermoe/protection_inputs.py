"""What members tell each other for a plan of protection, the plan where some have no room, and what it survives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from evermoe.comm.membership import MembershipManager
from evermoe.config.copies import CopyConfig
from evermoe.config.placement import Placement
from evermoe.events import CoverageChanged
from evermoe.keeper import Assignment
from evermoe.placement import place_layers
from evermoe.planning.placement import FewerReplicas, spread_over
from evermoe.planning.protection import (
    ProtectionPlan,
    RankInfo,
    UnitInfo,
    fatal_losses,
    plan_protection,
    riskiest_first,
    survival,
)
from evermoe.presets import LocalSnapshots, ReplayedCopies
from evermoe.profile.memory import share_of_host_bytes
from evermoe.replay.part import parameters_of
from evermoe.replay.replicas import Replicas
from evermoe.snapshot.bundles import arena_sizes, room_for
from evermoe.snapshot.snapshots import planned_bundles
from evermoe.snapshot.window_plan import WindowPlanner
from evermoe.state.stored import NO_COPIES, KeptCopies
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import Unit

GPU_BUCKET_BYTES = 32 << 20
"""Gradients that are sent together beside backward on a GPU, where nothing else is said."""
VERSIONS = 2
"""Of a replica's state, at a time: what it begins with is in messages beside it."""


def about_member(membership: MembershipManager, planner: WindowPlanner, options: CopyConfig) -> RankInfo:
    """Memory, role and measured times of this member."""
    nodes, rank = membership.nodes, membership.everyone.rank
    share = share_of_host_bytes(nodes, rank)
    return RankInfo(
        spread_over(nodes, membership.domains, options.replication)[rank],
        1 << 62 if share is None else share,
        membership.role == "train",
        planner.step_seconds,
        planner.network_seconds,
        options.preset.group(ReplayedCopies).replay_log_bytes,
        planner.link,
        planner.host_speed or None,
    )


def gradient_bucket_bytes(state: TrainingState, options: CopyConfig) -> int:
    """The option of that name, as this trainer's device has it."""
    is_on_gpu = any(device.type == "cuda" for device in state.devices())
    default = GPU_BUCKET_BYTES if is_on_gpu else 0
    given = options.preset.group(ReplayedCopies).gradient_bucket_bytes
    return default if given is None else given


def about_units(state: TrainingState, replicas: Replicas) -> list[tuple[float, bool]]:
    """What only training members know of each unit: its tokens in a step, and whether its steps can be repeated."""
    tokens = state.expert_load.by_unit()
    return [(tokens.get(unit.name, 0.0), replicas.is_replayable(unit.name)) for unit in state.catalog.units]


def unit_infos(
    state: TrainingState, active: Mapping[str, tuple[int, ...]], about: Sequence[tuple[float, bool]]
) -> list[UnitInfo]:
    """All units in the catalog's order: sizes, ranks that train them, and what a training member has told of them."""
    return [
        UnitInfo(
            unit.name,
            unit.nbytes,
            _gradient_bytes(unit),
            active[unit.name],
            tokens,
            is_replayable,
            may_lag=unit.layer is not None,
        )
        for unit, (tokens, is_replayable) in zip(state.catalog.units, about, strict=True)
    ]


def _gradient_bytes(unit: Unit) -> int:
    """Bytes of the gradients of a unit's parameters, at most: those of its tensors without the optimizer's."""
    return sum(parameter.nbytes for parameter in parameters_of(unit))


def in_order_of_risk(
    plan: ProtectionPlan, units: Sequence[UnitInfo], ranks: Sequence[RankInfo], copies: KeptCopies
) -> ProtectionPlan:
    """The plan with those units first that the fewest nodes have now; it is the same on all members.

    Nodes that train a unit count, too: before they send anything, their optimizer state has arrived. All tokens of a
    step need what is no expert, so of units on as many nodes it comes before experts.

    Args:
        plan: says who keeps copies.
        units: all of them, and who trains them.
        ranks: all ranks.
        copies: those that members have of the state now.
    """
    holders = {unit.name: {*unit.active} for unit in units}
    for rank in range(len(ranks)):
        for name in copies.at(rank):
            holders[name].add(rank)
    tokens = {unit.name: unit.tokens if unit.may_lag else math.inf for unit in units}
    order = riskiest_first(holders, tokens, [info.node for info in ranks])
    return ProtectionPlan([plan.by_unit[name] for name in order], plan.summary)


def without(plan: ProtectionPlan, missing: Mapping[str, Collection[int]]) -> ProtectionPlan:
    """The plan when some ranks have no room for the snapshots of some units."""
    kept = [
        replace(each, holders=tuple(rank for rank in each.holders if rank not in missing.get(each.unit, ())))
        if each.kind == "snapshot"
        else each
        for each in plan.units
    ]
    return ProtectionPlan(kept, f"{plan.summary}; fewer copies of {len(missing)}, as memory_dir is full")


def missing_bytes(plan: ProtectionPlan, nbytes: Mapping[str, int], copies: KeptCopies) -> int:
    """Bytes of the copies of a plan that their holders do not have; `nbytes` are the sizes of all units."""
    return sum(
        nbytes[each.unit] for each in plan.units for holder in each.holders if each.unit not in copies.at(holder)
    )


def has_room(
    assignment: Assignment, state: TrainingState, membership: MembershipManager, options: CopyConfig, directory: Path
) -> bool:
    """Whether this host has memory for a step's gradients and a plan's copies beside those of before, which are there.

    Args:
        assignment: the new plan.
        state: of this member.
        membership: who takes part.
        options: preset and copies.
        directory: of the arenas.
    """
    nodes, rank, sizes = membership.nodes, membership.everyone.rank, dict(state.catalog.sizes())
    found, local = planned_bundles(assignment, options)
    arenas = room_for([*found, *local], rank, sizes, directory)
    if arenas.nbytes > arenas.free // nodes.count(nodes[rank]):
        return False
    free = share_of_host_bytes(nodes, rank)
    kept = [each.unit for each in assignment.plan.units if rank in each.holders and each.kind == "replayed"]
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    gradients = sum(p.nbytes for p in parameters if p.device.type == "cpu")
    return free is None or free > VERSIONS * sum(sizes[unit] for unit in kept) + gradients + arenas.nbytes


def expected_arenas(
    state: TrainingState,
    options: CopyConfig,
    placing: Placement,
    nodes: Sequence[str],
    trains: Sequence[bool],
    is_replayable: Callable[[str], bool],
) -> list[int]:
    """Bytes of the arenas of the member that will have the most of them, as far as a process knows that is none as yet.

    It takes experts for equally loaded, and all that nobody has measured for no limit.

    Args:
        state: of the process.
        options: preset and copies.
        placing: slots, replicas and policy.
        nodes: of the ranks; replica nodes last.
        trains: of the ranks, whether they train.
        is_replayable: whether a unit's steps can be repeated.
    """
    training = nodes[: sum(trains)]
    experts = {path: layer.num_experts for path, layer in state.layers.items()}
    nothing = {path: np.zeros((len(training), number), np.int64) for path, number in experts.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FewerReplicas)
        load = [[1.0] * number for number in experts.values()]
        placement = place_layers(experts, load, nothing, training, placing, {})
    owners = {unit: (number % len(training),) for number, unit in enumerate(state.owners.units)}
    active = {
        unit.name: owners.get(unit.name, tuple(range(len(training))))
        if unit.layer is None
        else tuple(np.flatnonzero(placement[unit.layer][:, unit.expert]).tolist())
        for unit in state.catalog.units
    }
    infos = unit_infos(state, active, [(0.0, is_replayable(unit.name)) for unit in state.catalog.units])
    ranks = [RankInfo(node, 1 << 62, does) for node, does in zip(nodes, trains, strict=True)]
    plan = plan_copies(options, infos, ranks)
    assignment = Assignment(plan, active, 0, "", copies_are_late(plan, options), NO_COPIES)
    planned = [each for part in planned_bundles(assignment, options) for each in part]
    sizes = dict(state.catalog.sizes())
    return max((arena_sizes(planned, rank, sizes) for rank in range(len(nodes))), key=sum)


def plan_copies(options: CopyConfig, units: Sequence[UnitInfo], ranks: Sequence[RankInfo]) -> ProtectionPlan:
    """Return who keeps copies of what: see `plan_protection`."""
    budget = options.preset.group(LocalSnapshots).copy_budget
    return plan_protection(options.name, units, ranks, replication=options.replication, budget=budget)


def copies_are_late(plan: ProtectionPlan, options: CopyConfig) -> bool:
    """Whether the copies of a step are made during the next one: they are complete at its vote, not before."""
    is_followed_late = any(each.kind == "snapshot" and each.period == 1 for each in plan.units)
    return options.replication > 0 and (options.choices.copies_late or is_followed_late)


def covered_now(
    plan: ProtectionPlan, active: Mapping[str, tuple[int, ...]], ranks: Sequence[RankInfo], copies: KeptCopies
) -> CoverageChanged:
    """Which losses would be survived with the copies that members have, before those of the plan that are missing."""
    kept = [
        replace(each, holders=tuple(rank for rank in range(len(ranks)) if each.unit in copies.at(rank)))
        for each in plan.units
    ]
    is_complete = all(set(each.holders) <= {*now.holders} for each, now in zip(plan.units, kept, strict=True))
    return replace(covered(ProtectionPlan(kept, ""), active, ranks), is_complete=is_complete)


def covered(plan: ProtectionPlan, active: Mapping[str, tuple[int, ...]], ranks: Sequence[RankInfo]) -> CoverageChanged:
    """Which losses would be survived once all copies of the plan are complete."""
    holders = {each.unit: {*active[each.unit], *each.holders} for each in plan.units}
    fatal = fatal_losses(holders, [info.node for info in ranks])
    return CoverageChanged(*survival(plan, active, ranks), fatal, is_complete=True)
