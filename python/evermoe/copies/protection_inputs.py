"""Inputs of a protection plan, the plan when some members have no room, and the failures that it survives."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evermoe.comm.membership import MembershipManager
from evermoe.config.copies import CopyConfig
from evermoe.config.placement import Placement
from evermoe.copies.replay.part import parameters_of
from evermoe.copies.replay.replicas import Replicas
from evermoe.copies.snapshot.bundles import arena_sizes, room_for
from evermoe.copies.snapshot.member_speeds import MemberSpeeds
from evermoe.copies.snapshot.planned_bundles import planned_bundles
from evermoe.events import CoverageChanged
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
from evermoe.state.keeper import Assignment
from evermoe.state.placement import place_layers
from evermoe.state.still import still_tensors
from evermoe.state.stored import NO_COPIES, KeptCopies
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import Unit

logger = logging.getLogger(__name__)
GPU_BUCKET_BYTES = 32 << 20
"""Default size of the gradient buckets that are sent during backward, for models on a GPU."""
STATE_BUFFERS = 2
"""Memory of a replica's first state, in multiples of it: the state itself, and the messages that bring it."""


def member_info(membership: MembershipManager, speeds: MemberSpeeds, options: CopyConfig) -> RankInfo:
    """Return memory, role and measured times of this member."""
    nodes, rank = membership.nodes, membership.everyone.rank
    share = share_of_host_bytes(nodes, rank)
    return RankInfo(
        spread_over(nodes, membership.domains, options.replication)[rank],
        1 << 62 if share is None else share,
        membership.role == "train",
        speeds.step_seconds,
        speeds.network_seconds,
        options.preset.group(ReplayedCopies).replay_log_bytes,
        speeds.link,
        speeds.host or None,
    )


def gradient_bucket_bytes(state: TrainingState, options: CopyConfig) -> int:
    """Return the option of that name, or its default for this trainer's devices."""
    is_on_gpu = any(device.type == "cuda" for device in state.devices())
    default = GPU_BUCKET_BYTES if is_on_gpu else 0
    given = options.preset.group(ReplayedCopies).gradient_bucket_bytes
    return default if given is None else given


class UnitFacts(NamedTuple):
    """Facts of a unit that only trainers know."""

    tokens: float
    """Tokens that it gets in a step."""
    is_replayable: bool
    """Whether its steps can be repeated."""
    still: Sequence[str]
    """Names of its tensors that no step writes."""


def unit_facts(state: TrainingState, replicas: Replicas) -> list[UnitFacts]:
    """Return what only trainers know of each unit."""
    tokens, names = state.expert_load.by_unit(), [unit.name for unit in state.catalog.units]
    replayable = replicas.replayable(names)
    return [UnitFacts(tokens.get(name, 0.0), name in replayable, still_tensors(state, name)) for name in names]


def unit_infos(
    state: TrainingState, active: Mapping[str, tuple[int, ...]], about: Sequence[UnitFacts]
) -> list[UnitInfo]:
    """Return sizes, training ranks and a trainer's facts of all units, in the catalog's order."""
    return [
        UnitInfo(
            unit.name,
            unit.nbytes,
            _gradient_bytes(unit, facts.still),
            active[unit.name],
            facts.tokens,
            facts.is_replayable,
            may_lag=unit.layer is not None,
        )
        for unit, facts in zip(state.catalog.units, about, strict=True)
    ]


def _gradient_bytes(unit: Unit, still: Collection[str]) -> int:
    """Return the maximum bytes of a unit's gradients: those of its parameters that steps write."""
    return sum(parameter.nbytes for parameter in parameters_of(unit) if parameter.name not in still)


def order_by_risk(
    plan: ProtectionPlan, units: Sequence[UnitInfo], ranks: Sequence[RankInfo], copies: KeptCopies
) -> ProtectionPlan:
    """Return the plan with its units ordered by the number of nodes that hold them, fewest first.

    The order is the same on all members. Nodes that train a unit count, too: their optimizer state arrives before they
    send anything. Among units on equally many nodes, those that are not experts come first: every token needs them.

    Args:
        plan: the plan to reorder.
        units: all units, with the ranks that train them.
        ranks: all ranks.
        copies: copies of the current state that members have.
    """
    holders = {unit.name: {*unit.active} for unit in units}
    for rank in range(len(ranks)):
        for name in copies.at(rank):
            holders[name].add(rank)
    tokens = {unit.name: unit.tokens if unit.may_lag else math.inf for unit in units}
    order = riskiest_first(holders, tokens, [info.node for info in ranks])
    return ProtectionPlan([plan.by_unit[name] for name in order], plan.summary)


def without_copies(plan: ProtectionPlan, missing: Mapping[str, Collection[int]]) -> ProtectionPlan:
    """Return the plan without the snapshots of some units at ranks that have no room for them."""
    kept = [
        replace(each, holders=tuple(rank for rank in each.holders if rank not in missing.get(each.unit, ())))
        if each.kind == "snapshot"
        else each
        for each in plan.units
    ]
    return ProtectionPlan(kept, f"{plan.summary}; fewer copies of {len(missing)}, as memory_dir is full")


def missing_bytes(plan: ProtectionPlan, nbytes: Mapping[str, int], copies: KeptCopies) -> int:
    """Return the bytes of planned copies that their holders lack; `nbytes` are the sizes of all units."""
    return sum(
        nbytes[each.unit] for each in plan.units for holder in each.holders if each.unit not in copies.at(holder)
    )


def has_room(
    assignment: Assignment, state: TrainingState, membership: MembershipManager, options: CopyConfig, directory: Path
) -> bool:
    """Whether this host has memory for a step's gradients and a plan's copies in addition to the earlier copies.

    Args:
        assignment: the new plan.
        state: state of this member.
        membership: all members.
        options: the preset, and the number of copies.
        directory: directory of the arenas.
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
    return free is None or free > STATE_BUFFERS * sum(sizes[unit] for unit in kept) + gradients + arenas.nbytes


def expected_arenas(
    state: TrainingState,
    options: CopyConfig,
    placing: Placement,
    nodes: Sequence[str],
    trains: Sequence[bool],
    replayable: Collection[str],
) -> list[int]:
    """Return the bytes of the largest member's arenas, as expected by a process that is not a member yet.

    The estimate assumes that all experts have the same load, and that memory and time that were not measured are
    unlimited.

    Args:
        state: state of the process.
        options: the preset, and the number of copies.
        placing: slots, replicas and policy.
        nodes: node of each rank; replica nodes come last.
        trains: whether each rank trains.
        replayable: units whose steps can be repeated.
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
        unit.name: owners.get(unit.name) or state.dense_holders(unit.name, len(training))
        if unit.layer is None
        else tuple(np.flatnonzero(placement[unit.layer][:, unit.expert]).tolist())
        for unit in state.catalog.units
    }
    names = [unit.name for unit in state.catalog.units]
    about = [UnitFacts(0.0, name in replayable, still_tensors(state, name)) for name in names]
    infos = unit_infos(state, active, about)
    ranks = [RankInfo(node, 1 << 62, does) for node, does in zip(nodes, trains, strict=True)]
    plan = plan_copies(options, infos, ranks)
    assignment = Assignment(plan, active, 0, "", plan.is_late, NO_COPIES)
    planned = [each for part in planned_bundles(assignment, options) for each in part]
    sizes = dict(state.catalog.sizes())
    return max((arena_sizes(planned, rank, sizes) for rank in range(len(nodes))), key=sum)


def plan_copies(options: CopyConfig, units: Sequence[UnitInfo], ranks: Sequence[RankInfo]) -> ProtectionPlan:
    """Return the plan of `plan_protection` for these options."""
    budget = options.preset.group(LocalSnapshots).copy_budget
    return plan_protection(options.name, units, ranks, replication=options.replication, budget=budget)


def current_coverage(
    plan: ProtectionPlan, active: Mapping[str, tuple[int, ...]], ranks: Sequence[RankInfo], copies: KeptCopies
) -> CoverageChanged:
    """Return the losses that the job survives with its current copies, before the missing ones are made."""
    kept = [
        replace(each, holders=tuple(rank for rank in range(len(ranks)) if each.unit in copies.at(rank)))
        for each in plan.units
    ]
    is_complete = all(set(each.holders) <= {*now.holders} for each, now in zip(plan.units, kept, strict=True))
    return replace(planned_coverage(ProtectionPlan(kept, ""), active, ranks), is_complete=is_complete)


def planned_coverage(
    plan: ProtectionPlan, active: Mapping[str, tuple[int, ...]], ranks: Sequence[RankInfo]
) -> CoverageChanged:
    """Return the losses that the job survives once all copies of the plan are complete."""
    holders = {each.unit: {*active[each.unit], *each.holders} for each in plan.units}
    fatal = fatal_losses(holders, [info.node for info in ranks])
    return CoverageChanged(*survival(plan, active, ranks), fatal, is_complete=True)


def log_plan(
    plan: ProtectionPlan,
    active: Mapping[str, tuple[int, ...]],
    ranks: Sequence[RankInfo],
    options: CopyConfig,
    coverage: CoverageChanged,
) -> None:
    """Log the plan's summary at the level INFO; as a warning where `auto` cannot have the copies that lose nothing."""
    falls_short = options.choices.chooses_copies and may_lose_updates(plan, active, ranks, options.replication)
    odds = "the state survives the loss of a node with probability %.3g, of two at once with %.3g"
    level = logging.WARNING if falls_short else logging.INFO
    logger.log(level, f"%s; {odds}", plan.summary, coverage.survives_one, coverage.survives_two)


def may_lose_updates(
    plan: ProtectionPlan, active: Mapping[str, tuple[int, ...]], ranks: Sequence[RankInfo], replication: int
) -> bool:
    """Return whether the loss of a node may cost updates although more nodes are left: copies lag or are missing."""
    wanted = min(replication, len({info.node for info in ranks}))

    def num_nodes(holders: Iterable[int]) -> int:
        return len({ranks[rank].node for rank in holders})

    return any(
        num_nodes({*active[each.unit], *each.holders}) < wanted or (each.kind == "snapshot" and each.period > 1)
        for each in plan.units
        if num_nodes(active[each.unit]) < wanted
    )
