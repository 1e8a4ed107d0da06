"""A model and its optimizer as units: the smallest things that are copied, fetched, saved or moved.

A unit is one expert of one MoE layer, one other module with parameters or buffers of its own, or `session` (the
small state of the training loop). Its bytes are its pieces one after the other: weights, then the optimizer's state.
Every rank computes the same list of units, in the same order, whatever it holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evermoe._native import digest, digests
from evermoe.errors import EvermoeError
from evermoe.moe import MoE, moe_layers
from evermoe.planning import LoadAverage
from evermoe.replay import Profile

LOAD_HALF_LIFE = 7.0
"""Steps after which a step counts half in the average load of the experts."""
SESSION = "session"
"""The unit with the small state of the training loop."""
FUSED_ROW = 8
"""Torch's fused optimizers on CPUs step rows alike whose size is a multiple of this."""
PROGRESS_BYTES = 16384
"""Room for the training loop's own state (sampler, scheduler) as JSON in the unit `session`."""


class UnsupportedState(EvermoeError, ValueError):
    """The optimizer, or the loop's own state, cannot be divided into units; the message says why."""


@dataclass(frozen=True)
class Piece:
    """One tensor of a unit: what it is called, and its shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Unit:
    """Name and byte layout of a unit; `layer` and `expert` are set for an expert."""

    name: str
    pieces: tuple[Piece, ...]
    layer: str | None = None
    expert: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole state."""
        return sum(piece.nbytes for piece in self.pieces)

    def tensors(self, data: Tensor) -> dict[str, Tensor]:
        """Views of the pieces in the unit's bytes, uint8 `[nbytes]`, by name (copies where misaligned)."""
        views, start = {}, 0
        for piece in self.pieces:
            part = data[start : start + piece.nbytes]
            if part.storage_offset() % piece.dtype.itemsize:
                part = part.clone()
            views[piece.name] = part.view(piece.dtype).view(piece.shape)
            start += piece.nbytes
        return views


def expert_unit(layer: str, expert: int) -> str:
    """The unit's name of one expert of the MoE layer at module path `layer`."""
    return f"{layer}.experts.{expert}"


class TrainingState:
    """Model, optimizer and the loop's small state, read and written unit by unit.

    Replaces the MoE layers' `weights` (and the optimizer's state of them) when their experts change.

    Raises:
        UnsupportedState: the optimizer keeps state that is neither a tensor of the parameter's shape nor a scalar.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.layers: dict[str, MoE] = moe_layers(model)
        self.optimizer = optimizer
        expert_parameters = {id(layer.weights) for layer in self.layers.values()}
        if len(expert_parameters) < len(self.layers):
            raise UnsupportedState("MoE layers may not share their weights: give each layer experts of its own")
        self.dense = [p for p in model.parameters() if id(p) not in expert_parameters]
        _create_optimizer_state(optimizer)
        self.progress = torch.zeros(PROGRESS_BYTES, dtype=torch.uint8)
        self.load = torch.zeros(len(self.layers), self._most_experts() + 1, dtype=torch.float64)
        """State of the `planning.LoadAverage` of all layers; the same on all ranks."""
        self.tokens = torch.zeros(3, len(self.layers), self._most_experts(), dtype=torch.int64)
        """[3, L, E] tokens of each expert: all, those lost, and the total at which it has got as many again."""
        own = {"progress": self.progress, "load": self.load, "tokens": self.tokens}
        self._dense = {SESSION: own} | dense_tensors(model)
        self.units = self._list_units()
        self.by_name = {unit.name: unit for unit in self.units}

    def _most_experts(self) -> int:
        return max((layer.num_experts for layer in self.layers.values()), default=0)

    # ---- which units there are

    def _dense_state(self, name: str) -> dict[str, Tensor]:
        """Weights and optimizer state of a unit that all ranks hold; looked up anew, as optimizers may rebind it."""
        state: dict[str, Tensor] = {}
        for key, tensor in self._dense[name].items():
            state |= {key: tensor} | self._optimizer_tensors(key, tensor)
        return state

    def dense_tensors(self, name: str) -> dict[str, Tensor]:
        """Parameters and buffers of a unit that all ranks hold, by name."""
        return dict(self._dense[name])

    @property
    def layout(self) -> str:
        """Digest of all units' names, shapes and types: equal for members that can exchange them."""
        text = repr([(unit.name, [(p.name, p.shape, str(p.dtype)) for p in unit.pieces]) for unit in self.units])
        return f"{digest(np.frombuffer(text.encode(), np.uint8)):016x}"

    def _optimizer_tensors(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        state = self.optimizer.state.get(parameter, {})
        return {f"{name}/{key}": value for key, value in sorted(state.items()) if isinstance(value, Tensor)}

    def _list_units(self) -> list[Unit]:
        units = [
            Unit(name, tuple(Piece(key, tuple(t.shape), t.dtype) for key, t in self._dense_state(name).items()))
            for name in self._dense
        ]
        for path, layer in self.layers.items():
            pieces = tuple(
                Piece(key, tuple(t.shape[1:]) if t.dim() == 2 else tuple(t.shape), t.dtype)
                for key, t in self._stacks(layer).items()
            )
            units += [Unit(expert_unit(path, e), pieces, path, e) for e in range(layer.num_experts)]
        return units

    def _stacks(self, layer: MoE) -> dict[str, Tensor]:
        """A layer's weights `[e, row]` and its optimizer state: stacks of the same shape, or scalars."""
        return {"weights": layer.weights} | self._optimizer_tensors("weights", layer.weights)

    def is_replayable(self, name: str, profile: Profile) -> bool:
        """Whether the steps of an expert can be repeated from its gradients, by an optimizer of this arithmetic."""
        unit = self.by_name[name]
        if unit.layer is None or any(piece.dtype != torch.float32 for piece in unit.pieces):
            return False
        weights = self.layers[unit.layer].weights
        is_whole = profile.arithmetic != "torch_cpu_fused" or weights.shape[1] % FUSED_ROW == 0
        return is_whole and any(p is weights for group in self.optimizer.param_groups for p in group["params"])

    # ---- what this rank holds

    def active(self, ranks: int) -> dict[str, tuple[int, ...]]:
        """Per unit, which of so many ranks train it: all of them, or those where its expert is placed."""
        return {
            unit.name: tuple(range(ranks))
            if unit.layer is None
            else tuple(np.flatnonzero(self.layers[unit.layer].matrix_RE[:, unit.expert]).tolist())
            for unit in self.units
        }

    def held(self) -> list[str]:
        """Names of the units that this rank trains on: all but the experts of other ranks."""
        experts = [expert_unit(path, e) for path, layer in self.layers.items() for e in layer.experts]
        return [*self._dense, *experts]

    def _tensors(self, unit: Unit) -> Iterable[Tensor]:
        if unit.layer is None:
            return self._dense_state(unit.name).values()
        layer = self.layers[unit.layer]
        row = layer.experts.index(unit.expert)  # type: ignore[arg-type]
        return [stack[row] if stack.dim() == 2 else stack for stack in self._stacks(layer).values()]

    @torch.no_grad()
    def read(self, name: str, out: Tensor) -> None:
        """Copies a held unit's state to `out`, uint8 `[nbytes]` on the CPU."""
        start = 0
        for tensor in self._tensors(self.by_name[name]):
            out[start : start + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
            start += tensor.nbytes

    def digests(self, names: Sequence[str]) -> list[int]:
        """XXH3-64 of held units' bytes, as `read` gives them."""
        return digests_of(self.tensors(names))

    @torch.no_grad()
    def release(self) -> None:
        """Gives up the memory of the model and the optimizer: this process only keeps copies for others."""
        self.optimizer.state.clear()
        own = self._dense.pop(SESSION)
        for tensors in self._dense.values():
            for tensor in tensors.values():
                tensor.data = tensor.new_empty(0)
        for layer in self.layers.values():
            layer.weights.data = layer.weights.new_empty(0)
            layer.experts = []
        self._dense = {SESSION: own}

    def tensors(self, names: Iterable[str]) -> list[list[Tensor]]:
        """The tensors of held units now, whose bytes one after the other are the units'."""
        return [[tensor.detach() for tensor in self._tensors(self.by_name[name])] for name in names]

    def scalars(self) -> dict[str, float]:
        """What the optimizer counts for all experts of a layer together, such as its steps; by `layer/piece`."""
        return {
            f"{path}/{key}": float(tensor)
            for path, layer in self.layers.items()
            for key, tensor in self._stacks(layer).items()
            if tensor.dim() == 0
        }

    def unit_scalars(self, name: str, data: Tensor) -> dict[str, Tensor]:
        """Views of the same in an expert's bytes, uint8 `[nbytes]`."""
        unit = self.by_name[name]
        found, start = {}, 0
        for piece in unit.pieces:
            if not piece.shape and unit.layer is not None:
                found[f"{unit.layer}/{piece.name}"] = data[start : start + piece.nbytes].view(piece.dtype)
            start += piece.nbytes
        return found

    @torch.no_grad()
    def adopt(self, experts: dict[str, list[int]], fetched: dict[str, Tensor]) -> None:
        """Makes this rank hold `experts` (layer path → ids) and takes over the bytes of all `fetched` units.

        Nothing is changed before all inputs are checked: an expert that is neither held nor fetched is a KeyError.
        """
        stacks = {path: self._restack(path, ids, fetched) for path, ids in experts.items()}
        for path, tensors in stacks.items():
            self._replace(self.layers[path], experts[path], tensors)
        for name, data in fetched.items():
            unit = self.by_name[name]
            if unit.layer is None:
                for target, value in zip(self._tensors(unit), unit.tensors(data).values(), strict=True):
                    target.copy_(value)

    def _restack(self, path: str, ids: list[int], fetched: dict[str, Tensor]) -> dict[str, Tensor]:
        layer = self.layers[path]
        old = self._stacks(layer)
        rows = {e: i for i, e in enumerate(layer.experts)}
        new = {key: t.new_empty((len(ids), *t.shape[1:])) if t.dim() == 2 else t.clone() for key, t in old.items()}
        for i, expert in enumerate(ids):
            name = expert_unit(path, expert)
            if name in fetched:
                values = list(self.by_name[name].tensors(fetched[name]).values())
            else:
                values = [stack[rows[expert]] if stack.dim() == 2 else stack for stack in old.values()]
            for target, value in zip(new.values(), values, strict=True):
                (target[i] if target.dim() == 2 else target).copy_(value)
        return new

    def _replace(self, layer: MoE, ids: list[int], tensors: dict[str, Tensor]) -> None:
        """A new Parameter, never a resized one: graphs of an interrupted step may still hold the old."""
        old, new = layer.weights, nn.Parameter(tensors["weights"], layer.weights.requires_grad)
        layer.weights, layer.experts = new, list(ids)
        for group in self.optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        self.optimizer.state.pop(old, None)
        state = {key.removeprefix("weights/"): t for key, t in tensors.items() if key != "weights"}
        if state:
            self.optimizer.state[new] = state

    # ---- the experts' load

    @property
    def load_LE(self) -> NDArray[np.float64]:
        """Average tokens of each expert in a step, per layer; zeros past the experts of a layer that has fewer."""
        return self._load_average().loads

    def add_load(self) -> None:
        """Adds the tokens that the layers have counted in this step to the average."""
        tokens_LE = np.zeros((len(self.layers), self._most_experts()), np.int64)
        for row, layer in zip(tokens_LE, self.layers.values(), strict=True):
            row[: layer.num_experts] = layer.load_E
        average = self._load_average()
        average.add(tokens_LE)
        self.load.copy_(torch.from_numpy(average.state))

    def expert_tokens(self) -> dict[str, float]:
        """Average tokens of each expert in a step, by unit."""
        return {
            expert_unit(path, expert): row[expert]
            for row, (path, layer) in zip(self.load_LE.tolist(), self.layers.items(), strict=True)
            for expert in range(layer.num_experts)
        }

    def reset_load(self) -> None:
        """Forgets the tokens that the layers have counted since the last step."""
        for layer in self.layers.values():
            layer.load_E = np.zeros_like(layer.load_E)

    def _load_average(self) -> LoadAverage:
        layers, experts = len(self.layers), self._most_experts()
        return LoadAverage(layers, experts, half_life=LOAD_HALF_LIFE, state=self.load.numpy())

    # ---- the loop's own state

    def set_progress(self, progress: dict[str, object]) -> None:
        """Stores the loop's state as JSON in the unit `session`."""
        try:
            text = json.dumps(progress, sort_keys=True).encode()
        except TypeError as error:
            raise UnsupportedState(f"the state of the sampler or scheduler must be JSON: {error}") from None
        if len(text) > PROGRESS_BYTES:
            raise UnsupportedState(
                f"the state of the sampler and scheduler takes {len(text)} bytes as JSON; at most {PROGRESS_BYTES} fit"
            )
        self.progress.zero_()
        self.progress[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def get_progress(self) -> dict[str, object]:
        """The state stored last; empty when none was."""
        text = self.progress.numpy().tobytes().rstrip(b"\0")
        return json.loads(text) if text else {}


def digests_of(units: Sequence[Sequence[Tensor]]) -> list[int]:
    """XXH3-64 of each unit's bytes, one tensor after the other; of contiguous ones on the CPU without a copy."""
    if any(tensor.is_cuda for tensors in units for tensor in tensors):  # one at a time: they may be large
        return [digests([[_bytes(tensor) for tensor in tensors]])[0] for tensors in units]
    return digests([[_bytes(tensor) for tensor in tensors] for tensors in units])


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy()


def dense_tensors(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Parameters and persistent buffers by module path and name, without the experts; a tied one where it is first."""
    seen = {id(layer.weights) for layer in moe_layers(model).values()}
    found: dict[str, dict[str, Tensor]] = {}
    for path, module in model.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *_persistent_buffers(module)]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found.setdefault(path or "model", {})[name] = tensor
    return found


def weight_tensors(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Like `dense_tensors`, with the local experts' rows as units of their own."""
    experts = {
        expert_unit(path, expert): {"weights": layer.weights[row]}
        for path, layer in moe_layers(model).items()
        for row, expert in enumerate(layer.experts)
    }
    return dense_tensors(model) | experts


def _persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    skipped = module._non_persistent_buffers_set
    return [(name, b) for name, b in module.named_buffers(recurse=False) if name not in skipped]


def _create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer create its state now, as its first step would, without changing any parameter.

    Optimizers that have state already are left alone.

    Raises:
        UnsupportedState: the state is of a kind that units cannot hold, or does not start from zeros.
    """
    if not any(optimizer.state.values()):
        _check_start(optimizer)
        _start_from_zeros(optimizer)
    _check_optimizer_state(optimizer)


def _start_from_zeros(optimizer: torch.optim.Optimizer) -> None:
    """A step with zero gradients and a zero learning rate, then all state back to zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    saved = {p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    with torch.no_grad():
        for parameter, value in saved.items():
            parameter.copy_(value)
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        for key in [key for key, value in state.items() if value is None]:
            del state[key]
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()


def _check_start(optimizer: torch.optim.Optimizer) -> None:
    """Two steps on scratch tensors: an optimizer whose state starts otherwise than from zeros is refused."""
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        options = {key: value for key, value in group.items() if key != "params"}
        like = group["params"][0]
        drawn = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
        results = []
        for prepared in (False, True):
            scratch = nn.Parameter(drawn[0].clone())
            try:
                fresh = type(optimizer)([{"params": [scratch], **options}])  # type: ignore[call-arg]
            except TypeError:
                return  # an optimizer with a constructor of its own: nothing to compare with
            try:
                _try_two_steps(fresh, scratch, drawn[1:], prepared)
            except (TypeError, ValueError, RuntimeError) as error:
                raise UnsupportedState(
                    f"{type(optimizer).__name__} cannot step on a dense vector with a gradient alone: {error}"
                ) from None
            results.append(scratch.detach())
        if not torch.equal(*results):
            raise UnsupportedState(
                f"{type(optimizer).__name__} with {options} starts from other state than zeros, which a session cannot "
                "set up before the first step. Use e.g. torch.optim.AdamW(fused=True), or SGD without dampening."
            )


def _try_two_steps(optimizer: torch.optim.Optimizer, scratch: nn.Parameter, gradients: Tensor, prepared: bool) -> None:
    if prepared:
        _start_from_zeros(optimizer)
    for gradient in gradients:
        scratch.grad = gradient.clone()
        optimizer.step()


def _check_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor) or (value.dim() > 0 and value.shape != parameter.shape):
                found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise UnsupportedState(
                    f"{type(optimizer).__name__} keeps '{key}' as {found} for a parameter of shape "
                    f"{tuple(parameter.shape)}; expected tensors of the parameter's shape or scalar tensors. "
                    "Use an elementwise optimizer such as torch.optim.AdamW(fused=True) or SGD."
                )
