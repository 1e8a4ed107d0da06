"""Reads weights of transformers' folders, one unit at a time: the first weights of a deferred model.

transformers' own conversions say which keys of the files are which weights of the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from evermoe.checkpoint.folder_weights import SafetensorsFiles
from evermoe.errors import CorruptCopy
from evermoe.integrations.transformers.elastic import hub_name
from evermoe.integrations.transformers.quantised import (
    Matrix,
    as_it_is,
    is_dequantising,
    matrices,
    quantizer_of,
    read_fields,
)
from evermoe.moe.experts import Experts
from evermoe.moe.module_paths import named_parts
from evermoe.process.warn import warn
from evermoe.state.unit import own_tensors

STACK, JOIN_ROWS = (MergeModulelist, 0), (Concatenate, 1)
"""Conversions of an expert's matrices that need no memory: each is written to its rows."""
_AS_IT_IS = ""
"""Instead of the pattern of a tensor that transformers does not convert."""


class ModelOfTensors:
    """A model as transformers' conversions see it: they look up the shapes of parameters, of experts as well.

    Args:
        model: elastic.
        tensors: by transformers' names; they come before the model's own.
    """

    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        self._model, self._tensors = model, tensors

    def get_parameter(self, name: str) -> Tensor:
        """Return a tensor of the shape and dtype of a parameter."""
        return self._tensors[name] if name in self._tensors else self._model.get_parameter(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class HubWeights:
    """Reads a deferred model's first weights from a folder that transformers can load; see `WeightSource`.

    A rank reads only the units that it holds. Of an expert it reads the expert's own tensors, or its part of a stack.
    Quantised weights are dequantised meanwhile.

    Args:
        folder: on a disk, with safetensors files.
        model: of transformers, elastic, deferred or on `meta`.

    Raises:
        CorruptCopy: there are no such files, or they cannot be read.
        UnsupportedState: their quantisation is not supported.
    """

    def __init__(self, folder: str | Path, model: PreTrainedModel) -> None:
        self._files = SafetensorsFiles(folder)
        self._model = model
        self._paths = {id(module): path for path, module in named_parts(model)}
        self._quantizer = quantizer_of(self._files.folder)
        self._experts = {path: m.num_experts for path, m in named_parts(model) if isinstance(m, Experts)}
        mapping = get_model_conversion_mapping(model, hf_quantizer=self._quantizer)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._converters = {pattern: each for each in converters for pattern in each.source_patterns}
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        self._first: dict[str, str] = {}
        with warnings.catch_warnings():  # a model in training warns that it has only some of the experts
            warnings.simplefilter("ignore")
            state = model.state_dict()
        for key in sorted(self._files.keys(), key=dot_natural_key):
            found = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
            name, pattern = (key, None) if found[0] not in state and key in state else found
            self._sources.setdefault(name, []).append((key, pattern))
            first, *others = self._converters[pattern].target_patterns if pattern else [""]
            for other in others:
                self._first[name.replace(first, other)] = name
        self._shapes = {key: torch.empty_like(tensor, device="meta") for key, tensor in state.items()}
        self._lacking = self._find_lacking()

    def _find_lacking(self) -> set[str]:
        """Return the paths of modules of another head than the folder's, which has no weights for them."""
        model, folder = self._model, self._files.folder
        if type(model).__name__ in (read_fields(folder).get("architectures") or [type(model).__name__]):
            return set()
        base, tied = f"{model.base_model_prefix}.", set(model.all_tied_weights_keys)
        names = {
            path: [f"{path}.{name}" for name, _ in own_tensors(module)]
            for path, module in named_parts(model)
            if path and not f"{path}.".startswith(base)
        }
        found = {path for path, own in names.items() if own and not {*own} & {*self._sources, *self._first, *tied}}
        if found:
            weights = ", ".join(name for path in sorted(found) for name in names[path])
            warn(
                f"{folder} has no weights for {weights}: they are drawn as {type(model).__name__} draws them, the same "
                "on all workers. Train them before you use the model"
            )
        return found

    def lacks(self, path: str, module: nn.Module) -> bool:
        """Return whether the folder has none of a module's weights; see `PartialSource`."""
        return self._paths.get(id(module), path) in self._lacking

    def describe(self) -> str:
        """Return the digest of the files' keys."""
        return self._files.describe()

    @torch.no_grad()
    def fill(self, path: str, module: nn.Module, tensors: Mapping[str, Tensor], expert: int | None) -> None:
        """Write the first values of one unit; see `WeightSource`."""
        path = self._paths.get(id(module), path)
        if expert is not None and isinstance(module, Experts):
            row = tensors["weights"]
            row.zero_()  # the padding, too
            for name, view in module.expert.views(row.unsqueeze(0)).items():
                self._copy(f"{path}.{hub_name(name)}", view, expert)
            return
        for name, tensor in tensors.items():
            self._copy(f"{path}.{name}".removeprefix(".").replace(".post_norm.", ".post_expert_norm."), tensor, None)

    def _copy(self, name: str, target: Tensor, expert: int | None) -> None:
        """Write a tensor by transformers' name; of an expert as a stack of one."""
        parts, is_stack = self._parts(name, target, expert)
        rows, tail = [part.shape[0] for part in parts] if is_stack else [], parts[0].shape[1:]
        shape = [1, sum(rows), *tail] if is_stack else parts[0].shape
        if shape != list(target.shape) or any(part.shape[1:] != tail for part in parts):
            shapes = f"expected {list(target.shape)}, found {shape}"
            raise CorruptCopy(f"{name} in {self._files.folder} belongs to another model: {shapes}")
        for part, place in zip(parts, target[0].split(rows) if is_stack else [target], strict=True):
            part.write(place)

    def _parts(self, name: str, target: Tensor, expert: int | None) -> tuple[list[Matrix], bool]:
        """Return what makes up a tensor, and whether these are matrices of an expert, one below the other."""
        first = self._first.get(name, name)
        found = self._matrices(first, expert)
        converter: Any = deepcopy(self._converters.get(next(iter(found))))
        if converter is None:
            return found[_AS_IT_IS], False
        converter.operations = [each for each in converter.operations if not is_dequantising(each)]
        kinds = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
        is_stack = kinds in ([STACK], [STACK, JOIN_ROWS]) and all(len(parts) == 1 for parts in found.values())
        if is_stack or not kinds:
            return [part for pattern in converter.source_patterns for part in found.get(pattern, [])], is_stack
        for pattern, parts in found.items():
            for part in parts:
                converter.add_tensor(first, name, pattern, part.read(target.dtype))
        model = ModelOfTensors(self._model, self._shapes | {name: target})
        converted = converter.convert(first, model=model, config=self._model.config)[name]
        return [as_it_is(converted[0] if isinstance(converted, list) else converted)], False

    def _matrices(self, first: str, expert: int | None) -> dict[str, list[Matrix]]:
        """Return the matrices of which transformers converts a tensor, by the patterns of their keys."""
        if first not in self._sources:
            raise CorruptCopy(f"{self._files.folder} has no weights for {first}")
        by_pattern: dict[str, list[str]] = {}
        for key, pattern in self._sources[first]:
            by_pattern.setdefault(pattern or _AS_IT_IS, []).append(key)
        part: Any = ... if expert is None else slice(expert, expert + 1)
        tensors: dict[str, list[Tensor]] = {}
        for pattern, keys in by_pattern.items():
            if pattern != _AS_IT_IS and expert is not None and len(keys) == self._experts[first.rpartition(".")[0]]:
                tensors[pattern] = [self._files.tensor(keys[expert])]
            else:
                tensors[pattern] = [self._files.tensor(key, part) for key in keys]
        return matrices(tensors, self._quantizer, f"{first} in {self._files.folder}")
