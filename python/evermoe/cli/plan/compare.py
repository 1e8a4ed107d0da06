"""Plans of every layer by every policy, and their measures. L layers, N nodes, E experts."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from evermoe.planning import allocate, place, recovery_probability
from evermoe.planning.dispatch import imbalance
from evermoe.planning.placement import FewerReplicas, PlacementPolicy
from evermoe.planning.survival import Survival

MAX_CELLS = 1 << 26
"""Largest number of cells of the [N, L·E] matrix of a model: half a gigabyte. For one layer `allocate` allows 2^24."""
LIGHT = 1 + 1e-9
"""Load that counts as at most the mean load of a node, up to rounding."""


@dataclass(frozen=True)
class Cluster:
    """The machines, and the requirements of the placement."""

    nodes: int
    slots: int
    """Replicas of each layer that each node holds."""
    min_replicas: int
    domain_size: int
    """Number of consecutive nodes that fail together."""
    failures: tuple[int, ...]
    """Numbers of simultaneously lost domains to examine, ascending."""

    @property
    def domains(self) -> list[list[int]]:
        """Groups of nodes that fail together; the last one may be smaller."""
        starts = [*range(0, self.nodes, self.domain_size), self.nodes]
        return [list(range(start, end)) for start, end in pairwise(starts)]

    @property
    def unit(self) -> str:
        """Name of what fails: a node, or a domain of several."""
        return "node" if self.domain_size == 1 else "domain"

    def losses(self, failures: int) -> str:
        """Return `1 node` or `2 nodes at once`."""
        return f"1 {self.unit}" if failures == 1 else f"{failures} {self.unit}s at once"

    def slots_for(self, experts: int, replicas: int) -> int:
        """Return the slots per node that give every expert this number of replicas, at most one per node."""
        return math.ceil(experts * min(replicas, self.nodes) / self.nodes)


@dataclass(frozen=True)
class Heavy:
    """Expert with the heaviest replica, if that exceeds the mean load of a node."""

    layer: int
    expert: int
    replicas: int
    times_mean: float
    """Load of one replica over the mean load of a node, if all replicas of the expert share its load evenly."""
    slots: int
    """Fewest slots per node, found by doubling and halving, at which no replica of this layer is that heavy."""


@dataclass(frozen=True)
class LoadSummary:
    """Measures of how uneven the load is."""

    hottest_share: float
    """Largest share of its layer's tokens that any expert has."""
    hottest_layer: int
    hottest_expert: int
    mean_share: float
    """Share of the hottest expert, averaged over all layers."""
    top2_share: float
    """Largest share that the two hottest experts of a layer have together."""


@dataclass(frozen=True)
class Result:
    """Placements of all layers by one policy."""

    policy: PlacementPolicy
    even: tuple[float, ...]
    """Load of the busiest node over the mean, by layer, if replicas of an expert share its load evenly."""
    balanced: tuple[float, ...]
    """The same if the holders of an expert share its load in the best proportions."""
    distinct: int
    """Fewest distinct domains that hold any expert of any layer."""
    survival: tuple[Survival, ...]
    """Probability that every expert of every layer keeps a replica, for each number of failures."""
    seconds: float
    """Average seconds to plan one layer."""
    matrices: tuple[NDArray[np.int64], ...]
    """[N, E] of each layer."""


@dataclass(frozen=True)
class Comparison:
    """All results of `evermoe plan` that the report shows."""

    cluster: Cluster
    load: LoadSummary
    replicas: NDArray[np.int64]
    """[L, E]."""
    heavy: Heavy | None
    results: tuple[Result, ...]


def compare(load_LE: NDArray[np.float64], cluster: Cluster, policies: Sequence[PlacementPolicy]) -> Comparison:
    """Plan with each policy, and measure the placements.

    Raises:
        ValueError: a planner refuses these loads or sizes.
    """
    layers, experts = load_LE.shape
    if cluster.nodes * experts * max(layers, 4) > MAX_CELLS:
        raise ValueError(
            f"--nodes: expected at most 2^24 nodes × experts and 2^26 nodes × experts × layers, got {cluster.nodes} × "
            f"{experts} × {layers}; plan fewer layers at a time"
        )
    replicas_LE = np.array([_allocate(load_E, cluster, cluster.slots) for load_E in load_LE])
    results = tuple(_result(policy, load_LE, replicas_LE, cluster) for policy in policies)
    return Comparison(cluster, _summary(load_LE), replicas_LE, _heavy(load_LE, replicas_LE, cluster), results)


def _allocate(load_E: NDArray[np.float64], cluster: Cluster, slots: int) -> NDArray[np.int64]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FewerReplicas)  # the report says it once for all layers
        return allocate(load_E, cluster.nodes, slots, cluster.min_replicas)


def _result(
    policy: PlacementPolicy, load_LE: NDArray[np.float64], replicas_LE: NDArray[np.int64], cluster: Cluster
) -> Result:
    domains = cluster.domains
    start = time.perf_counter()
    matrices = tuple(
        place(replicas_E, cluster.nodes, cluster.slots, policy, load=load_E, domains=domains).matrix
        for load_E, replicas_E in zip(load_LE, replicas_LE, strict=True)
    )
    seconds = (time.perf_counter() - start) / len(matrices)
    whole_model = np.hstack(matrices)
    distinct = np.logical_or.reduceat(whole_model > 0, [domain[0] for domain in domains]).sum(0)
    return Result(
        policy,
        tuple(imbalance(matrix, load_E) for matrix, load_E in zip(matrices, load_LE, strict=True)),
        tuple(imbalance(matrix, load_E, "balanced") for matrix, load_E in zip(matrices, load_LE, strict=True)),
        int(distinct.min()),
        tuple(recovery_probability(whole_model, failures, domains=domains) for failures in cluster.failures),
        seconds,
        matrices,
    )


def _shares(load_LE: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each expert's share of its layer; in a layer without load all shares are equal, as in `allocate`."""
    total = load_LE.sum(1, keepdims=True)
    return np.where(total > 0, load_LE / np.where(total > 0, total, 1), 1 / load_LE.shape[1])


def _summary(load_LE: NDArray[np.float64]) -> LoadSummary:
    share_LE = _shares(load_LE)
    layer, expert = divmod(int(share_LE.argmax()), share_LE.shape[1])
    top2_L = np.sort(share_LE, axis=1)[:, -2:].sum(1)
    return LoadSummary(
        float(share_LE[layer, expert]), layer, expert, float(share_LE.max(1).mean()), float(top2_L.max())
    )


def _times_mean(load_LE: NDArray[np.float64], replicas_LE: NDArray[np.int64], cluster: Cluster) -> NDArray[np.float64]:
    """Return [L, E]: load of one replica of an expert over the mean load of a node; replicas of one node count as
    one."""
    return _shares(load_LE) * cluster.nodes / np.minimum(replicas_LE, cluster.nodes)


def _heavy(load_LE: NDArray[np.float64], replicas_LE: NDArray[np.int64], cluster: Cluster) -> Heavy | None:
    times_mean_LE = _times_mean(load_LE, replicas_LE, cluster)
    layer, expert = divmod(int(times_mean_LE.argmax()), load_LE.shape[1])
    worst = float(times_mean_LE[layer, expert])
    if worst <= LIGHT:
        return None
    return Heavy(layer, expert, int(replicas_LE[layer, expert]), worst, _light_slots(load_LE[layer], cluster))


def _light_slots(load_E: NDArray[np.float64], cluster: Cluster) -> int:
    """Return the slots at which no replica is heavier than a node's mean; at most E, where each node has every
    expert."""

    def is_light(slots: int) -> bool:
        replicas_LE = _allocate(load_E, cluster, slots)[None]
        return bool(_times_mean(load_E[None], replicas_LE, cluster).max() <= LIGHT)

    too_few, enough = cluster.slots, min(2 * cluster.slots, len(load_E))
    while not is_light(enough):
        too_few, enough = enough, min(2 * enough, len(load_E))
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if is_light(middle) else (middle, enough)
    return enough
