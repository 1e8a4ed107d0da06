"""The state of a rank's model and optimizer, read and written unit by unit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn

from evermoe.errors import UnsupportedState
from evermoe.moe.experts import Experts, expert_layers
from evermoe.state.catalog import UnitCatalog, layout_of
from evermoe.state.deferred import Deferral
from evermoe.state.expert_load import ExpertLoad
from evermoe.state.late import LateState
from evermoe.state.listed_units import list_dense, list_experts
from evermoe.state.loop_state import LoopState
from evermoe.state.optimizer_state import create_optimizer_state
from evermoe.state.sharded import DenseOwners
from evermoe.state.shards import Shards
from evermoe.state.stack_memory import StackMemories
from evermoe.state.stored import RetainedUnits
from evermoe.state.unit import (
    LOOP_UNITS,
    MARKS,
    READERS,
    SESSION,
    Unit,
    dense_tensors,
    digests_of,
    expert_unit,
    read_tensors,
)
from evermoe.state.unit_parts import UnitViews

_NOTHING: Mapping[str, int] = MappingProxyType({})


def _loop_tensors(loop: LoopState, load: ExpertLoad) -> dict[str, Tensor]:
    found = {"progress": loop.progress, "load": load.average, "tokens": load.tokens}
    return found | ({MARKS: load.marks.state} if load.marks.are_kept else {})


class TrainingState:
    """Model, optimizer and the loop's small state, read and written unit by unit.

    Replaces the MoE layers' `weights` (and the optimizer's state of them) when their experts change.

    Args:
        model: holds all experts of its MoE layers at first.
        optimizer: over the model's parameters.
        session: name of the unit with the loop's state and the experts' load; None for no such unit.
        deferral: of a model that has no values yet: until `begin` or `adopt`, nothing is held.
        is_sharded: whether what is not an expert has owners; see `evermoe.state.sharded`.
        shards: this process's parts of the model's DTensors, in an island; None without one.
        has_marks: whether that unit has what is known of the experts' copies, too; see `evermoe.state.copy_marks`.
        readers: the states of an `ElasticReaders`, a unit of their own; None without one.

    Raises:
        ValueError: the optimizer is of another model.
        UnsupportedState: as of `create_optimizer_state`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        session: str | None = SESSION,
        deferral: Deferral | None = None,
        is_sharded: bool = False,
        shards: Shards | None = None,
        has_marks: bool = False,
        readers: Tensor | None = None,
    ) -> None:
        self.deferral, self.shards = deferral, shards
        self.layers: dict[str, Experts] = expert_layers(model)
        self.optimizer = optimizer
        layer_of = {id(layer.weights): layer for layer in self.layers.values()}
        if len(layer_of) < len(self.layers):
            raise UnsupportedState("MoE layers may not share their weights: give each layer experts of its own")
        self._order = [layer_of.get(id(p)) or (p if shards is None else shards.local(p)) for p in model.parameters()]
        if deferral is None and any(parameter.is_meta for parameter in model.parameters()):
            raise UnsupportedState("expected a model with values, got parameters on meta: only a Session makes them")
        self.views = UnitViews()
        """Units that are parts of others, and bytes that stand in for units."""
        self._memories = StackMemories()
        self._masters = create_optimizer_state(
            optimizer,
            self.parameters_in_order(),
            experts=[layer.weights for layer in self.layers.values()],
            divided=[] if shards is None else shards.divided,
        )
        self.loop, self.expert_load = LoopState(), ExpertLoad(self.layers)
        self.expert_load.marks.are_kept = has_marks
        own = {} if session is None else {session: _loop_tensors(self.loop, self.expert_load)}
        own |= {} if readers is None else {READERS: {"states": readers}}
        dense = dense_tensors(model)
        self._dense = own | (dense if shards is None else shards.divide(dense))
        self.owners = DenseOwners(optimizer, self._dense, is_sharded=is_sharded)
        """Owners of the units that are no experts; none has one if all ranks hold them."""
        self.catalog = _list_units(self, own | dense)
        self.retained = RetainedUnits(self._memories.free_unused)
        """Units that a recovery has moved to other members; see `RetainedUnits`."""
        self.late = LateState(self._tensors, self.retained, self.devices)
        """Units whose optimizer state is still on its way to this rank. Readers wait until it has arrived."""

    @cached_property
    def dense(self) -> list[Tensor]:
        """Parameters that are no experts, in the model's order."""
        return [each for each in self._order if isinstance(each, Tensor)]

    def parameters_in_order(self) -> list[Tensor]:
        """All parameters in the model's order; of those that an island divides, this process's parts."""
        return [each.weights if isinstance(each, Experts) else each for each in self._order]

    def devices(self) -> set[torch.device]:
        """Where parameters are."""
        return {p.device for p in (*self.dense, *(layer.weights for layer in self.layers.values()))}

    # ---- which units there are

    def dense_tensors(self, name: str) -> dict[str, Tensor]:
        """Parameters and buffers of a unit that is no expert, by name; all ranks that train have them, others none."""
        return dict(self._dense.get(name, {}))

    def _optimizer_tensors(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        state = self.optimizer.state.get(parameter, {})
        return {f"{name}/{key}": value for key, value in sorted(state.items()) if isinstance(value, Tensor)}

    def _stacks(self, layer: Experts) -> dict[str, Tensor]:
        """A layer's weights `[e, row]` and its optimizer state: stacks of the same shape, or scalars."""
        return {"weights": layer.weights} | self._optimizer_tensors("weights", layer.weights)

    # ---- what this rank holds

    @property
    def _is_made(self) -> bool:
        """Whether the model has values."""
        return self.deferral is None or self.deferral.is_made

    def dense_holders(self, unit: str, ranks: int) -> tuple[int, ...]:
        """Ranks that train a unit that is no expert and has no owner: those of its position in an island, or all."""
        return tuple(range(ranks)) if self.shards is None else self.shards.holders(unit, ranks)

    def active(self, ranks: int) -> dict[str, tuple[int, ...]]:
        """Ranks that train each unit: all or those of a position, its owner, or those where its expert is placed."""
        owners = {name: (rank,) for name, rank in self.owners.by_unit.items()}
        return {
            unit.name: owners.get(unit.name) or self.dense_holders(unit.name, ranks)
            if unit.layer is None
            else tuple(np.flatnonzero(self.layers[unit.layer].matrix_RE[:, unit.expert]).tolist())
            for unit in self.catalog.units
        }

    def held(self) -> list[str]:
        """Names of the units that this rank trains on: all but the experts of other ranks, and what others own.

        Without those whose optimizer state has not arrived.
        """
        experts = [expert_unit(path, e) for path, layer in self.layers.items() for e in layer.ids]
        found = [*(filter(self.owners.holds, self._dense) if self._is_made else ()), *experts]
        return [unit for unit in found if unit not in self.late.missing]

    def _tensors(self, unit: Unit) -> Iterable[Tensor]:
        return self.views.tensors(unit, self._stored)

    def _stored(self, unit: Unit) -> list[Tensor]:
        """Tensors of a unit of the model, which is no view."""
        if unit.layer is None:  # looked up each time, as optimizers may rebind their state
            dense = self._dense[unit.name].items()
            return [t for key, tensor in dense for t in (tensor, *self._optimizer_tensors(key, tensor).values())]
        layer = self.layers[unit.layer]
        row = layer.ids.index(unit.expert)  # type: ignore[arg-type]
        return [stack[row] if stack.dim() == 2 else stack for stack in self._stacks(layer).values()]

    @torch.no_grad()
    def read(self, name: str, out: Tensor) -> None:
        """Copies a held unit's state to `out`, uint8 `[nbytes]` on the CPU; `[nbytes - state_nbytes]` without the
        optimizer's.

        Raises:
            PeerLost: its optimizer state has got lost on its way to this rank.
        """
        unit = self.catalog.by_name[name]
        if len(out) == unit.nbytes:
            self.late.wait([name])
            read_tensors(self._tensors(unit), out)
        else:
            tensors = zip(unit.specs, self._tensors(unit), strict=True)
            read_tensors([tensor for spec, tensor in tensors if not spec.is_state], out)

    def digests(self, names: Sequence[str]) -> list[int]:
        """XXH3-64 of held units' bytes, as `read` gives them.

        Raises:
            PeerLost: as of `read`.
        """
        self.late.wait(names)
        return digests_of(self.tensors(names))

    @torch.no_grad()
    def release(self) -> None:
        """Gives up the memory of the model and the optimizer: this process only keeps copies for others."""
        self.optimizer.state.clear()
        self.owners.release()
        for name, tensors in self._dense.items():
            for tensor in tensors.values() if name not in LOOP_UNITS else ():
                tensor.data = tensor.new_empty(0)
        for layer in self.layers.values():
            layer.weights.data = layer.weights.new_empty(0)
            layer.ids = []
        self._memories.release()
        self._dense = {name: tensors for name, tensors in self._dense.items() if name in LOOP_UNITS}

    def tensors(self, names: Iterable[str]) -> list[list[Tensor]]:
        """The tensors of this rank's units, whose bytes one after the other are the units'; wait for `late` to read."""
        return [[tensor.detach() for tensor in self._tensors(self.catalog.by_name[name])] for name in names]

    def scalars(self) -> dict[str, float]:
        """Values that the optimizer keeps for all experts of a layer together, such as its steps; by `layer/tensor`."""
        return {
            f"{path}/{key}": float(tensor)
            for path, layer in self.layers.items()
            for key, tensor in self._stacks(layer).items()
            if tensor.dim() == 0
        }

    @torch.no_grad()
    def begin(self, experts: dict[str, list[int]], rank: int = 0) -> None:
        """Makes a deferred model's units and those of `experts` (layer path → ids) with their first values.

        Existing values stay.
        """
        assert self.deferral is not None
        self.retained.move()
        if not self._is_made:
            self.owners.hold(rank)
            self.deferral.make(self.dense, self.optimizer)
            for name in self._dense.keys() - set(LOOP_UNITS):
                self.deferral.fill_dense(name, self._dense[name])
            for parameter, names in zip(self.dense, self._masters.of(self.dense), strict=True):
                for key in names if parameter in self.optimizer.state else ():
                    self.optimizer.state[parameter][key].copy_(parameter)
        for path, ids in experts.items():
            layer = self.layers[path]
            added = [expert for expert in ids if expert not in layer.ids]
            if ids != layer.ids:
                self._replace(layer, ids, self._restack(path, ids))
            (names,) = self._masters.of([layer.weights])
            for expert in added:
                unit = self.catalog.by_name[expert_unit(path, expert)]
                row, *state = self._tensors(unit)
                self.deferral.fill_expert(path, layer, expert, row)
                for spec, tensor in zip(unit.specs[1:], state, strict=True):
                    tensor.copy_(row) if spec.name.removeprefix("weights/") in names else tensor.zero_()

    @torch.no_grad()
    def adopt(
        self,
        experts: dict[str, list[int]],
        fetched: dict[str, Tensor],
        rank: int = 0,
        leaving: Mapping[str, int] = _NOTHING,
    ) -> None:
        """Makes this rank hold `experts` (layer path → ids) and what it owns; takes over the bytes of `fetched` units.

        Nothing is changed before all inputs are checked: a unit that is neither held nor fetched is a KeyError. Experts
        that stay keep the memory that they have on the host, if it is the stacks' own. What is taken over is removed
        from `fetched`, and what is in `leaving` (unit → digest) retained, so that memory is free for the next layer. Of
        a unit without its optimizer state (see `LateState`) whose own is left as it is.
        """
        owned = {unit for unit, owner in self.owners.by_unit.items() if owner == rank}
        needed = owned | (set() if self._is_made else self._dense.keys() - self.owners.by_unit.keys())
        needed |= {expert_unit(path, expert) for path, ids in experts.items() for expert in ids}
        if missing := needed - fetched.keys() - set(self.held()):
            raise KeyError(*sorted(missing))
        self.late.missing.clear()
        self.retained.move()  # what stacks have behind them may be overwritten
        for name in self.owners.by_unit.keys() & leaving.keys():
            self.retained.add(name, leaving[name], [tensor.to("cpu", copy=True) for tensor in self.tensors([name])[0]])
        self.owners.hold(rank)
        if self.deferral is not None and not self._is_made:
            self.deferral.make(self.dense, self.optimizer)
        self._take_over(self._dense, fetched)
        for path, ids in experts.items():
            if ids != self.layers[path].ids:
                self._replace(self.layers[path], ids, self._restack(path, ids, fetched, leaving))
            self._take_over([expert_unit(path, expert) for expert in ids], fetched)
        self._take_over(self.held(), fetched)

    def _take_over(self, names: Iterable[str], fetched: dict[str, Tensor]) -> None:
        for name in names:
            data = fetched.pop(name, None)
            if data is not None:
                unit = self.catalog.by_name[name]
                values = unit.tensors(data)
                for spec, target in zip(unit.specs, self._tensors(unit), strict=True):
                    if spec.name in values:
                        target.copy_(values[spec.name])

    def _restack(
        self, path: str, ids: list[int], fetched: Collection[str] = (), leaving: Mapping[str, int] = _NOTHING
    ) -> dict[str, Tensor]:
        """Stacks with the rows that are held already; the others, which are fetched, are to be written.

        State in the stacks' own memory stays in place: the previous stacks are void. State that leaves is retained.
        """
        layer, stacks = self.layers[path], {}
        rows = {expert: row for row, expert in enumerate(layer.ids) if expert_unit(path, expert) not in fetched}
        kept = [(to, rows[expert]) for to, expert in enumerate(ids) if expert in rows]
        units = {expert_unit(path, expert): row for row, expert in enumerate(layer.ids) if expert not in ids}
        left: dict[str, list[Tensor]] = {unit: [] for unit in units if unit in leaving}
        gone = [units[unit] for unit in left]
        for key, old in self._stacks(layer).items():
            if old.dim() == 2:
                stacks[key], parts = self._memories.restack(
                    (path, key), old.detach(), kept, len(ids), layer.num_experts, gone
                )
            else:
                stacks[key], parts = old, [old.to("cpu", copy=True)] * len(gone)
            for unit, part in zip(left, parts, strict=True):
                left[unit].append(part)
        for unit, tensors in left.items():
            self.retained.add(unit, leaving[unit], tensors)
        return stacks

    def _replace(self, layer: Experts, ids: list[int], tensors: dict[str, Tensor]) -> None:
        """A new Parameter, never a resized one: graphs of an interrupted step may still have the shape of the old."""
        old, new = layer.weights, nn.Parameter(tensors["weights"], layer.weights.requires_grad)
        layer.weights, layer.ids = new, list(ids)
        for group in self.optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        self.optimizer.state.pop(old, None)
        state = {key.removeprefix("weights/"): t for key, t in tensors.items() if key != "weights"}
        if state:
            self.optimizer.state[new] = state


def _list_units(state: TrainingState, dense: Mapping[str, Mapping[str, Tensor]]) -> UnitCatalog:
    """The units of all positions and layers, with the layout of the model without islands.

    Args:
        state: with the tensors of this position.
        dense: the loop's tensors and the model's own, DTensors among them, by unit and name.
    """
    shapes, shards = state.deferral.shapes if state.deferral is not None else {}, state.shards
    experts = [unit for each in state.layers.items() for unit in list_experts(*each, state._stacks(each[1]))]
    units = list_dense(state._dense, state._optimizer_tensors, shapes, shards)
    if shards is None:
        return UnitCatalog([*units, *experts])
    complete = list_dense(dense, state._optimizer_tensors, shapes, shards)
    return UnitCatalog([*shards.spread(units, dense), *experts], layout_of([*complete, *experts]))
