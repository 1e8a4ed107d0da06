"""The sizes of a transformers model, from its folder's config.json alone."""

from __future__ import annotations

from pathlib import Path

import torch

from evermoe.integrations.transformers.elastic import make_elastic
from evermoe.integrations.transformers.hub_model import build_model, read_config
from evermoe.planning.models import ModelShape
from evermoe.state.model_shape import shape_of


def read_shape(folder: str | Path) -> ModelShape:
    """Return the sizes of the model that a folder's config.json describes, without reading weights.

    Args:
        folder: with a config.json, as transformers writes it. Code in the folder is not run.

    Raises:
        ValueError: transformers cannot make a model of it, or it has no experts, or layers of different sizes.
    """
    try:
        config = read_config(folder, local_files_only=True)
        with torch.device("meta"):
            model = build_model(config)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        first = (str(error) or type(error).__name__).split("\n", 1)[0]
        raise ValueError(f"{folder}: expected a config.json of a model that transformers can make: {first}") from None
    return shape_of(make_elastic(model), f"{folder}/config.json")
