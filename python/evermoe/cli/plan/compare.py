"""Plans every layer with every policy and measures what comes out. L layers, N nodes, E experts."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from evermoe.planning import FewerReplicas, PlacementPolicy, Survival, allocate, imbalance, place, recovery_probability

MAX_CELLS = 1 << 26
"""Cells of the [N, L·E] matrix of the whole model: half a gigabyte. In one layer `allocate` has room for 2^24."""
LIGHT = 1 + 1e-9
"""Times the mean load of a node, up to rounding."""


@dataclass(frozen=True)
class Cluster:
    """The machines, and what is asked of them."""

    nodes: int
    slots: int
    """Replicas that each node holds of each layer."""
    min_replicas: int
    domain_size: int
    """So many consecutive nodes fail together."""
    failures: tuple[int, ...]
    """Numbers of simultaneous losses of domains to look at, ascending."""

    @property
    def domains(self) -> list[list[int]]:
        """Nodes that fail together; the last domain may be smaller."""
        starts = [*range(0, self.nodes, self.domain_size), self.nodes]
        return [list(range(start, end)) for start, end in pairwise(starts)]

    @property
    def unit(self) -> str:
        """What fails: a node, or a domain of several."""
        return "node" if self.domain_size == 1 else "domain"

    def slots_for(self, experts: int, replicas: int) -> int:
        """Slots of each node that give every expert so many replicas, at most one a node."""
        return math.ceil(experts * min(replicas, self.nodes) / self.nodes)


@dataclass(frozen=True)
class Heavy:
    """The expert whose single replica bears most, where that is more than the mean load of a node."""

    layer: int
    expert: int
    replicas: int
    times_mean: float
    """Load of one replica, if all bear the same, over the mean load of a node."""
    slots: int
    """Fewest slots of each node, found by doubling and halving, at which no replica in this layer is that heavy."""


@dataclass(frozen=True)
class LoadSummary:
    """How uneven the load is."""

    hottest_share: float
    """The hottest expert's part of its layer's tokens, in the layer where it is most."""
    hottest_layer: int
    hottest_expert: int
    mean_share: float
    """Share of the hottest expert, averaged over all layers."""
    top2_share: float
    """Share of the two hottest together, in the layer where it is largest."""


@dataclass(frozen=True)
class Result:
    """One policy's placements of all layers."""

    policy: PlacementPolicy
    even: tuple[float, ...]
    """Busiest node over the mean in each layer, each replica of an expert bearing the same."""
    balanced: tuple[float, ...]
    """The same where the holders of an expert share in whatever parts are best."""
    distinct: int
    """Distinct domains that every expert of every layer is on, at least."""
    survival: tuple[Survival, ...]
    """Probability that every expert of every layer keeps a replica, for each number of failures."""
    seconds: float
    """Planning of one layer, on average."""
    matrices: tuple[NDArray[np.int64], ...]
    """[N, E] of each layer."""


@dataclass(frozen=True)
class Comparison:
    """Everything that is shown, in numbers."""

    cluster: Cluster
    load: LoadSummary
    replicas: NDArray[np.int64]
    """[L, E]."""
    heavy: Heavy | None
    results: tuple[Result, ...]


def compare(load_LE: NDArray[np.float64], cluster: Cluster, policies: Sequence[PlacementPolicy]) -> Comparison:
    """Plans and measures.

    Raises:
        ValueError: from a planner: loads or sizes that cannot be planned.
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
    """Each expert's part of its layer; in a layer without any load all are alike, as `allocate` has it."""
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
    """[L, E] load of one replica of an expert over the mean node's; those of one node count as one."""
    return _shares(load_LE) * cluster.nodes / np.minimum(replicas_LE, cluster.nodes)


def _heavy(load_LE: NDArray[np.float64], replicas_LE: NDArray[np.int64], cluster: Cluster) -> Heavy | None:
    times_mean_LE = _times_mean(load_LE, replicas_LE, cluster)
    layer, expert = divmod(int(times_mean_LE.argmax()), load_LE.shape[1])
    worst = float(times_mean_LE[layer, expert])
    if worst <= LIGHT:
        return None
    return Heavy(layer, expert, int(replicas_LE[layer, expert]), worst, _light_slots(load_LE[layer], cluster))


def _light_slots(load_E: NDArray[np.float64], cluster: Cluster) -> int:
    """Slots at which no replica is heavier than a node's mean; at the latest E, where every expert is everywhere."""

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
