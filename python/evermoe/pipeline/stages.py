"""The parts of a pipeline's state: each rank holds its stage's units, and knows the names and sizes of all others.

All ranks compute the same plan of who keeps copies of which units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from evermoe.copies.snapshot.bundles import Bundle, bundles
from evermoe.errors import UnsupportedState
from evermoe.planning.holders import copy_holders, primaries, training_copy_holders, unit_copy_holders
from evermoe.planning.presets import PRESETS, PresetName
from evermoe.state.catalog import UnitCatalog
from evermoe.state.placement import LayerPlacements, even_division
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import Unit
from evermoe.state.unit_parts import UnitPart, cut, equal_shares


class SliceReport(NamedTuple):
    """Knowledge of a rank about the number of slices of a version; 0 where it knows none."""

    now: int = 0
    """Number of the complete copies, on ranks that run."""
    stored: int = 0
    """Number of the windows in this node's memory."""
    wanted: int = 0
    """Number from the next copies on."""
    changes: int = 0
    """Changes of the number whose copies are complete."""


NO_REPORT = SliceReport()


@dataclass(frozen=True)
class StageRank:
    """Report of a rank about itself to all others."""

    stage: int
    data_parallel: int
    node: str
    """The machine whose memory dies with it."""
    layout: str
    """Layout of its units: equal on all ranks of a stage."""
    units: list[tuple[str, int]]
    """Name and bytes of each unit of its stage."""
    experts: dict[str, int] = field(default_factory=dict)
    """Number of experts of each MoE layer of its stage, if the ranks divide them."""
    own: list[str] = field(default_factory=list)
    """These experts that it trains; all other units of the stage are on each of its ranks."""
    decided: int = -1
    """The newest step at whose beginning it has compared loads, which may have moved experts; -1 for a new process."""
    weights: list[int] = field(default_factory=list)
    """Bytes of each unit without its optimizer state; empty unless versions are sparse."""
    slices: SliceReport = NO_REPORT
    """Knowledge of the number of slices, if it is chosen."""
    repeated: list[Any] = field(default_factory=list)
    """Units of its stage whose steps can be repeated, and their tensors: see `evermoe.pipeline.stage_replay`."""
    stops_at: int | None = None
    """Steps after which the job ends because a rank has asked for it; None while it knows of none."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> StageRank:
        """Return the report of fields from JSON, which has only lists."""
        units = [(name, nbytes) for name, nbytes in fields["units"]]
        return cls(**fields | {"units": units, "slices": SliceReport(*fields["slices"])})


def stage_bundles(preset: PresetName, layout: Sequence[StageRank], replication: int) -> list[Bundle]:
    """Plan which rank copies which units to which ranks. Each unit of a stage is copied by one of its ranks, and the
    ranks have equal shares of the units that all of them hold. An expert is copied by one of those that train it.

    `baft`: to the previous `replication - 1` nodes in the rank's pipeline (the ranks of one data-parallel coordinate,
    stage by stage), with the last node before the first; if all stages are on one node, to previous stages.
    `moetion`: to as many ranks as the unit lacks to be on `replication` nodes, since its peers hold it anyway. Peers
    that divide the experts hold only those that they train. Then a loss goes back by a version, which all ranks that
    train a unit keep in their own memory.

        >>> units = [[(f"stage{stage}.a", 8), (f"stage{stage}.b", 8)] for stage in (0, 1)]
        >>> layout = [StageRank(s, d, f"n{s}{d}", "", units[s]) for s in (0, 1) for d in (0, 1)]
        >>> [bundle.holders for bundle in stage_bundles("baft", layout, 2)]
        [(0, 2), (1, 3), (2, 0), (3, 1)]
        >>> layout = [StageRank(stage, 0, "ab"[stage // 2], "", units[0]) for stage in range(4)]  # two stages on a node
        >>> [bundle.holders for bundle in stage_bundles("baft", layout, 2)]
        [(0, 2), (1, 3), (2, 0), (3, 1)]
        >>> layout = [StageRank(stage, 0, f"n{stage}", "", units[0]) for stage in range(4)]
        >>> [bundle.holders for bundle in stage_bundles("baft", layout, 3)]
        [(0, 3, 2), (1, 0, 3), (2, 1, 0), (3, 2, 1)]
        >>> layout = [StageRank(s, d, f"n{s}{d}", "", units[s]) for s in (0, 1) for d in (0, 1)]
        >>> [bundle.holders for bundle in stage_bundles("moetion", layout, 2)]  # the peers are enough
        [(0,), (1,), (2,), (3,)]
        >>> [bundle.holders for bundle in stage_bundles("moetion", layout, 3)]
        [(0, 2), (1, 2), (2, 0), (3, 0)]
        >>> from dataclasses import replace
        >>> layout = [replace(each, own=[each.units[each.data_parallel][0]]) for each in layout]  # each has an expert
        >>> [bundle.holders for bundle in stage_bundles("moetion", layout, 2)]
        [(0, 1), (1, 2), (2, 3), (3, 0)]
        >>> layout = [replace(each, own=[each.units[0][0]]) for each in layout]  # both train the first one
        >>> [bundle.holders for bundle in stage_bundles("moetion", layout, 2)]
        [(0,), (1,), (2,), (3,)]

    Args:
        preset: `baft` or `moetion`.
        layout: by rank; stage by stage, each with the same data-parallel coordinates in order.
        replication: nodes that must hold each unit.
    """
    width = sum(stage_rank.stage == 0 for stage_rank in layout)
    names, holders = [], []
    before = _ranks_before(layout, width, replication)
    kept = training_copy_holders(
        [stage_rank.node for stage_rank in layout],
        [stage_rank.data_parallel for stage_rank in layout],
        [stage_rank.stage for stage_rank in layout],
        min(max(1, replication), len(layout)),
        zero_stage=1,
    )
    leaves_to_peers = not PRESETS[preset].copies_to_previous_node
    goes_back = leaves_to_peers and any(stage_rank.own for stage_rank in layout)
    for first in range(0, len(layout), width):
        ranks = range(first, first + width)
        divided = _divided(layout, ranks)
        for name, primary in stage_primaries(layout, ranks).items():
            trained = divided.get(name, ranks)
            peers = _peers_elsewhere(layout, trained, primary, replication)
            if not leaves_to_peers:
                others = before[primary]
            elif name not in divided:
                others = [rank for rank in kept.parameters[primary] if rank not in ranks]
            elif len(trained) == 1:
                others = kept.optimizer[primary][1:]
            else:
                nodes, missing = [stage_rank.node for stage_rank in layout], max(1, replication - len(peers))
                others = unit_copy_holders([primary], [trained], nodes, missing)[0][1:]
            for kept_at in ([primary, *others], *([rank] for rank in peers if goes_back)):
                names.append(name)
                holders.append(kept_at)
    return bundles(names, holders)


def stage_primaries(layout: Sequence[StageRank], ranks: range) -> dict[str, int]:
    """The rank that copies each unit of a stage: equal shares of the units that all hold, and of its own experts.

    Args:
        layout: by rank.
        ranks: of the stage.
    """
    divided, sizes = _divided(layout, ranks), dict(layout[ranks[0]].units)
    shared = [name for name in sizes if name not in divided]
    shares = equal_shares([sizes[name] for name in shared], ranks)
    of_experts = primaries([*divided.values()], [sizes[name] for name in divided], len(layout))
    return dict(zip(shared, shares, strict=True)) | dict(zip(divided, of_experts, strict=True))


def _divided(layout: Sequence[StageRank], ranks: range) -> dict[str, list[int]]:
    """The ranks that train each expert of a stage whose ranks divide the experts."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        for name in layout[rank].own:
            found.setdefault(name, []).append(rank)
    return found


def _peers_elsewhere(layout: Sequence[StageRank], trained: Sequence[int], primary: int, replication: int) -> list[int]:
    """Peers on other nodes that train a unit, as many as it needs to be on `replication` nodes."""
    keepers = {layout[primary].node: primary}
    for rank in trained:
        keepers.setdefault(layout[rank].node, rank)
    return list(keepers.values())[1 : max(1, replication)]


def _ranks_before(layout: Sequence[StageRank], width: int, replication: int) -> dict[int, list[int]]:
    """For each rank, the ranks that keep its copies in BAFT: those of its coordinate on the previous nodes."""
    found = {}
    for first in range(width):
        ranks = range(first, len(layout), width)
        order = {node: f"{place:09}" for place, node in enumerate(dict.fromkeys(layout[rank].node for rank in ranks))}
        keepers = copy_holders([order[layout[rank].node] for rank in ranks], max(1, replication), policy="previous")
        found.update({rank: [ranks[each] for each in held[1:]] for rank, held in zip(ranks, keepers, strict=True)})
    return found


def loop_unit(stage: int) -> str:
    """Name of the unit with the state of the training loop and the load of experts, which each stage has."""
    return f"stage{stage}_loop"


class StageState(TrainingState):
    """A stage and its optimizer as units whose names begin with the stage's number, and the sizes of all other units.

    Units are divided where the ranks of the stage share them: `stage0.linear[0:64]` is a unit of its own.

    Args:
        module: the stage.
        optimizer: of its parameters.
        stage: its number.
        ranks: of the stage.
        place: number of this rank among them if they divide the experts of each MoE layer, evenly until a recovery
            calls `place`; None: all hold all experts.
        slices: of a sparse version, whose units are not divided; 1 if versions are not sparse, None if their number is
            chosen.
        keeps_tokens: whether what is known of the copies of experts is part of the state.
        may_cut: False to divide no unit.

    Raises:
        UnsupportedState: a layer has fewer experts than there are ranks; or as of `TrainingState`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        stage: int,
        ranks: int,
        place: int | None = None,
        slices: int | None = 1,
        keeps_tokens: bool = False,
        *,
        may_cut: bool = True,
    ) -> None:
        self.device = next(module.parameters()).device
        """Device of the stage."""
        model = nn.ModuleDict({f"stage{stage}": module})
        super().__init__(model, optimizer, session=loop_unit(stage), has_marks=keeps_tokens)
        self._is_spread = place is not None
        self._module, self._ranks = module, ranks
        if place is not None:
            self._divide(place)
        alone = [unit for unit in self.catalog.units if self._is_spread and unit.layer is not None]
        on_all = [unit for unit in self.catalog.units if unit not in alone]
        is_cut = self._is_contiguous if slices == 1 and may_cut else lambda unit: False
        parts_of_units = cut(on_all, ranks, is_cut) + [UnitPart(unit, 0, unit.nbytes) for unit in alone]
        self._parts = self.views.parts = {part.unit.name: part for part in parts_of_units}
        self.own = self.catalog = UnitCatalog(part.unit for part in parts_of_units)
        """The units of this stage; `catalog` has those of all stages, once they are known."""
        if slices != 1:  # memory that was left with other slices is not this job's
            self.own = self.catalog = UnitCatalog(self.own.units, f"{self.own.layout} in {slices or 'some'} slices")
        self.is_of_version = True
        """Whether this rank has the state of its version: not while it has only a part of it, or a newer one."""

    def _is_contiguous(self, unit: Unit) -> bool:
        return all(tensor.is_contiguous() for tensor in self.tensors([unit.name])[0])

    def _divide(self, place: int) -> None:
        for path, layer in self.layers.items():
            if layer.num_experts < self._ranks:
                raise UnsupportedState(
                    f"expert_parallel: expected an expert for each of a stage's {self._ranks} ranks at least, got "
                    f"{layer.num_experts} in layer {path}"
                )
        self.place({path: even_division(each.num_experts, self._ranks) for path, each in self.layers.items()}, place)

    @torch.no_grad()
    def place(
        self,
        placement: LayerPlacements,
        place: int,
        fetched: Mapping[str, Tensor] = MappingProxyType({}),
        leaving: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Hold the experts of a placement. Rows of experts that were not held have no values: `write` follows.

        Args:
            placement: [R, E] of each layer.
            place: number of this rank.
            fetched: bytes of units that it receives.
            leaving: digests of the units that it gives up, and retains.
        """
        self.retained.move()
        for path, matrix in placement.items():
            layer, ids = self.layers[path], np.flatnonzero(matrix[place]).tolist()
            if ids != layer.ids:
                self._replace(layer, ids, self._restack(path, ids, fetched, leaving))
            layer.matrix_RE = matrix

    def held(self) -> list[str]:
        """Names of the units of this stage that this rank holds, of its version."""
        return self.trained() if self.is_of_version else []

    def trained(self) -> list[str]:
        """Names of the units of this stage that this rank trains, in any version."""
        return [part.unit.name for part in self._parts.values() if self._holds(part.of)]

    def _holds(self, unit: Unit) -> bool:
        return unit.layer is None or unit.expert in self.layers[unit.layer].ids

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters that the optimizer steps: those that all ranks of the stage hold, and the experts of this rank."""
        alone = {id(layer.weights) for layer in self.layers.values()} if self._is_spread else set[int]()
        found = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [p for p in found if id(p) not in alone], [p for p in found if id(p) in alone]

    def copy(self) -> dict[str, Tensor]:
        """Bytes of all units of this stage that this rank trains."""
        found = {name: torch.empty(self.own.by_name[name].nbytes, dtype=torch.uint8) for name in self.trained()}
        for name, data in found.items():
            self.read(name, data)
        return found

    @torch.no_grad()
    def write(self, units: dict[str, Tensor]) -> None:
        """The inverse of `copy`, which empties `units`. Optimizer state that is missing from `units` keeps its value.

        Earlier autograd graphs stay valid, since values that go back come again before their backward.
        """
        with torch.autograd._unsafe_preserve_version_counter((*self._module.parameters(), *self._module.buffers())):
            self._take_over(self.trained(), units)

    def learn(self, layout: Sequence[StageRank]) -> None:
        """Learn the units of the other stages.

        Raises:
            ValueError: ranks of one stage differ in their model or optimizer.
        """
        self.catalog = self.own.merged(layout)
