"""Placement of every MoE layer's experts on ranks, and whether it is time to change it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from evermoe import planning
from evermoe.options import Options, option
from evermoe.planning import PlacementPolicy
from evermoe.state.training_state import TrainingState

LayerPlacements = dict[str, np.ndarray]
"""Module path of each MoE layer → int64 [R, E], replicas of each expert on each rank."""

REBALANCE_GAIN = 0.1
"""A new placement must lower the busiest rank of a layer by this part of the mean load."""
OWNER_SLACK = 0.1
"""Part by which a rank may have more bytes than if all had equally many, so that a unit stays where it is."""


@dataclass(frozen=True, kw_only=True)
class PlacementOptions(Options):
    """Which rank trains which expert."""

    slots: int | None = option(None, shared=True, least=1)
    """Expert replicas per rank and layer; more where the experts need it. Default: the fewest possible plus one."""
    min_replicas: int | None = option(None, shared=True, least=1)
    """Active replicas of each expert, where slots allow; None for 1, and for `copies` with `lazarus`."""
    placement: PlacementPolicy | None = option(None, shared=True)
    """Policy of `evermoe.planning.place` for which rank holds which expert; None: the preset's. Ranks of one node fail
    together."""
    placement_failures: int | None = option(None, shared=True, least=1)
    """Nodes that fail at once, for which the policy weighs survival: `failures` of `evermoe.planning.place`. Of fewer
    nodes all but one. None: as many as the fewest replicas of any expert; for `balanced` at least 2."""
    dense: Literal["replicated", "sharded"] = option("replicated", shared=True)
    """Where the optimizer's state of what is not an expert is: on all workers, or of each module on one of them alone,
    which takes its steps and sends the new weights to all. Weights are on all in both."""
    rebalance_every: int = option(100, shared=True, least=0)
    """Steps between looks whether the load has shifted so far that experts should move; 0 for never."""

    @property
    def replicas(self) -> int:
        """Active replicas of each expert that are wanted."""
        return 1 if self.min_replicas is None else self.min_replicas

    @property
    def placement_policy(self) -> PlacementPolicy:
        """Policy for which rank holds which expert."""
        return self.placement or "balanced"


def place_layers(
    experts: Mapping[str, int],
    load_LE: Sequence[Sequence[float]],
    previous: Mapping[str, np.ndarray],
    nodes: Sequence[str],
    options: PlacementOptions,
    boosts: Mapping[str, Sequence[float]],
) -> LayerPlacements:
    """The placement of all layers for their load; the same on all ranks. May warn of `planning.FewerReplicas`.

    Args:
        experts: number of experts of each layer, by module path.
        load_LE: tokens of each expert, in the order of `experts`; rows may be longer than their layer.
        previous: [R, E] of each layer, what each rank runs now.
        nodes: name of the node of each rank; ranks of one node fail together.
        options: slots, replicas and policy.
        boosts: factors of the load of the experts of some layers.
    """
    domains = planning.failure_domains(nodes)
    failures = options.placement_failures and min(options.placement_failures, max(1, len(domains) - 1))
    placement = {}
    for (path, number), row in zip(experts.items(), load_LE, strict=True):
        slots = _slots(number, domains, options)
        load = np.array(row[:number], dtype=np.float64) * np.array(boosts.get(path, 1.0))
        replicas = planning.allocate(load, len(nodes), slots, options.replicas)
        placement[path] = planning.place(
            replicas, len(nodes), slots, options.placement_policy, load, previous[path], domains, failures
        ).matrix
    return placement


def keep_in_place(
    placement: LayerPlacements,
    held: Mapping[str, np.ndarray],
    nbytes: Mapping[str, Sequence[int]],
    nodes: Sequence[str],
) -> LayerPlacements:
    """The same placement with its rows given to ranks so that the fewest bytes come from peers; the same on all ranks.

    What each node's ranks hold together stays together, so that the loss of a node costs what it did.

    Args:
        placement: [R, E] of each layer.
        held: [R, E] of each layer, whether a rank has the expert's bytes in memory, trained or as a copy.
        nbytes: bytes of each expert of each layer.
        nodes: name of the node of each rank; ranks of one node fail together.
    """
    domains = planning.failure_domains(nodes)
    kept = {}
    for path, matrix in placement.items():
        left = np.flatnonzero(held[path].any(0))  # the others come from a checkpoint, wherever they go
        kept[path] = matrix
        if len(left):
            moves = planning.migrate(held[path][:, left], matrix[:, left], np.array(nbytes[path])[left], domains)
            kept[path] = np.empty_like(matrix)
            kept[path][moves.node_map] = matrix
    return kept


def place_owners(
    nbytes: Sequence[int], active: Sequence[Collection[int]], copies: Sequence[Collection[int]], loads: Sequence[int]
) -> list[int]:
    """The owner of each unit that has one: few units move, and no rank has many more bytes than others.

    A unit stays where it is trained, goes where a copy of it is, or where the fewest bytes are, in this order, as long
    as a rank has room: the level up to which PEC's adaptive sharding (`planning.shard_modules`) would fill all ranks,
    and a tenth more. Largest units first.

        >>> place_owners([30, 20, 10], active=[[0], [0], [0]], copies=[[1], [], []], loads=[0, 0])
        [0, 1, 1]

    Args:
        nbytes: bytes of each unit.
        active: ranks that train it now.
        copies: ranks that have a copy of it in memory.
        loads: by rank, bytes of what it holds beside: its experts.
    """
    parts = planning.shard_modules(nbytes, len(loads), loads, alignment=1)
    filled = [
        load + sum(end - start for _, start, end in part) for load, part in zip(loads, parts, strict=True) if part
    ]
    limit = max(filled, default=0) * (1 + OWNER_SLACK)
    owners, left = {}, list(loads)

    def settle(units: Iterable[int], where: Sequence[Collection[int]], limit: float) -> None:
        for unit in units:
            ranks = [rank for rank in where[unit] if left[rank] + nbytes[unit] <= limit]
            if unit not in owners and ranks:
                owners[unit] = min(ranks, key=lambda rank: (left[rank], rank))
                left[owners[unit]] += nbytes[unit]

    largest_first = sorted(range(len(nbytes)), key=lambda unit: (-nbytes[unit], unit))
    settle(largest_first, active, limit)
    for unit in largest_first:
        settle([unit], copies, limit)
        settle([unit], [range(len(loads))] * len(nbytes), np.inf)
    return [owners[unit] for unit in range(len(nbytes))]


def _slots(experts: int, domains: Sequence[Sequence[int]], options: PlacementOptions) -> int:
    """Replicas that each rank holds: as asked, but all experts fit; or so many that all wanted replicas do.

    Nodes of different sizes need more: each expert is to be on `replicas` of them, or on all.
    """
    ranks = sum(len(domain) for domain in domains)
    fewest = -(-experts // ranks)
    if options.slots is not None:
        return max(fewest, options.slots)
    slots = max(fewest + 1, -(-experts * min(options.replicas, ranks) // ranks))
    wanted = experts * min(options.replicas, len(domains))
    while sum(min(experts, slots * len(domain)) for domain in domains) < wanted:
        slots += 1
    return slots


def should_rebalance(
    state: TrainingState,
    nodes: Sequence[str],
    options: PlacementOptions,
    boosts: Mapping[str, Sequence[float]],
) -> bool:
    """Whether the load has shifted so far that a new placement makes a layer much more even; the same on all ranks."""
    experts = {path: layer.num_experts for path, layer in state.layers.items()}
    previous = {path: layer.matrix_RE for path, layer in state.layers.items()}
    load_LE = state.expert_load.mean_LE.tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", planning.FewerReplicas)  # the recovery at the start has said it
        planned = place_layers(experts, load_LE, previous, nodes, options, boosts)
    for row, (path, layer) in zip(load_LE, state.layers.items(), strict=True):
        load = row[: layer.num_experts]
        now, then = (planning.imbalance(m, load, layer.token_split) for m in (layer.matrix_RE, planned[path]))
        if then < now - REBALANCE_GAIN:
            return True
    return False
