"""Who holds what in a session, by rank, as its planners decide for an even load: experts, owners, copies.

Shapes: R ranks, E experts of a layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from evermoe.planning._arguments import choice, count
from evermoe.planning.migrate import keep_in_place
from evermoe.planning.models import ModelShape, dense_modules
from evermoe.planning.owners import place_owners
from evermoe.planning.placement import FewerReplicas, failure_domains, place_layer
from evermoe.planning.presets import PRESETS, Preset, PresetName, levels
from evermoe.planning.protection import (
    LOGGED_STEPS,
    OWN_VERSIONS,
    RECORD_BYTES,
    ProtectionPlan,
    RankInfo,
    UnitInfo,
    UnitProtection,
    batch_steps,
    plan_protection,
)

WeightType = Literal["float32", "bfloat16", "float16"]

HEAD_BYTES = 32 << 20
"""Maximum bytes of a message of gradients that carries its sizes, and memory that is kept for it. The tail follows once
the peer knows its size."""
NO_LIMIT = 1 << 62
"""Free bytes of host memory that copies may take."""


@dataclass(frozen=True, kw_only=True)
class FootprintOptions:
    """Options of a session that its memory depends on, and its machines."""

    workers: int
    """Processes that train, each with memory of its own."""
    workers_per_node: int = 1
    """Workers that fail together."""
    weights: WeightType = "bfloat16"
    """Type of parameters and gradients; those of 2 bytes have a float32 master."""
    moments: int = 2
    """float32 numbers that the optimizer keeps of each parameter in addition to its master: 2 for AdamW, 1 for SGD."""
    preset: PresetName = "auto"
    """As `Session(preset=)`."""
    replication: int = 2
    """As `Session(replication=)`."""
    expert_slots: int | None = None
    """As `Placement(expert_slots=)`."""
    min_replicas: int | None = None
    """As `Placement(min_replicas=)`."""
    shard_optimizer: bool = False
    """As `Session(shard_optimizer=)`."""
    replay_log_bytes: int = 1 << 30
    """As `evermoe.presets.Auto(replay_log_bytes=)`."""
    faults: int = 1
    """Nodes that are lost at once."""

    def __post_init__(self) -> None:
        for name in ("workers", "workers_per_node", "moments", "replication", "replay_log_bytes", "faults"):
            count(name, getattr(self, name))
        choice("weights", self.weights, ("float32", "bfloat16", "float16"))
        choice("preset", self.preset, tuple(PRESETS))
        if self.workers < 1 or self.workers_per_node < 1:
            raise ValueError(f"workers: expected 1 or more on each node, got {self.workers} of {self.workers_per_node}")
        if self.shard_optimizer and not self.choices.protects_owners:
            fitting = " or ".join(name for name, preset in PRESETS.items() if preset.protects_owners)
            raise ValueError(
                f"shard_optimizer: expected False with preset {self.preset}, which copies no units; or preset {fitting}"
            )

    @property
    def choices(self) -> Preset:
        """Planners and kinds of copies of the preset."""
        return PRESETS[self.preset]

    @property
    def weight_bytes(self) -> int:
        """Bytes of a parameter, and of its gradient."""
        return 4 if self.weights == "float32" else 2

    @property
    def master_bytes(self) -> int:
        """Bytes of a parameter's master."""
        return 0 if self.weights == "float32" else 4

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of what the optimizer keeps of a parameter."""
        return self.master_bytes + 4 * self.moments

    @property
    def unit_bytes(self) -> int:
        """Bytes of a parameter in a unit: its own and the optimizer's."""
        return self.weight_bytes + self.optimizer_bytes

    @property
    def nodes(self) -> list[str]:
        """Name of the node of each worker."""
        return [f"{rank // self.workers_per_node:06d}" for rank in range(self.workers)]


@dataclass
class CopyTotals:
    """Bytes of the copies that one rank sends and keeps."""

    snapshots: int = 0
    """Reserved in shared memory."""
    replicas: int = 0
    """States of others' units that are kept by repeating their steps."""
    log: int = 0
    """Gradients of these that are logged."""
    records: int = 0
    """Own gradients, encoded."""
    sent: int = 0
    """The same in messages."""
    received: int = 0
    """Others' gradients in messages."""
    buffers: int = 0
    """Data that is saved to a folder."""
    sends: list[int] = field(default_factory=list)
    """Of each state with which a replica begins, the bytes that are sent."""
    receives: list[int] = field(default_factory=list)
    """And those that come."""

    @property
    def first_states(self) -> int:
        """Memory of messages with states with which replicas begin: two that are sent at a time, one that comes."""
        return sum(sorted(self.sends)[-2:]) + max(self.receives, default=0)

    @property
    def frames(self) -> int:
        """Memory of messages that is kept between steps."""
        return min(self.sent, HEAD_BYTES) + min(self.received, HEAD_BYTES)


class Seating:
    """Who holds what; `before`: who held it with more ranks, of which the last ones were lost since.

    Attributes:
        placed_RE: whether a rank trains an expert; all layers are equal.
    """

    def __init__(
        self, shape: ModelShape, options: FootprintOptions, nodes: Sequence[str], before: Seating | None = None
    ) -> None:
        self.shape, self.options, self.nodes, self._before = shape, options, nodes, before
        self.ranks, self.is_sharded = len(nodes), options.shard_optimizer
        self._trained = dense_modules(shape.trained_dense_parameters, shape.largest_module, shape.layers)
        self._frozen = dense_modules(shape.frozen_dense_parameters, shape.largest_frozen_module, shape.layers)
        self.placed_RE = self._place_experts()
        self.owners = self._place_owners() if self.is_sharded else []
        """Rank of each dense module that is trained, where these have owners."""

    def _place_experts(self) -> NDArray[np.bool_]:
        options, experts = self.options, self.shape.experts
        replicas = options.choices.replicas(options.replication, options.min_replicas)
        asked = options.expert_slots, replicas, options.choices.placement
        now = np.zeros((self.ranks, experts)) if self._before is None else self._before.placed_RE[: self.ranks]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FewerReplicas)  # a session says it
            matrix = place_layer(np.ones(experts), now.astype(np.int64), self.nodes, *asked)
        if self._before is not None:
            held = self._before.held_RE[: self.ranks].astype(np.int64)
            matrix = keep_in_place(held, matrix, [self._experts_bytes] * experts, failure_domains(self.nodes))
        return matrix > 0

    def _place_owners(self) -> list[int]:
        sizes = [elements * self.options.unit_bytes for elements in self._trained]
        loads = (self.placed_RE.sum(1) * self._experts_bytes).tolist()
        trained: list[list[int]] = [list(range(self.ranks)) for _ in sizes]
        copied = trained
        if self._before is not None:
            trained = [[owner] if owner < self.ranks else [] for owner in self._before.owners]
            copied = [[rank for rank in ranks if rank < self.ranks] for ranks in self._before.owned_holders]
        return place_owners(sizes, trained, copied, loads)

    def _expert_bytes(self, *, is_frozen: bool) -> int:
        """Bytes of one expert."""
        each = self.options.weight_bytes if is_frozen else self.options.unit_bytes
        return self.shape.expert_parameters * each

    @property
    def _experts_bytes(self) -> int:
        """Bytes of an expert of each layer, together."""
        frozen = self.shape.frozen_layers
        return (self.shape.layers - frozen) * self._expert_bytes(is_frozen=False) + frozen * self._expert_bytes(
            is_frozen=True
        )

    # ---- what is trained, in parameters

    def _experts_R(self, layers: int) -> NDArray[np.int64]:
        """`[R]` parameters of the experts of a number of layers on a rank."""
        placed_R: NDArray[np.int64] = self.placed_RE.sum(1) * layers * self.shape.expert_parameters
        return placed_R

    @property
    def _trained_layers(self) -> int:
        return self.shape.layers - self.shape.frozen_layers

    def layer_gradients(self, rank: int) -> int:
        """Bytes of the gradients of a layer's experts on a rank, or of their adapted matrices; 0 where there are none.

        Gradients of adapters are computed from those of the matrices that they change.
        """
        each = self.shape.expert_parameters if self._trained_layers else self.shape.adapted_expert_parameters
        return int(self.placed_RE[rank].sum()) * each * self.options.weight_bytes

    def adapted_bytes(self, rank: int) -> int:
        """Bytes of the changed matrices of a rank's experts, which adapters make in a forward for its backward."""
        experts = int(self.placed_RE[rank].sum()) * self.shape.layers
        return experts * self.shape.adapted_expert_parameters * self.options.weight_bytes

    def layer_bytes(self, rank: int) -> int:
        """Bytes of a layer's experts on a rank, of one that is trained if there is any."""
        return int(self.placed_RE[rank].sum()) * self._expert_bytes(is_frozen=not self._trained_layers)

    @cached_property
    def owned_R(self) -> NDArray[np.int64]:
        """`[R]` parameters that are no expert's, of which a rank has the optimizer's state."""
        if not self.is_sharded:
            return np.full(self.ranks, self.shape.trained_dense_parameters)
        return np.bincount(self.owners, self._trained, minlength=self.ranks).astype(np.int64)

    @property
    def held_R(self) -> NDArray[np.int64]:
        """`[R]` parameters of which a rank has the weights."""
        return self.shape.dense_parameters + self._experts_R(self.shape.layers)

    @property
    def trained_R(self) -> NDArray[np.int64]:
        """`[R]` parameters of which a rank has gradients."""
        return self.shape.trained_dense_parameters + self._experts_R(self._trained_layers)

    @property
    def shared_R(self) -> NDArray[np.int64]:
        """`[R]` parameters of experts that a rank and others train."""
        shared_RE = self.placed_RE & (self.placed_RE.sum(0) > 1)
        found: NDArray[np.int64] = shared_RE.sum(1) * self._trained_layers * self.shape.expert_parameters
        return found

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all parameters that are trained, each expert's once."""
        return self.shape.trained_parameters * self.options.weight_bytes

    @property
    def stepped_R(self) -> NDArray[np.int64]:
        """`[R]` parameters of which a rank has the optimizer's state."""
        return self.owned_R + self._experts_R(self._trained_layers)

    # ---- what a recovery has moved, in bytes

    def moved_R(self, *, old: bool) -> NDArray[np.int64]:
        """`[R]` bytes of units that a rank trains now and has not before; `old`: has trained before and gives up."""
        assert self._before is not None
        first, second = self._before.placed_RE[: self.ranks], self.placed_RE
        moved = first & ~second if old else second & ~first
        found: NDArray[np.int64] = moved.sum(1) * self._experts_bytes
        for elements, was, now in zip(self._trained, self._before.owners, self.owners, strict=False):
            rank = was if old else now
            if was != now and rank < self.ranks:
                found[rank] += elements * self.options.unit_bytes
        return found

    # ---- copies

    @cached_property
    def _units(self) -> list[UnitInfo]:
        """Experts, layer by layer, the frozen ones first; then what is no expert, the frozen modules last."""
        options, weight = self.options, self.options.weight_bytes
        every = tuple(range(self.ranks))
        active = [tuple(np.flatnonzero(column).tolist()) for column in self.placed_RE.T]
        units = []
        for layer in range(self.shape.layers):
            is_frozen = layer < self.shape.frozen_layers
            sizes = self._expert_bytes(is_frozen=is_frozen), 0 if is_frozen else self.shape.expert_parameters * weight
            units += [
                UnitInfo(f"{layer}.{expert}", *sizes, active[expert], 0.0, replayable=True)
                for expert in range(self.shape.experts)
            ]
        for number, elements in enumerate(self._trained):
            ranks = (self.owners[number],) if self.is_sharded else every
            sizes = elements * options.unit_bytes, elements * weight
            units.append(UnitInfo(f"dense.{number}", *sizes, ranks, 0.0, self.is_sharded, may_lag=False))
        for number, elements in enumerate(self._frozen):
            units.append(UnitInfo(f"frozen.{number}", elements * weight, 0, every, 0.0, True, may_lag=False))
        return units

    @cached_property
    def _plan(self) -> ProtectionPlan:
        options = self.options
        infos = [RankInfo(node, NO_LIMIT, log_bytes=options.replay_log_bytes) for node in self.nodes]
        return plan_protection(options.preset, self._units, infos, replication=options.replication, budget=0.01)

    @cached_property
    def copies_late(self) -> bool:
        """Whether copies of a step are made during the next one."""
        return self._plan.is_late

    @cached_property
    def held_RE(self) -> NDArray[np.bool_]:
        """`[R, E]` whether a rank has an expert's bytes, trained or as a copy; of the first layer."""
        held = self.placed_RE.copy()
        if self.options.replication:
            for expert, each in enumerate(self._plan.units[: self.shape.experts]):
                held[list(each.holders), expert] = True
        return held

    @property
    def owned_holders(self) -> list[tuple[int, ...]]:
        """Ranks with copies of each dense module that is trained."""
        if not self.options.replication:
            return [() for _ in self._trained]
        first = self.shape.layers * self.shape.experts
        return [each.holders for each in self._plan.units[first : first + len(self._trained)]]

    @cached_property
    def copies(self) -> list[CopyTotals]:
        """By rank, what copies take."""
        options, shape, totals = self.options, self.shape, [CopyTotals() for _ in self.nodes]
        if not options.replication:
            return totals
        for unit, each in zip(self._units, self._plan.units, strict=True):
            if each.kind == "replayed":
                self._count_replayed(unit, each, totals)
            keepers = [each.primary, *each.holders] if each.kind == "snapshot" else each.own
            for rank in keepers:
                totals[rank].snapshots += OWN_VERSIONS * unit.nbytes
        for total in totals:
            total.log = min(total.log, options.replay_log_bytes)
            if options.choices.takes_turns:
                dense = sum(unit.nbytes for unit in self._units[shape.layers * shape.experts :])
                total.buffers = (levels(shape.experts).save * self._experts_bytes + dense) // self.ranks
        return totals

    def _count_replayed(self, unit: UnitInfo, each: UnitProtection, totals: Sequence[CopyTotals]) -> None:
        elements = unit.gradient_bytes // self.options.weight_bytes
        logged = elements * (2 if self.options.weights == "bfloat16" else 4) + RECORD_BYTES
        totals[each.primary].records += logged
        totals[each.primary].sent += logged * len(each.holders)
        totals[each.primary].sends += [unit.nbytes] * len(each.holders)
        for rank in each.holders:
            totals[rank].receives.append(unit.nbytes)
            totals[rank].replicas += unit.nbytes
            totals[rank].received += logged
            totals[rank].log += logged * (batch_steps(elements) + LOGGED_STEPS)
