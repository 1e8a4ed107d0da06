"""The parts of a pipeline's state: each rank holds its stage's units, and knows of the others' what they are called
and how large they are. Who keeps copies of what is computed alike by all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from evermoe import planning
from evermoe.errors import UnsupportedState
from evermoe.experts import expert_layers
from evermoe.snapshot.bundles import Bundle, bundles
from evermoe.state.catalog import UnitCatalog
from evermoe.state.expert_load import ExpertLoad
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import Unit
from evermoe.state.unit_parts import UnitPart, cut, equal_shares
from evermoe.train.kept_loop import KeptLoop
from evermoe.train.kept_tokens import KeptTokens

PipelinePreset = Literal["baft", "moetion"]


class SlicesTold(NamedTuple):
    """What a rank knows of the number of slices of a version; 0 where it knows nothing."""

    now: int = 0
    """As the ranks that run have it: of the copies that are whole."""
    stored: int = 0
    """Of the windows in this node's memory."""
    wanted: int = 0
    """From the next copies on."""
    changes: int = 0
    """How often the number was another one, and its copies whole."""


NOTHING_TOLD = SlicesTold()


@dataclass(frozen=True)
class StageRank:
    """What a rank tells the others about itself."""

    stage: int
    data_parallel: int
    node: str
    """The machine whose memory dies with it."""
    layout: str
    """Layout of its units: equal on all ranks of a stage."""
    units: list[tuple[str, int]]
    """Name and bytes of each unit of its stage."""
    own: list[str] = field(default_factory=list)
    """Of these, experts that this rank alone holds; the ranks of the stage hold all but each other's."""
    weights: list[int] = field(default_factory=list)
    """Of each unit the bytes without those that only an update needs; empty unless versions are sparse."""
    slices: SlicesTold = NOTHING_TOLD
    """What is known of the slices of a version, where their number is chosen."""
    repeated: list[Any] = field(default_factory=list)
    """Units of its stage whose steps can be repeated, and their tensors: see `train.stage_replay`."""
    stops_at: int | None = None
    """Steps after which the job ends because a rank has asked for it; None while it knows of none."""

    def to_bytes(self) -> bytes:
        """JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> StageRank:
        """The inverse of `to_bytes`."""
        fields = json.loads(data)
        fields |= {"units": [(name, nbytes) for name, nbytes in fields["units"]]}
        return cls(**fields | {"slices": SlicesTold(*fields["slices"])})


def stage_bundles(preset: PipelinePreset, seats: Sequence[StageRank], copies: int) -> list[Bundle]:
    """Who copies what to whom: each unit of a stage by one of its ranks, with equal shares of what all of them hold.

    `baft`: to the `copies - 1` nodes before the rank's own in its pipeline (the ranks of one data-parallel coordinate,
    stage by stage), where the last node comes before the first; where all stages are on one node, to stages before.
    `moetion`: to ranks that keep what is missing to `copies` nodes beside the data-parallel peers, who hold it anyway;
    but not each other's experts, where these are divided among them. Then a loss goes back by a version, of which they
    keep all else in their own memory.

        >>> units = [[(f"stage{stage}.a", 8), (f"stage{stage}.b", 8)] for stage in (0, 1)]
        >>> seats = [StageRank(s, d, f"n{s}{d}", "", units[s]) for s in (0, 1) for d in (0, 1)]
        >>> [bundle.holders for bundle in stage_bundles("baft", seats, 2)]
        [(0, 2), (1, 3), (2, 0), (3, 1)]
        >>> seats = [StageRank(stage, 0, "ab"[stage // 2], "", units[0]) for stage in range(4)]  # two stages on a node
        >>> [bundle.holders for bundle in stage_bundles("baft", seats, 2)]
        [(0, 2), (1, 3), (2, 0), (3, 1)]
        >>> seats = [StageRank(stage, 0, f"n{stage}", "", units[0]) for stage in range(4)]
        >>> [bundle.holders for bundle in stage_bundles("baft", seats, 3)]
        [(0, 3, 2), (1, 0, 3), (2, 1, 0), (3, 2, 1)]
        >>> seats = [StageRank(s, d, f"n{s}{d}", "", units[s]) for s in (0, 1) for d in (0, 1)]
        >>> [bundle.holders for bundle in stage_bundles("moetion", seats, 2)]  # the peers are enough
        [(0,), (1,), (2,), (3,)]
        >>> [bundle.holders for bundle in stage_bundles("moetion", seats, 3)]
        [(0, 2), (1, 2), (2, 0), (3, 0)]
        >>> from dataclasses import replace
        >>> seats = [replace(seat, own=[seat.units[seat.data_parallel][0]]) for seat in seats]  # each has an expert
        >>> [bundle.holders for bundle in stage_bundles("moetion", seats, 2)]
        [(0, 1), (1, 2), (2, 3), (3, 0)]

    Args:
        preset: `baft` or `moetion`.
        seats: by rank; stage by stage, each with the same data-parallel coordinates in order.
        copies: nodes that are to hold each unit.
    """
    width = sum(seat.stage == 0 for seat in seats)
    names, holders = [], []
    before = _ranks_before(seats, width, copies)
    kept = planning.training_copy_holders(
        [seat.node for seat in seats],
        [seat.data_parallel for seat in seats],
        [seat.stage for seat in seats],
        min(max(1, copies), len(seats)),
        zero_stage=1,
    )
    leaves_to_peers = not planning.PRESETS[preset].copies_to_previous_node
    goes_back = leaves_to_peers and any(seat.own for seat in seats)
    for first in range(0, len(seats), width):
        ranks = range(first, first + width)
        alone = {name: rank for rank in ranks for name in seats[rank].own}
        for name, primary in stage_primaries(seats, ranks).items():
            if not leaves_to_peers:
                others = before[primary]
            elif name in alone:
                others = kept.optimizer[primary][1:]
            else:
                others = [rank for rank in kept.parameters[primary] if rank not in ranks]
            again = _peers_elsewhere(seats, ranks, primary, copies) if goes_back and name not in alone else []
            for kept_at in ([primary, *others], *([rank] for rank in again)):
                names.append(name)
                holders.append(kept_at)
    return bundles(names, holders)


def stage_primaries(seats: Sequence[StageRank], ranks: range) -> dict[str, int]:
    """By unit of a stage, which of its ranks copies it; each has an equal share of what all hold, and its own experts.

    Args:
        seats: by rank.
        ranks: of the stage.
    """
    alone = {name: rank for rank in ranks for name in seats[rank].own}
    shared = [(name, nbytes) for name, nbytes in seats[ranks[0]].units if name not in alone]
    shares = equal_shares([nbytes for _, nbytes in shared], ranks)
    return {name: primary for (name, _), primary in zip(shared, shares, strict=True)} | alone


def _peers_elsewhere(seats: Sequence[StageRank], ranks: range, primary: int, copies: int) -> list[int]:
    """Peers that keep versions of what they train, too, in their own memory, so that each is on `copies` nodes."""
    keepers = {seats[primary].node: primary}
    for rank in ranks:
        keepers.setdefault(seats[rank].node, rank)
    return list(keepers.values())[1:copies]


def _ranks_before(seats: Sequence[StageRank], width: int, copies: int) -> dict[int, list[int]]:
    """For each rank, those that keep its copies in BAFT: the ranks of the same place on the nodes before."""
    found = {}
    for first in range(width):
        ranks = range(first, len(seats), width)
        order = {node: f"{place:09}" for place, node in enumerate(dict.fromkeys(seats[rank].node for rank in ranks))}
        keepers = planning.copy_holders([order[seats[rank].node] for rank in ranks], max(1, copies), policy="previous")
        found.update({rank: [ranks[each] for each in held[1:]] for rank, held in zip(ranks, keepers, strict=True)})
    return found


def loop_unit(stage: int) -> str:
    """Name of the unit with the state of the training loop, which each stage has."""
    return f"stage{stage}_loop"


def tokens_unit(stage: int) -> str:
    """Name of the unit with the tokens of a stage's experts."""
    return f"stage{stage}_tokens"


class StageState(TrainingState):
    """A stage and its optimizer as units, whose names begin with the stage's number; of others' units, their sizes.

    Units are cut where the ranks of the stage share them: `stage0.linear[0:64]` is a unit of its own. One more unit has
    the state of the training loop.

    Args:
        module: the stage.
        optimizer: of its parameters.
        stage: its number.
        loop: what else survives with it.
        ranks: of the stage.
        place: this rank's among them, where each of them is to hold some experts of each MoE layer; None: all hold all.
        slices: of a sparse version, each of whole units, which then are not cut; 1 where versions are not sparse, None
            where their number is chosen.
        keeps_tokens: whether the tokens that experts got are a unit, too.
        may_cut: False for units that are all whole.

    Raises:
        UnsupportedState: a layer has fewer experts than there are ranks; or as of `TrainingState`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        stage: int,
        loop: KeptLoop,
        ranks: int,
        place: int | None = None,
        slices: int | None = 1,
        keeps_tokens: bool = False,
        *,
        may_cut: bool = True,
    ) -> None:
        self.device = next(module.parameters()).device
        """Where the stage is."""
        model = nn.ModuleDict({f"stage{stage}": module, loop_unit(stage): loop})
        load = ExpertLoad(expert_layers(model))
        if keeps_tokens:
            model[tokens_unit(stage)] = KeptTokens(load)
        super().__init__(model, optimizer, has_session=False)
        self.expert_load, self.has_marks = load, keeps_tokens
        self._is_spread = place is not None
        if place is not None:
            self._spread(ranks, place)
        self._tracked = [*module.parameters(), *module.buffers()]
        alone = [unit for unit in self.catalog.units if self._is_spread and unit.layer is not None]
        on_all = [unit for unit in self.catalog.units if unit not in alone]
        is_cut = self._is_contiguous if slices == 1 and may_cut else lambda unit: False
        parts_of_units = cut(on_all, ranks, is_cut) + [UnitPart(unit, 0, unit.nbytes) for unit in alone]
        self._parts: dict[str, UnitPart] = {part.unit.name: part for part in parts_of_units}
        self.own = self.catalog = UnitCatalog(part.unit for part in parts_of_units)
        """The units of this stage; `catalog` has those of all stages, once they are known."""
        if slices != 1:  # memory that was left with other slices is not this job's
            self.own = self.catalog = UnitCatalog(self.own.units, f"{self.own.layout} in {slices or 'some'} slices")
        self._weights_of: dict[str, str] = {}
        """By the name that a unit's weights have as a unit, the one whose they are."""
        self.window: dict[str, Tensor] = {}
        """Bytes of units in place of those that are trained, while copies are made of a window that was recovered."""
        self.is_of_version = True
        """Whether what is here is the state of this rank's version: not while only a part is, or a newer one."""

    def _is_contiguous(self, unit: Unit) -> bool:
        return all(tensor.is_contiguous() for tensor in super()._tensors(unit))

    def _tensors(self, unit: Unit) -> Iterable[Tensor]:
        if unit.name in self.window:
            return [self.window[unit.name]]
        part = self._parts[self._weights_of.get(unit.name, unit.name)]
        tensors = part.tensors(super()._tensors(part.of))
        if unit.name not in self._weights_of:
            return tensors
        return [tensor for spec, tensor in zip(part.of.specs, tensors, strict=True) if not spec.is_state]

    def _spread(self, ranks: int, place: int) -> None:
        """Gives up the experts of other ranks: each has as many, to within one, in the order of their numbers."""
        for path, layer in self.layers.items():
            if layer.num_experts < ranks:
                raise UnsupportedState(
                    f"expert_parallel: expected an expert for each of a stage's {ranks} ranks at least, got "
                    f"{layer.num_experts} in layer {path}"
                )
            ends = [layer.num_experts * rank // ranks for rank in range(ranks + 1)]
            ids = [*range(ends[place], ends[place + 1])]
            self._replace(layer, ids, self._restack(path, ids))
            layer.matrix_RE = np.zeros((ranks, layer.num_experts), np.int64)
            for rank in range(ranks):
                layer.matrix_RE[rank, ends[rank] : ends[rank + 1]] = 1

    def held(self) -> list[str]:
        """Names of the units of this stage that this rank holds, of its version."""
        return self.trained() if self.is_of_version else []

    def trained(self) -> list[str]:
        """Names of the units of this stage that this rank trains, of whatever version they are."""
        return [part.unit.name for part in self._parts.values() if self._holds(part.of)]

    def _holds(self, unit: Unit) -> bool:
        return unit.layer is None or unit.expert in self.layers[unit.layer].ids

    def alone(self) -> list[str]:
        """Names of the experts that this rank alone holds of its stage."""
        return [name for name in self.trained() if self._is_spread and self.own.by_name[name].layer is not None]

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Those that the optimizer steps: such as all ranks of the stage hold, and the experts that are here alone."""
        alone = {id(layer.weights) for layer in self.layers.values()} if self._is_spread else set[int]()
        found = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [p for p in found if id(p) not in alone], [p for p in found if id(p) in alone]

    def copy(self) -> dict[str, Tensor]:
        """Bytes of all units of this stage that are here now."""
        found = {name: torch.empty(self.own.by_name[name].nbytes, dtype=torch.uint8) for name in self.trained()}
        for name, data in found.items():
            self.read(name, data)
        return found

    @torch.no_grad()
    def write(self, units: dict[str, Tensor]) -> None:
        """The inverse of `copy`, which empties `units`. Of units without what only an update needs that stays.

        Graphs of before stay usable, as values that go back come again before they are.
        """
        with torch.autograd._unsafe_preserve_version_counter(tuple(self._tracked)):
            self._take_over(self.trained(), units)

    def learn(self, seats: Sequence[StageRank]) -> None:
        """What units the other stages have.

        Raises:
            ValueError: ranks of one stage differ in their model or optimizer.
        """
        self.catalog = self.own.merged(seats)

    def name_weights(self, names: Mapping[str, str]) -> list[Unit]:
        """Has the weights of this stage's units as units beside, under other names; returns these.

        Args:
            names: of these, and of the units whose they are.
        """
        self._weights_of = dict(names)
        return [
            Unit(name, tuple(spec for spec in self.own.by_name[unit].specs if not spec.is_state))
            for name, unit in names.items()
        ]
