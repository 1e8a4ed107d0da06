"""transformers' `Trainer` with an `evermoe.Session`: its steps survive the death of members and count once."""

from __future__ import annotations

import atexit
import copy
import logging
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

from torch import nn
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, rotate_checkpoints

from evermoe.data.sampler import ElasticSampler
from evermoe.errors import PersistFailed
from evermoe.integrations.transformers import trainer_folders
from evermoe.integrations.transformers.evaluation_shares import Replay, Result, batches_of, from_texts, on_cpu, to_text
from evermoe.integrations.transformers.trainer_loop import TrainerLoop
from evermoe.integrations.transformers.trainer_progress import TrainerProgress
from evermoe.integrations.transformers.training_arguments import (
    ElasticTrainingArguments,
    TrainerArguments,
    as_one_process,
)
from evermoe.moe.experts import expert_layers
from evermoe.session.evaluation_data import check_order
from evermoe.session.session_config import SessionArguments

logger = logging.getLogger(__name__)

__all__ = ["ElasticTrainer", "ElasticTrainingArguments"]

EXPECTED: dict[str, tuple[Any, str]] = {
    "fp16": (False, "use bf16, or a session of your own with Session(scaler=...)"),
    "fsdp": (None, "the session spreads the experts itself"),
    "deepspeed": (None, "the session spreads the experts itself"),
    "fp16_full_eval": (False, "it would change the weights that the session trains"),
    "bf16_full_eval": (False, "it would change the weights that the session trains"),
    "auto_find_batch_size": (False, "all members have the sampler's batch size"),
    "save_on_each_node": (False, "one process writes, for all members"),
    "include_num_input_tokens_seen": ("no", "each member would count the tokens of its own share"),
}
"""Arguments that have no meaning in a session: the value to have, and why. None: the value must be unset or empty."""
BY_METRIC = ("reduce_lr_on_plateau", "greedy")
"""Schedulers that follow an evaluation's metric."""
BY_LENGTH = ("group_by_length", "batch_rebalance")
"""Values of train_sampling_strategy that order samples by their length, those of an evaluation at random as well."""


class ElasticTrainer(TrainerLoop):
    """A `Trainer` whose steps survive the death of other members, and are counted once.

        args = ElasticTrainingArguments("out", num_train_epochs=3, learning_rate=1e-5, eval_strategy="epoch")
        trainer = ElasticTrainer(model, args, train_dataset=data, eval_dataset=others,
                                 sampler=evermoe.ElasticSampler(len(data), 64),
                                 session={"checkpoints": "out/checkpoints"})
        trainer.train()
        trainer.save_model("out/model")
        trainer.end()

    Make the model elastic first, on the device where it trains. The session clips gradients by `max_grad_norm`, steps
    the optimizer and the scheduler, and writes checkpoints to resume from. The Trainer logs the global loss, evaluates,
    saves complete models and calls the callbacks, after the same steps on all members. Batches are collated as they are
    needed, in this process.

    With `gradient_accumulation_steps=n` each member computes its share of a step in n parts. It still counts as one
    step for logs and evaluations, and there is no `on_substep_end`. As in transformers, a loss over tokens is divided
    by the tokens of all parts, and a router's loss is added once for each part.

    `evaluate`, `predict` and `save_model` are for all members, also after `train`: the members stay connected until
    `end`, or the end of the script. Evaluations are divided among the members, and repeated after a death.

    Args:
        model: elastic.
        args: as transformers' own; the trainer keeps a copy, whose `gradient_accumulation_steps` is 1.
        sampler: divides the global batches, all parts together; `per_device_train_batch_size` is ignored.
        session: keyword arguments of `evermoe.Session`.
        trainer: keyword arguments of transformers' `Trainer`.

    Raises:
        ValueError: an argument asks for something that the session does itself or cannot do; the message names it.
    """

    preprocess_logits_for_metrics: Any

    def __init__(
        self,
        model: nn.Module,
        args: ElasticTrainingArguments,
        *,
        sampler: ElasticSampler,
        session: SessionArguments | None = None,
        **trainer: Unpack[TrainerArguments],
    ) -> None:
        _check_arguments(args)
        self.sampler, self._arguments = sampler, session or SessionArguments()
        args, self._parts = copy.copy(args), args.gradient_accumulation_steps
        args.gradient_accumulation_steps = 1  # the trainer's loop would count each part
        self.progress = TrainerProgress(self)
        with as_one_process():
            super().__init__(model, args, **trainer)

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train to the last step, or until a callback stops all members. They stay connected, until `end`.

        Raises:
            ValueError: it is asked to resume from a checkpoint of transformers; the session resumes from its own.
            RuntimeError: it was called before.
            SystemExit: the job is over, and this process came too late or was a replica node.
        """
        if any(arguments) or options.get("resume_from_checkpoint"):
            raise ValueError("ElasticTrainer.train: the session resumes from its checkpoints by itself; got arguments")
        if self.session is not None:
            raise RuntimeError("ElasticTrainer.train was called before: make a new ElasticTrainer to train on")
        try:
            found = super().train(**options)
        except BaseException:
            self._give_up()
            raise
        atexit.register(self._end_at_exit)
        return found

    def end(self) -> None:
        """End the job: write the last checkpoint and close the connections. All members call it.

        Call it at the end of the script. Otherwise it runs when the process exits. Members wait here for each
        other, without a limit; if one is lost meanwhile, the others end the job. Afterwards the model has only this
        member's experts, if there were several members.
        """
        atexit.unregister(self._end_at_exit)
        self._end_at_once()
        if self._best is not None and self.session is not None:
            self._use_best(self.session)

    def _end_at_once(self) -> None:
        self._end_together()
        super().end()

    def _end_at_exit(self) -> None:
        if hasattr(sys, "last_value"):  # an error has ended the script
            self._give_up()
        else:
            self._end_at_once()

    def _give_up(self) -> None:
        """Leave the others, which continue without this member."""
        if self._steps is not None:
            self._steps.close()

    @property
    def _is_connected(self) -> bool:
        return self.session is not None and not self.session.has_left

    def _check_whole(self, name: str) -> None:
        layers = expert_layers(self.model).values()
        if self.session is not None and any(len(layer.ids) < layer.num_experts for layer in layers):
            raise RuntimeError(
                f"ElasticTrainer.{name} was called after the end of the job, when this process has a part of the "
                "experts alone: call it before trainer.end(), on all members. `evermoe export --to hf` makes a model's "
                "folder of a checkpoint"
            )

    # ---- the best model

    def _load_best_model(self) -> None:
        """Load the best model on all members, each for its own experts."""
        folder = self.state.best_model_checkpoint
        assert folder is not None
        if not self._check_all_see(folder):
            logger.warning("the best model is not loaded, as its folder %s is gone", folder)
            return
        logger.info("loading the best model from %s (score: %s)", folder, self.state.best_metric)
        self._best = folder
        self._together(lambda *_: None)

    def _check_all_see(self, folder: str) -> bool:
        """Return whether a folder exists; the same on all members.

        Raises:
            RuntimeError: some members see it, and others do not; raised on all.
        """
        found = self._together(lambda *_: None if trainer_folders.is_folder(folder) else platform.node())
        hosts = sorted({host for host in found if host is not None})
        if hosts and None in found:
            raise RuntimeError(trainer_folders.not_shared(folder, hosts))
        return not hosts

    # ---- evaluation

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run transformers' loop on batches that are divided among the members; repeat it after a death.

        Raises:
            ValueError: the loader shuffles.
        """
        options = description, prediction_loss_only, ignore_keys, metric_key_prefix
        if not self._is_connected:
            self._check_whole("evaluate")
            return super().evaluation_loop(dataloader, *options)
        check_order(dataloader, "ElasticTrainer")
        has_loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only

        def compute(place: int, places: int) -> str:
            batches = batches_of(dataloader, place, places)
            return to_text({n: self._result_of(batch, size, has_loss_only, ignore_keys) for n, size, batch in batches})

        results = from_texts(self._together(compute))
        name = getattr(self.model, "main_input_name", "input_ids")
        with self._replaying():
            replay = Replay(results, dataloader.dataset, self.args.eval_batch_size, name)
            return super().evaluation_loop(replay, *options)

    def _result_of(self, batch: Any, size: int, has_loss_only: bool, ignored: list[str] | None) -> Result:
        model: Any = self.model
        losses, logits, labels = self.prediction_step(model, batch, has_loss_only, ignore_keys=ignored)
        if logits is not None and self.preprocess_logits_for_metrics is not None:
            logits = self.preprocess_logits_for_metrics(logits, labels)
        has_inputs = "inputs" in self.args.include_for_metrics
        inputs = batch[getattr(model, "main_input_name", "input_ids")] if has_inputs else None
        return Result(size or find_batch_size(batch) or 0, *on_cpu((losses, logits, labels, inputs)))

    @contextmanager
    def _replaying(self) -> Iterator[None]:
        """Make the evaluation loop read results instead of computing them."""
        preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        replayed = lambda model, inputs, *_, **__: inputs["result"][1:4]  # noqa: E731
        self.prediction_step = replayed  # in place of a subclass's own, too
        try:
            yield
        finally:
            self.preprocess_logits_for_metrics = preprocess
            del self.prediction_step

    # ---- folders

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the complete model, which `from_pretrained` loads. All members call it; the main process writes.

        Raises:
            PersistFailed: it could not be written.
            RuntimeError: the job is over, and the experts are on several members.
        """
        if not self._is_connected:
            self._check_whole("save_model")
            super().save_model(output_dir, _internal_call)
            return
        self._write(Path(output_dir or self.args.output_dir or "."), has_state=False)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write(self, folder: Path, *, has_state: bool) -> None:
        def add_more(draft: Path) -> None:
            trainer_folders.add_settings(self, draft)
            if has_state:
                trainer_folders.add_state(self, draft)

        session, model = self.session, self.model
        assert session is not None

        def save(position: int, _: int) -> str:
            return trainer_folders.save_model(session, model, folder, add_more, is_main=position == 0)

        problem = self._together(save)[0]
        if problem:
            raise PersistFailed(problem)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the complete model after this step. The optimizer's state is in the session's own checkpoints."""
        run = Path(self._together(lambda *_: self._get_output_dir(trial))[0])  # the same on all members
        folder = run / f"checkpoint-{self.state.global_step}"
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        self._write(folder, has_state=True)
        if self.args.load_best_model_at_end:
            self._check_all_see(str(folder))
        if self.args.push_to_hub:
            if self.hub_model_id is None:  # this process has become the main one
                self.init_hf_repo()
            self._push_from_checkpoint(str(folder))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=best,
                use_mtime=True,
            )


def _check_arguments(args: Any) -> None:
    if not isinstance(args, ElasticTrainingArguments):
        raise ValueError(f"ElasticTrainer: expected args of ElasticTrainingArguments, got {type(args).__name__}")
    for name, (value, why) in EXPECTED.items():
        found = getattr(args, name)
        if found != value and (value is not None or found not in ([], "", None)):
            raise ValueError(f"ElasticTrainer: expected {name}={value!r} in args, got {found!r}: {why}")
    if args.lr_scheduler_type in BY_METRIC:
        raise ValueError(
            f"ElasticTrainer: expected an lr_scheduler_type other than {args.lr_scheduler_type.value!r}: the session "
            "steps the scheduler after each step, not after an evaluation"
        )
    if args.train_sampling_strategy in BY_LENGTH:
        raise ValueError(
            "ElasticTrainer: expected a train_sampling_strategy other than "
            f"{args.train_sampling_strategy!r}: the sampler orders the samples"
        )
