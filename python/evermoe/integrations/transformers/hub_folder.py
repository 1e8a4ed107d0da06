"""Weights in transformers' folders, one unit at a time: the first weights of a deferred model, and exports.

transformers' own conversions are used both ways, so that keys and shapes in the files are those of its
`from_pretrained` and `save_pretrained`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from evermoe.checkpoint import full_state
from evermoe.checkpoint.folder_weights import SafetensorsFiles, refuse_quantised
from evermoe.checkpoint.full_state import LiveWeights
from evermoe.checkpoint.weight_folder import WeightFolder
from evermoe.errors import CorruptCopy
from evermoe.integrations.transformers.elastic import hub_name, make_elastic
from evermoe.moe.experts import Experts, expert_layers
from evermoe.moe.module_paths import named_parts
from evermoe.session.between_steps import prepare_export
from evermoe.session.session import Session
from evermoe.state.deferred import WeightSource, deferred
from evermoe.state.unit import own_tensors


class HubWeights:
    """Reads a deferred model's first weights from a folder that transformers can load; see `WeightSource`.

    A rank reads only the units that it holds. Of an expert it reads the expert's own tensors, or its part of a stack.

    Args:
        folder: on a disk, with safetensors files.
        model: of transformers, elastic, deferred or on `meta`.

    Raises:
        CorruptCopy: there are no such files, or they cannot be read.
    """

    def __init__(self, folder: str | Path, model: PreTrainedModel) -> None:
        self._files = SafetensorsFiles(folder)
        self._model = model
        self._paths = {id(module): path for path, module in named_parts(model)}
        self._experts = {path: m.num_experts for path, m in named_parts(model) if isinstance(m, Experts)}
        mapping = get_model_conversion_mapping(model)
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
        found = self._read(name, expert)
        if found.shape != target.shape:
            shapes = f"expected {list(target.shape)}, found {list(found.shape)}"
            raise CorruptCopy(f"{name} in {self._files.folder} belongs to another model: {shapes}")
        refuse_quantised(name, found, self._files.folder)
        target.copy_(found)

    def _read(self, name: str, expert: int | None) -> Tensor:
        """Return a tensor by transformers' name; of an expert as a stack of one."""
        first = self._first.get(name, name)
        sources = self._sources.get(first)
        if sources is None:
            raise CorruptCopy(f"{self._files.folder} has no weights for {name}")
        part: Any = ... if expert is None else slice(expert, expert + 1)
        key, pattern = sources[0]
        if pattern is None:
            return self._files.tensor(key, part)
        by_pattern: dict[str, list[str]] = {}
        for key, pattern in sources:
            by_pattern.setdefault(str(pattern), []).append(key)
        converter: Any = deepcopy(self._converters[str(sources[0][1])])
        for pattern, keys in by_pattern.items():
            is_apart = expert is not None and len(keys) == self._experts[first.rpartition(".")[0]]
            for key in [keys[expert]] if is_apart and expert is not None else keys:
                converter.add_tensor(first, key, pattern, self._files.tensor(key, ... if is_apart else part))
        found = converter.convert(first, model=self._model, config=self._model.config)[name]
        return found[0] if isinstance(found, list) else found


def from_pretrained(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None, **options: Any
) -> tuple[nn.Module, HubWeights]:
    """Return a deferred elastic model of a folder, and the source of its weights; nothing large is read yet.

        model, weights = from_pretrained("Qwen3-30B-A3B")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        session = evermoe.Session(model, optimizer, sampler, weights=weights)

    Args:
        folder: of a causal language model, on a disk: download one with `hf download`.
        dtype: of the parameters; default: the configuration's.
        device: where the session makes the model; default: torch's default device.
        options: of `make_elastic`.

    Raises:
        OSError: there is no such folder, or no configuration in it.
        CorruptCopy: as of `HubWeights`.
    """
    config = AutoConfig.from_pretrained(folder)
    with deferred(device=device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32)
        make_elastic(model, **options)
    return model, HubWeights(folder, model)


def export(
    source: WeightSource | Session,
    model: PreTrainedModel,
    folder: str | Path,
    *,
    prefix: str = "",
    add_more: Callable[[Path], None] = lambda draft: None,
) -> None:
    """Write a folder that transformers' `from_pretrained` loads, one layer in memory at a time.

    It appears when all of it is on disk. From a session, all members that train call this between steps, and rank 0
    writes what the others send: `evermoe.Session.full_state_dict` says when, and what follows when a member is lost.

    Args:
        source: of the weights, such as `evermoe.CheckpointWeights`; or the session that trains `model`.
        model: of transformers, elastic; deferred or on `meta` where the source is no session.
        folder: must be empty or missing.
        prefix: path of `model` in the model that was trained, if that is a larger one.
        add_more: writes other files into the folder before it appears; in the process that writes it.

    Raises:
        OSError: the folder is not empty, or cannot be written to.
        CorruptCopy: the source belongs to another model.
        ValueError: the source is a session that trains another model.
        PersistFailed, PeerLost, RuntimeError: as of `full_state_dict`, from a session.
    """

    def write_config(draft: Path) -> None:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(draft)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(draft)
        add_more(draft)

    if isinstance(source, Session):
        if not any(module is model for module in source.model.modules()):
            raise ValueError("export: expected the model that the session trains, or a part of it, got another")
        root = prepare_export(source, is_complete=len(expert_layers(model)) == len(expert_layers(source.model)))
        pieces = _pieces(LiveWeights(root), model, prefix)
        parts = _as_saved(model, pieces) if source.group.rank == root else pieces
        full_state.write(parts, Path(folder), source.group, write_config, root)
        return
    with WeightFolder(Path(folder)) as draft:
        for piece in _as_saved(model, _pieces(source, model, prefix)):
            draft.add_tensors(piece)
        draft.publish(write_config)


def _as_saved(model: PreTrainedModel, pieces: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the pieces by the keys of transformers' files."""
    for piece in pieces:
        yield revert_weight_conversion(model, piece)


def _pieces(source: WeightSource, model: nn.Module, prefix: str) -> Iterator[dict[str, Tensor]]:
    """Yield the state by transformers' names: per layer its experts, and all its other modules together."""
    seen: set[int] = set()
    layer, piece = "", dict[str, Tensor]()
    for path, module in named_parts(model):
        parts = path.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        begun = "" if number is None else ".".join(parts[: number + 1])
        if begun != layer and piece:
            yield piece
            piece = {}
        layer = begun
        own = [(name, tensor) for name, tensor in own_tensors(module) if id(tensor) not in seen]
        seen |= {id(tensor) for _, tensor in own}
        full = ".".join(part for part in (prefix, path) if part)
        if isinstance(module, Experts):
            size = (module.num_experts, module.expert.row_size)
            weights = torch.empty(size, dtype=module.weights.dtype)
            for expert in range(module.num_experts):
                source.fill(full, module, {"weights": weights[expert]}, expert)
            yield {f"{path}.{hub_name(name)}": v for name, v in module.expert.views(weights).items()}
        elif own:
            tensors = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in own}
            source.fill(full, module, tensors, None)
            names = ((f"{path}.{name}".removeprefix("."), tensor) for name, tensor in tensors.items())
            piece |= {name.replace(".post_norm.", ".post_expert_norm."): tensor for name, tensor in names}
    if piece:
        yield piece
