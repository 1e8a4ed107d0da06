"""Models of transformers from the configuration in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from evermoe.integrations.transformers.hub_files import read_generation
from evermoe.integrations.transformers.quantised import forget_quantisation


def read_config(folder: str | Path, **options: Any) -> PretrainedConfig:
    """Return a folder's configuration, as of a model whose weights are not quantised.

    Args:
        folder: with a config.json. Code in the folder is not run.
        options: of transformers' `AutoConfig.from_pretrained`.
    """
    return forget_quantisation(AutoConfig.from_pretrained(str(folder), **options))


def build_model(config: PretrainedConfig, dtype: torch.dtype | None = None, model_class: Any = None) -> PreTrainedModel:
    """Return a model with new weights.

    Args:
        config: of the model.
        dtype: of its parameters; default: the configuration's, or float32.
        model_class: one of transformers' `AutoModelFor…`, or a model; default: the model that the configuration names
            as its architecture, or `AutoModelForCausalLM`.
    """
    name = (config.architectures or [""])[0]
    kind: Any = model_class or getattr(transformers, name, AutoModelForCausalLM)
    build = kind.from_config if hasattr(kind, "from_config") else kind._from_config
    model: PreTrainedModel = build(config, dtype=dtype or config.dtype or torch.float32)
    read_generation(model)
    return model
