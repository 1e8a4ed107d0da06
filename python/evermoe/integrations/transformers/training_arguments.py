"""`TrainingArguments` of one member of a session: transformers sees each member as a single process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import torch
from transformers import TrainerCallback, TrainingArguments

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables from which accelerate would make its own process group, which survives no death."""


class TrainerArguments(TypedDict, total=False):
    """Keyword arguments of transformers' `Trainer`, which documents them, in addition to the model and `args`."""

    data_collator: Callable[[list[Any]], dict[str, Any]] | None
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    model_init: Callable[..., Any] | None
    compute_loss_func: Callable[..., Any] | None
    compute_metrics: Callable[[Any], dict[str, Any]] | None
    callbacks: list[TrainerCallback] | None
    optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None]
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None
    preprocess_logits_for_metrics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None


@contextmanager
def as_one_process() -> Iterator[None]:
    """Hide the launcher's variables from accelerate."""
    hidden = {name: os.environ.pop(name) for name in LAUNCHED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@dataclass
class ElasticTrainingArguments(TrainingArguments):
    """`TrainingArguments` of one member, which transformers sees as a single process on the GPU of its LOCAL_RANK.

    `process_index`, `should_log` and `should_save` are those of the member: 0 and True on the main process alone.
    """

    save_strategy: str = "no"

    @property
    def process_index(self) -> int:
        """Rank of this member; the launcher's RANK until the members have met."""
        return int(getattr(self, "_member", os.environ.get("RANK", "0")))

    @property
    def local_process_index(self) -> int:
        """As `process_index`: one process of the job reports."""
        return self.process_index

    def set_member(self, index: int) -> None:
        """Set the index of this member: 0 for the main process."""
        self._member = index

    @cached_property
    def _setup_devices(self) -> torch.device:
        inherited: Any = TrainingArguments.__dict__["_setup_devices"]
        with as_one_process():
            device: torch.device = inherited.__get__(self, type(self))
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
            os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
            self._n_gpu = 1
        return device
