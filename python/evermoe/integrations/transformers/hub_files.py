"""Files of transformers' folders other than weights and configuration: tokenizers, processors, chat templates."""

from __future__ import annotations

import shutil
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates",
    "*processor_config.json",
)
"""Names of files and folders that tokenizers and processors of transformers read."""
GENERATION = "generation_config.json"


def origin_of(config: PretrainedConfig) -> Path | None:
    """Return the folder of which a configuration was read, also that of a model of the hub; None if there is none."""
    name = config.name_or_path
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    found = try_to_load_from_cache(name, "config.json") if name.count("/") == 1 and name[0] not in "./~" else None
    return Path(found).parent if isinstance(found, str) else None


def read_generation(model: PreTrainedModel) -> None:
    """Give a model the settings for generation that are in the folder of its configuration."""
    origin = origin_of(model.config)
    if origin is not None and model.can_generate() and (origin / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(origin))


def copy_processing(model: PreTrainedModel, folder: Path) -> None:
    """Copy the files of tokenizer and processor from the folder of a model's configuration, as they are.

    Raises:
        OSError: they cannot be read or written.
    """
    origin = origin_of(model.config)
    for found in sorted({each for pattern in PATTERNS for each in origin.glob(pattern)}) if origin else ():
        if found.is_dir():
            shutil.copytree(found, folder / found.name)
        else:
            shutil.copyfile(found, folder / found.name)
