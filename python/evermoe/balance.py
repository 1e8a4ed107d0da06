"""Which rank runs which expert of every MoE layer, and whether it is time to change that."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from evermoe import planning
from evermoe.config import SessionConfig
from evermoe.units import TrainingState

Placement = dict[str, np.ndarray]
"""Module path of each MoE layer → int64 [R, E], replicas of each expert on each rank."""

WORTH_IT = 0.1
"""A new placement must lower the busiest rank of a layer by this part of the mean load."""


def place_layers(
    experts: Mapping[str, int],
    load_LE: Sequence[Sequence[float]],
    previous: Mapping[str, np.ndarray],
    nodes: Sequence[str],
    config: SessionConfig,
    boosts: Mapping[str, Sequence[float]],
) -> Placement:
    """The placement of all layers for their load; the same on all ranks. May warn of `planning.FewerReplicas`.

    Args:
        experts: number of experts of each layer, by module path.
        load_LE: tokens of each expert, in the order of `experts`; rows may be longer than their layer.
        previous: [R, E] of each layer, what each rank runs now.
        nodes: name of the node of each rank; ranks of one node fail together.
        config: slots, replicas and policy.
        boosts: factors of the load of the experts of some layers.
    """
    domains = _domains(nodes)
    placement = {}
    for (path, number), row in zip(experts.items(), load_LE, strict=True):
        fewest = -(-number // len(nodes))
        enough = max(fewest + 1, -(-number * min(config.replicas, len(nodes)) // len(nodes)))
        slots = max(fewest, enough if config.slots is None else config.slots)
        load = np.array(row[:number], dtype=np.float64) * np.array(boosts.get(path, 1.0))
        replicas = planning.allocate(load, len(nodes), slots, config.replicas)
        placed = planning.place(replicas, len(nodes), slots, config.placement_policy, load, previous[path], domains)
        placement[path] = placed.matrix
    return placement


def is_worth_it(
    state: TrainingState,
    nodes: Sequence[str],
    config: SessionConfig,
    boosts: Mapping[str, Sequence[float]],
) -> bool:
    """Whether the load has shifted so far that a new placement makes a layer much more even; the same on all ranks."""
    experts = {path: layer.num_experts for path, layer in state.layers.items()}
    previous = {path: layer.matrix_RE for path, layer in state.layers.items()}
    load_LE = state.load_LE.tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", planning.FewerReplicas)  # the recovery at the start has said it
        planned = place_layers(experts, load_LE, previous, nodes, config, boosts)
    for row, (path, layer) in zip(load_LE, state.layers.items(), strict=True):
        load = row[: layer.num_experts]
        now, then = (planning.imbalance(m, load, layer.token_split) for m in (layer.matrix_RE, planned[path]))
        if then < now - WORTH_IT:
            return True
    return False


def _domains(nodes: Sequence[str]) -> list[list[int]] | None:
    """Ranks by node; on a single node every rank fails alone, as copies then protect against crashes only."""
    ranks_of: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    return list(ranks_of.values()) if len(ranks_of) > 1 else None
