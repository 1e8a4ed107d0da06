"""transformers' `Trainer` with an `evermoe.Session`: the session decides when a step is taken, and it counts once."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from evermoe.sampler import ElasticSampler
from evermoe.train.session import Session
from evermoe.train.step import MicroBatch, Step

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables from which accelerate would make a group of processes of its own, which no death survives."""


@contextmanager
def _as_one_process() -> Iterator[None]:
    hidden = {name: os.environ.pop(name) for name in LAUNCHED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@dataclass
class ElasticTrainingArguments(TrainingArguments):
    """`TrainingArguments` of one member: to transformers each trains by itself, on the GPU of its LOCAL_RANK."""

    save_strategy: str = "no"

    @cached_property
    def _setup_devices(self) -> torch.device:
        inherited: Any = TrainingArguments.__dict__["_setup_devices"]
        with _as_one_process():
            device: torch.device = inherited.__get__(self, type(self))
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
            os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
            self._n_gpu = 1
        return device


class _Follower:
    """An optimizer or scheduler as the trainer sees it: the session steps the real one."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def step(self, *_: Any, **__: Any) -> None:
        """Nothing: the session has done it, once all members had voted."""


class _Schedule(_Follower):
    """A scheduler, with the rates of the step that is under way: when the trainer logs them, the session is ahead."""

    def note(self) -> None:
        self._rates = self._real.get_last_lr()

    def get_last_lr(self) -> list[float]:
        return list(self._rates)


class _Batches:
    """The batches of this member, one for each step of the session: to the trainer, each step is one batch."""

    def __init__(self, trainer: ElasticTrainer, loader: Any) -> None:
        self._trainer, self.dataset, self._collate = trainer, loader.dataset, loader.collate_fn
        self._samples: dict[int, Any] = {}

    def __len__(self) -> int:
        return max(1, len(self.dataset) // self._trainer.sampler.batch_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._trainer.next_step():
            yield self.of_step()

    def of_step(self) -> dict[str, Any]:
        """The batch of the step that is under way."""
        self._samples = {i: self.dataset[i] for i in self._trainer.current.indices.tolist()}
        batch: dict[str, Any] = self._collate(list(self._samples.values()))
        return batch

    def parts(self, step: Step, batch: dict[str, Any], n: int) -> list[tuple[Step | MicroBatch, dict[str, Any]]]:
        """The step's batch in n parts, each collated by itself, from the same samples."""
        if n == 1:
            return [(step, batch)]
        parts = list(step.micro_batches(n))
        return [(part, self._collate([self._samples[i] for i in part.indices.tolist()])) for part in parts]


class ElasticTrainer(Trainer):
    """A `Trainer` whose steps survive the death of other members, and are counted once.

        args = ElasticTrainingArguments("out", max_steps=1000, learning_rate=1e-5)
        trainer = ElasticTrainer(model, args, train_dataset=data, sampler=evermoe.ElasticSampler(len(data), 64),
                                 session={"checkpoint_dir": "out/checkpoints"})
        trainer.train()

    Make the model elastic first, on the device where it trains. The session clips gradients by `max_grad_norm`, steps
    the optimizer and the scheduler, and writes checkpoints; the trainer logs the global loss, evaluates, and calls the
    callbacks. An evaluation that a death cuts short has no metrics. Batches are collated as they are needed, in this
    process.

    With `gradient_accumulation_steps=n` each member computes its share of a step in n parts. A step is still one: it is
    counted, logged and evaluated as such, and there is no `on_substep_end`. As in transformers' own, a loss over tokens
    is divided by those of all parts, and what a model adds to it, a router's loss, is added once for each part.

    Args:
        model: elastic.
        args: as transformers' own; the trainer keeps a copy, whose `gradient_accumulation_steps` is 1.
        sampler: divides the global batches, all parts together; `per_device_train_batch_size` says nothing.
        session: options of `evermoe.Session`.
        options: of `Trainer`.

    Raises:
        ValueError: an argument asks for what the session does, or cannot do; the message says which.
    """

    optimizer: Any

    def __init__(
        self,
        model: nn.Module,
        args: ElasticTrainingArguments,
        *,
        sampler: ElasticSampler,
        session: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(args, ElasticTrainingArguments):
            raise ValueError(f"ElasticTrainer: expected args of ElasticTrainingArguments, got {type(args).__name__}")
        expected = {"save_strategy": "no", "fp16": False, "fsdp": None}
        for name, value in expected.items():
            found = getattr(args, name)
            if found not in (value, [], "", None) if value is None else found != value:
                raise ValueError(f"ElasticTrainer: expected {name}={value!r} in args, got {found!r}")
        self.sampler, self._options = sampler, session or {}
        args, self._parts = copy.copy(args), args.gradient_accumulation_steps
        args.gradient_accumulation_steps = 1  # the trainer's loop would count each part
        self.session: Session | None = None
        self._steps: Iterator[Step] = iter(())
        with _as_one_process():
            super().__init__(model, args, **options)

    def get_train_dataloader(self) -> Any:
        """The batches of this member."""
        self._batches = _Batches(self, super().get_train_dataloader())
        return self._batches

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The scheduler; with it all is there that a session needs."""
        real: Any = getattr(self.optimizer, "optimizer", self.optimizer) if optimizer is None else optimizer
        scheduler = super().create_scheduler(num_training_steps, real)
        norm = self.args.max_grad_norm if self.args.max_grad_norm and self.args.max_grad_norm > 0 else None
        options: dict[str, Any] = {"max_grad_norm": norm} | self._options
        self.args.max_grad_norm = 0.0
        model: Any = self.model
        self.session = Session(model, real, self.sampler, scheduler=scheduler, **options)
        self._steps = self.session.steps(num_training_steps)
        followers: Any = _Follower(real), _Schedule(scheduler)
        self.optimizer, self.lr_scheduler = followers
        return followers[1]

    def next_step(self) -> bool:
        """Goes to the session's next step; whether there is one."""
        step = next(self._steps, None)
        if step is None:
            self.control.should_training_stop = True
            return False
        self.current = step
        return True

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        """Takes a step of the session, again if a death interrupts it; the mean loss of the global batch."""
        assert self.session is not None
        model.train()
        schedule: Any = self.lr_scheduler
        schedule.note()
        while True:
            with self.current as step:
                self._accumulate(model, self._batches.parts(step, inputs, self._parts))
            if self.current.committed or not self.next_step():
                break
            inputs = self._batches.of_step()
        self.state.global_step = self.session.step - 1  # the trainer adds this one
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.is_world_process_zero()
        return torch.tensor(self.session.loss, device=self.args.device)

    def _accumulate(self, model: nn.Module, parts: list[tuple[Step | MicroBatch, dict[str, Any]]]) -> None:
        """The gradients of all parts of this member's share."""
        # Tokens with a label, if the loss is their sum divided by that number; of all parts, as transformers does.
        items = self._get_num_items_in_batch([inputs for _, inputs in parts], self.args.device)
        divisor = None if items is None else torch.as_tensor(items).clamp(min=1)  # also without any label
        for part, inputs in parts:
            part.begin()
            count = None if divisor is None else self._get_num_items_in_batch([inputs], self.args.device)
            ready = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss: Any = self.compute_loss(model, ready, num_items_in_batch=divisor)
            part.backward(loss if divisor is None else loss * divisor, count=count)

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Trains until the last step, or a callback stops it: then this member leaves, and the others go on.

        Raises:
            ValueError: it is asked to resume from a checkpoint of transformers; the session resumes from its own.
        """
        if any(arguments) or options.get("resume_from_checkpoint"):
            raise ValueError(
                "ElasticTrainer.train: the session resumes from its checkpoint_dir by itself; got arguments"
            )
        found = super().train(**options)
        if self.session is not None and not self.session.has_left:
            if self.state.global_step < self.state.max_steps:
                self.session.leave()
            for step in self._steps:  # the session's end
                self.current = step
        return found

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """transformers' evaluation, of the whole data on each member; empty if a death cuts it short."""
        if self.session is None or self.session.has_left:
            return super().evaluate(*arguments, **options)
        found: dict[str, float] = {}
        with self.session.evaluation():
            found = super().evaluate(*arguments, **options)
        return found

    def is_world_process_zero(self) -> bool:
        """Whether this is the member that reports what it logs; another one does when it dies."""
        return self.session is None or self.session.group.rank == 0
