"""A model and its optimizer as units: the smallest things that are copied, fetched, saved or moved.

A unit is one expert of one MoE layer, one other module with parameters or buffers of its own, or one of `LOOP_UNITS`
(the state of the training loop). In an island, the shards of a module are units of their own, `path@POSITIONofSIZE`.
The bytes of a unit are its pieces one after the other: weights, then the optimizer's state. Every rank computes the
same list of units, in the same order, whatever it holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from evermoe._native import digests
from evermoe.moe.experts import expert_layers
from evermoe.moe.module_paths import named_parts
from evermoe.planning.holders import primaries
from evermoe.state.extent import Extent
from evermoe.state.gpu_digests import bytes_of, gpu_digests

SESSION = "session"
"""The unit with the small state of the training loop."""
READERS = "session.readers"
"""The unit with the states of the readers of an `ElasticReaders`."""
LOOP_UNITS = (SESSION, READERS)
"""Units that are no part of the model. Their tensors are on the CPU wherever the model is."""
MARKS = "marks"
"""Its tensor that only presets have which always may lose tokens; see `evermoe.state.copy_marks`."""
_SHARD = re.compile(r"^(.+)@\d+of\d+\Z", re.DOTALL)
"""Name of a shard."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a unit: what it is called, and its shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_optional: bool = False
    """Whether only some presets have it: it is no part of the layout, and a save without it is read as zeros."""
    extent: Extent | None = None
    """Of a tensor that an island divides, the place of this part; None for a complete tensor."""
    is_state: bool = field(default=False, compare=False)
    """Whether only an update needs it: it is the optimizer's, and more than a number."""
    is_buffer: bool = field(default=False, compare=False)
    """Whether it is a buffer of the module."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Unit:
    """Name and byte layout of a unit; `layer` and `expert` are set for an expert."""

    name: str
    specs: tuple[TensorSpec, ...]
    layer: str | None = None
    expert: int | None = None

    @property
    def complete(self) -> str:
        """Name of the unit of which this one is a shard; the own name of one that is complete."""
        return complete_name(self.name) if any(spec.extent is not None for spec in self.specs) else self.name

    @property
    def nbytes(self) -> int:
        """Bytes of the complete state."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def state_nbytes(self) -> int:
        """Bytes of what only an update needs."""
        return sum(spec.nbytes for spec in self.specs if spec.is_state)

    def tensors(self, data: Tensor) -> dict[str, Tensor]:
        """Views of the pieces in the unit's bytes, uint8 `[nbytes]`, by name (copies where misaligned).

        Bytes without those that only an update needs, `[nbytes - state_nbytes]`, have views of the others alone.
        """
        is_whole = len(data) == self.nbytes
        return _views([spec for spec in self.specs if is_whole or not spec.is_state], data)

    def state_tensors(self, data: Tensor) -> dict[str, Tensor]:
        """Views of what only an update needs, in its bytes, uint8 `[state_nbytes]`; as `tensors`."""
        return _views([spec for spec in self.specs if spec.is_state], data)

    def digest_of(self, weights: Tensor, state: Tensor) -> int:
        """XXH3-64 of the unit's bytes, from those without `state_nbytes` and these."""
        at, parts = {False: 0, True: 0}, []
        for spec in self.specs:
            start = at[spec.is_state]
            at[spec.is_state] = start + spec.nbytes
            parts.append((state if spec.is_state else weights)[start : start + spec.nbytes].numpy())
        return digests([parts])[0]

    def fitted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, which may have been saved under another preset: with zeros for what is optional, or without it.

        Optional ones come last.
        """
        found = {name: tensor for name, tensor in tensors.items() if (self.name, name) != (SESSION, MARKS)}
        for spec in self.specs:
            if spec.is_optional:
                found[spec.name] = tensors.get(spec.name, torch.zeros(spec.shape, dtype=spec.dtype))
        return found

    def layer_scalars(self, data: Tensor) -> dict[str, Tensor]:
        """Views of the values of its layer that an expert's bytes `[nbytes]` repeat: see `TrainingState.scalars`."""
        found, start = {}, 0
        for spec in self.specs:
            if not spec.shape and self.layer is not None:
                found[f"{self.layer}/{spec.name}"] = data[start : start + spec.nbytes].view(spec.dtype)
            start += spec.nbytes
        return found


def _views(specs: Iterable[TensorSpec], data: Tensor) -> dict[str, Tensor]:
    views, start = {}, 0
    for spec in specs:
        part = data[start : start + spec.nbytes]
        if part.storage_offset() % spec.dtype.itemsize:
            part = part.clone()
        views[spec.name] = part.view(spec.dtype).view(spec.shape)
        start += spec.nbytes
    return views


def expert_unit(layer: str, expert: int) -> str:
    """The unit's name of one of the experts at module path `layer`."""
    return f"{layer or 'experts'}.{expert}"


def shard_unit(path: str, position: int, size: int) -> str:
    """Return the name of the unit with the shards of the module at `path` at one position of an island."""
    return f"{path}@{position}of{size}"


def complete_name(unit: str) -> str:
    """Return the name of the complete unit of a shard; the name itself of any other unit."""
    found = _SHARD.match(unit)
    return unit if found is None else found[1]


def digests_of(units: Sequence[Sequence[Tensor]]) -> list[int]:
    """Compute the XXH3-64 of each unit's bytes, one tensor after the other, where the bytes are.

    Args:
        units: tensors, those on a GPU as torch's current stream will have left them.
    """
    if not any(tensor.is_cuda for tensors in units for tensor in tensors):
        return digests([[bytes_of(tensor) for tensor in tensors] for tensors in units])
    found = gpu_digests(units)
    # The others one at a time: they may be large.
    return [
        found[place] if place in found else digests([[bytes_of(tensor) for tensor in tensors]])[0]
        for place, tensors in enumerate(units)
    ]


def read_tensors(tensors: Iterable[Tensor], out: Tensor) -> None:
    """Copies a unit's tensors, one after the other, to `out`, uint8 `[nbytes]` on the CPU."""
    start = 0
    for tensor in tensors:
        out[start : start + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
        start += tensor.nbytes


def read_part(tensors: Iterable[Tensor], start: int, out: Tensor) -> None:
    """Copies those of a unit's bytes that begin at `start` to `out`, uint8 `[n]` on the CPU.

    Example: of tensors of 8 and 4 bytes, with `start` 6 and n = 4, the last two bytes of the first and the first two of
    the second.
    """
    at = 0
    for tensor in tensors:
        first, last = max(start - at, 0), min(start + len(out) - at, tensor.nbytes)
        if first < last:
            taken = tensor.reshape(-1).view(torch.uint8)[first:last]
            out[at + first - start : at + last - start].copy_(taken)
        at += tensor.nbytes


def dense_tensors(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Parameters and persistent buffers by module path and name, without the experts; a tied one where it is first.

    Paths are those without wrappers: see `named_parts`.
    """
    seen = {id(layer.weights) for layer in expert_layers(model).values()}
    found: dict[str, dict[str, Tensor]] = {}
    for path, module in named_parts(model):
        for name, tensor in own_tensors(module):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found.setdefault(path or "model", {})[name] = tensor
    return found


def weight_tensors(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Like `dense_tensors`, with the local experts' rows as units of their own."""
    experts = {
        expert_unit(path, expert): {"weights": layer.weights[row]}
        for path, layer in expert_layers(model).items()
        for row, expert in enumerate(layer.ids)
    }
    return dense_tensors(model) | experts


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers of a module alone, without those of its children, by name."""
    skipped = module._non_persistent_buffers_set
    buffers = [(name, b) for name, b in module.named_buffers(recurse=False) if name not in skipped]
    return [*module.named_parameters(recurse=False), *buffers]


def primary_units(units: Sequence[Unit], holders: Mapping[str, Sequence[int]], rank: int, ranks: int) -> list[str]:
    """Names of the units that this rank copies for all: each unit has one such rank among its holders."""
    chosen = primaries([holders[unit.name] for unit in units], [unit.nbytes for unit in units], ranks)
    return [unit.name for unit, primary in zip(units, chosen, strict=True) if primary == rank]
