"""Weights in transformers' folders, one unit at a time: the first weights of a deferred model, and exports.

transformers' own conversions are used both ways, so that keys and shapes in the files are those of its
`from_pretrained` and `save_pretrained`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from evermoe.checkpoint import full_state
from evermoe.checkpoint.full_state import LiveWeights
from evermoe.checkpoint.weight_folder import WeightFolder
from evermoe.integrations.transformers.elastic import hub_name, make_elastic
from evermoe.integrations.transformers.hub_files import copy_processing
from evermoe.integrations.transformers.hub_model import build_model, read_config
from evermoe.integrations.transformers.hub_weights import HubWeights, ModelOfTensors
from evermoe.integrations.transformers.quantised import forget_quantisation
from evermoe.moe.experts import Experts, expert_layers
from evermoe.moe.module_paths import named_parts
from evermoe.session.between_steps import prepare_export
from evermoe.session.session import Session
from evermoe.state.deferred import WeightSource, deferred
from evermoe.state.unit import own_tensors


def from_pretrained(
    folder: str | Path,
    *,
    model_class: Any = None,
    config: PretrainedConfig | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> tuple[nn.Module, HubWeights]:
    """Return a deferred elastic model of a folder, and the source of its weights; nothing large is read yet.

    Weights in MXFP4 or FP8 are dequantised unit by unit as each worker reads its own.

        model, weights = from_pretrained("Qwen3-30B-A3B")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        session = evermoe.Session(model, optimizer, sampler, weights=weights)

    A head that the folder does not have, such as the one of `AutoModelForSequenceClassification` for the folder of a
    causal language model, is drawn as transformers draws it, the same on all workers; a warning names its weights.

    Args:
        folder: of a model with experts, on a disk: download one with `hf download`.
        model_class: one of transformers' `AutoModelFor…`, or a model; default: the one that the folder's configuration
            names as its architecture.
        config: in place of the folder's, as from `AutoConfig.from_pretrained(folder, num_labels=3)`.
        dtype: of the parameters; default: the configuration's.
        device: where the session makes the model; default: torch's default device.
        options: of `make_elastic`.

    Raises:
        OSError: there is no such folder, or no configuration in it.
        CorruptCopy, UnsupportedState: as of `HubWeights`.
    """
    config = read_config(folder) if config is None else forget_quantisation(deepcopy(config))
    with deferred(device=device):
        model = build_model(config, dtype, model_class)
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

    Files of tokenizer, processor and chat templates are copied from the folder of which the configuration was read.

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
        copy_processing(model, draft)
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
        yield revert_weight_conversion(ModelOfTensors(model, piece), piece)


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
