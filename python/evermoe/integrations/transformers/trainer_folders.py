"""The folders that a Trainer writes: a complete model, by one process, that transformers' `from_pretrained` loads."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, Trainer
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState

from evermoe.checkpoint.folder_weights import INDEX
from evermoe.checkpoint.weight_folder import WeightFolder
from evermoe.integrations.transformers.adapters import is_adapted, state_outside_experts
from evermoe.integrations.transformers.hub_folder import export
from evermoe.session.session import Session

VISIBLE_SECONDS = 5.0
"""Time in which a folder that one host has written must be visible to the others."""


def save_model(
    session: Session,
    model: PreTrainedModel,
    folder: Path,
    add_more: Callable[[Path], None],
    *,
    is_main: bool,
) -> str:
    """Write the complete model as the main process; collective. Files of an earlier model in the folder are replaced.

    Of peft's model its adapters are written, as peft does.

    Args:
        session: trains the model.
        model: an elastic model of transformers.
        folder: may have other files, which it keeps.
        add_more: writes other files into a folder, on the main process.
        is_main: whether this member writes.

    Returns:
        Why the main process could not move the model's files to the folder; empty if it could.

    Raises:
        PersistFailed: the main process could not write; the same on all members.
        PeerLost: a member is gone.
        UnsupportedState: a model of peft has experts that are trained themselves.
    """
    state = state_outside_experts(model) if is_adapted(model) else None
    has_files = is_main and folder.is_dir() and any(folder.iterdir())
    draft = folder / "model.writing" if has_files else folder
    if has_files:
        shutil.rmtree(draft, ignore_errors=True)
    if state is None:
        export(session, model, draft, add_more=add_more)
    elif is_main:  # it has all adapters; the others wait for the outcome
        try:
            _write_adapters(model, state, draft, add_more)
        except (OSError, SafetensorError) as error:
            return f"the adapters were not written: {error}"
    if not has_files:
        return ""
    try:
        _move(draft, folder)
    except OSError as error:
        return f"the model was written to {draft}, but not moved to {folder}: {error}"
    return ""


def _write_adapters(
    model: PreTrainedModel, state: dict[str, Tensor], folder: Path, add_more: Callable[[Path], None]
) -> None:
    def add_adapters(draft: Path) -> None:
        model.save_pretrained(str(draft), state_dict=state)
        add_more(draft)

    with WeightFolder(folder) as draft:
        draft.publish(add_adapters)


def _move(draft: Path, folder: Path) -> None:
    """Move a model's files into a folder, in place of those of an earlier model."""
    for place in [entry for entry in draft.iterdir() if entry.is_dir()]:  # of another adapter than the first
        shutil.rmtree(folder / place.name, ignore_errors=True)
    new = {entry.name for entry in draft.iterdir()}
    for old in [folder / INDEX, *folder.glob("model*.safetensors")]:
        if old.name not in new:
            old.unlink(missing_ok=True)
    for name in sorted(new):
        if (folder / name).is_dir():  # of chat templates
            shutil.rmtree(folder / name)
        os.replace(draft / name, folder / name)
    draft.rmdir()


def is_folder(folder: str) -> bool:
    """Return whether a folder exists, which a network file system may show a little after it was written."""
    until = time.monotonic() + VISIBLE_SECONDS
    while not os.path.isdir(folder):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def not_shared(folder: str, hosts: list[str]) -> str:
    """Return the message about a folder that some hosts do not see."""
    return (
        f"load_best_model_at_end: all workers read the best model, but {', '.join(hosts)} did not find {folder}, which "
        "the main process has written. Give all workers an output_dir on a file system that they share, or leave out "
        "load_best_model_at_end and load trainer.state.best_model_checkpoint by from_pretrained"
    )


def add_settings(trainer: Trainer, folder: Path) -> None:
    """Write the files that transformers' Trainer adds to a model's folder: processing class and training arguments."""
    processing: Any = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if processing is not None:
        processing.save_pretrained(folder)
    torch.save(trainer.args, folder / TRAINING_ARGS_NAME)


def add_state(trainer: Trainer, folder: Path) -> None:
    """Write the Trainer's state, as transformers does in a checkpoint."""
    state: Any = trainer.state
    exportable = [each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)]
    state.stateful_callbacks = {type(each).__name__: each.state() for each in [*exportable, trainer.control]}
    state.save_to_json(str(folder / TRAINER_STATE_NAME))
