"""Placement of every MoE layer's experts on ranks, and the decision to change it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from evermoe.config.placement import Placement
from evermoe.planning.dispatch import imbalance
from evermoe.planning.migrate import keep_in_place as keep_rows
from evermoe.planning.placement import FewerReplicas, failure_domains, is_worth_moving, place_layer
from evermoe.state.training_state import TrainingState

LayerPlacements = dict[str, np.ndarray]
"""Module path of each MoE layer → int64 [R, E], replicas of each expert on each rank."""


def place_layers(
    experts: Mapping[str, int],
    load_LE: Sequence[Sequence[float]],
    previous: Mapping[str, np.ndarray],
    nodes: Sequence[str],
    options: Placement,
    boosts: Mapping[str, Sequence[float]],
    spread: Sequence[str] | None = None,
) -> LayerPlacements:
    """Return a placement of all layers for their load; the same on all ranks. May warn with `planning.FewerReplicas`.

    Args:
        experts: number of experts of each layer, by module path.
        load_LE: tokens of each expert, in the order of `experts`; rows may be longer than their layer.
        previous: [R, E] of each layer, replicas that each rank runs now.
        nodes: name of the node of each rank; ranks of one node fail together.
        options: resolved options, with the choices of the preset.
        boosts: factors of the experts' loads, for some layers.
        spread: failure domain of each rank, such as its rack, over which replicas are spread; None: its node.
    """
    asked = options.expert_slots, options.min_replicas or 1, options.policy or "balanced", options.failures
    placement = {}
    for (path, number), row in zip(experts.items(), load_LE, strict=True):
        load = np.array(row[:number], dtype=np.float64) * np.array(boosts.get(path, 1.0))
        placement[path] = place_layer(load, previous[path], nodes, *asked, spread)
    return placement


def keep_in_place(
    placement: LayerPlacements,
    held: Mapping[str, np.ndarray],
    nbytes: Mapping[str, Sequence[int]],
    nodes: Sequence[str],
) -> LayerPlacements:
    """Return the placement with its rows assigned to the ranks such that peers send the fewest bytes.

    The result is the same on all ranks. Rows of one node stay on one node, so the loss of a node costs the same.

    Args:
        placement: [R, E] of each layer.
        held: [R, E] of each layer, whether a rank has the expert's bytes in memory, trained or as a copy.
        nbytes: bytes of each expert of each layer.
        nodes: name of the node of each rank; ranks of one node fail together.
    """
    domains = failure_domains(nodes)
    return {path: keep_rows(held[path], matrix, nbytes[path], domains) for path, matrix in placement.items()}


def vacant_rows(before_RE: np.ndarray, now_RE: np.ndarray) -> list[list[int]]:
    """Return the experts of each lost rank, if equally many ranks are new; otherwise an empty list.

    Args:
        before_RE: the previous placement; its ranks may have had other numbers.
        now_RE: replicas that each rank runs now; a new rank runs none.

    >>> vacant_rows(np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]]), np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0]]))
    [[1, 2]]
    """
    vacant = [np.flatnonzero(row).tolist() for row in before_RE]
    for row in now_RE:
        held = np.flatnonzero(row).tolist()
        if held and held not in vacant:
            return []
        if held:
            vacant.remove(held)
    return vacant if len(vacant) == np.count_nonzero(~now_RE.any(axis=1)) else []


def with_vacant(now_RE: np.ndarray, vacant: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the current placement in which new ranks take over the experts of lost ranks.

    >>> with_vacant(np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0]]), [[1, 2]]).tolist()
    [[1, 0, 1], [0, 1, 1], [1, 1, 0]]
    """
    taken = now_RE.copy()
    new = np.flatnonzero(~now_RE.any(axis=1))
    for rank, experts in zip(new, vacant, strict=False):
        taken[rank, experts] = 1
    return taken


def rebalanced(
    state: TrainingState,
    nodes: Sequence[str],
    options: Placement,
    boosts: Mapping[str, Sequence[float]],
    spread: Sequence[str] | None = None,
) -> LayerPlacements | None:
    """Return a placement for the current load, or None if it balances no layer much better; the same on all ranks."""
    experts = {path: layer.num_experts for path, layer in state.layers.items()}
    previous = {path: layer.matrix_RE for path, layer in state.layers.items()}
    load_LE = state.expert_load.mean_LE.tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FewerReplicas)  # the first recovery has warned already
        planned = place_layers(experts, load_LE, previous, nodes, options, boosts, spread)
    for row, (path, layer) in zip(load_LE, state.layers.items(), strict=True):
        load = row[: layer.num_experts]
        now, then = (imbalance(m, load, layer.token_split) for m in (layer.matrix_RE, planned[path]))
        if is_worth_moving(now, then):
            return planned
    return None


def even_division(experts: int, ranks: int) -> NDArray[np.int64]:
    """Return the placement `[R, E]` of each expert on one rank, in order of number, as many on each to within one.

    >>> even_division(3, 2).tolist()
    [[1, 0, 0], [0, 1, 1]]
    """
    ends = experts * np.arange(ranks + 1) // ranks
    return np.diff(np.arange(experts) < ends[:, None], axis=0).astype(np.int64)
