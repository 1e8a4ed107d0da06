"""Fine-tunes a transformers model by `ElasticTrainer`, as `evermoe run` starts it; two workers die on the way.

    python hub_trainer.py FOLDER PARTS COPIES

Epochs are evaluated, the best model is kept, training stops early, TensorBoard records, texts of unequal lengths are
padded, and each step is computed in PARTS. The main process alone decides on one more evaluation. Worker 2 dies in
training, if there is one, and a spare takes its place. The main process dies in the evaluation after the second epoch.
The memory of a worker that dies is lost, as if it were a node. Each process that is left writes what it has found to
FOLDER.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DataCollatorForSeq2Seq, EarlyStoppingCallback, PreTrainedTokenizerFast, TrainerCallback

import evermoe
from evermoe.integrations.transformers import make_elastic
from evermoe.integrations.transformers.trainer import ElasticTrainer, ElasticTrainingArguments
from support.hub import VOCABULARY, build

SAMPLES, BATCH = 48, 12
STEPS = 12
"""Three of ten epochs: then patience ends."""
DEATH_IN_TRAINING = 6
OPTIONS: dict[str, Any] = {
    "num_train_epochs": 10,
    "learning_rate": 2e-3,
    "report_to": ["tensorboard"],
    "logging_steps": 1,
    "use_cpu": True,
    "disable_tqdm": True,
    "max_grad_norm": 0.1,
    "warmup_steps": 2,
    "eval_strategy": "epoch",
    "save_strategy": "best",
    "metric_for_best_model": "loss",
    "per_device_eval_batch_size": 4,
}


def texts(count: int, seed: int = 1) -> list[dict[str, list[int]]]:
    """Samples of unequal lengths."""
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 10, (count,), generator=draws).tolist()
    rows = [torch.randint(3, VOCABULARY, (length,), generator=draws).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def tokenizer() -> Any:
    """One whose only use is that it pads and is saved; nothing is downloaded."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"[PAD]": 0} | {f"w{number}": number for number in range(1, VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "[PAD]")), pad_token="[PAD]")


class Curious(TrainerCallback):
    """Evaluates after step 3, too, where a function says so."""

    def __init__(self, decides: Callable[[], bool]) -> None:
        self.decides = decides

    def on_step_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        control.should_evaluate = control.should_evaluate or (state.global_step == 3 and self.decides())


def common(decides: Callable[[], bool] = lambda: True) -> dict[str, Any]:
    """Arguments of a Trainer besides its model and its arguments, transformers' own as well."""
    padding = tokenizer()
    return {
        "train_dataset": texts(SAMPLES),
        "eval_dataset": texts(10, seed=2),
        "data_collator": DataCollatorForSeq2Seq(padding),
        "processing_class": padding,
        "callbacks": [EarlyStoppingCallback(3, early_stopping_threshold=10.0), Curious(decides)],
        "compute_metrics": lambda found: {"mean": float(found.predictions[found.predictions > -100].mean())},
    }


class Deaths(TrainerCallback):
    """Kills this process in the forward of a step, or of an evaluation: each of them once in the job."""

    def __init__(self, model: torch.nn.Module, folder: Path, worker: int) -> None:
        self._folder, self._worker, self._step = folder, worker, 0
        self.trainer: ElasticTrainer | None = None
        model.register_forward_pre_hook(self._die)

    def on_step_begin(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        self._step = state.global_step + 1

    def _die(self, model: torch.nn.Module, _: object) -> None:
        assert self.trainer is not None
        is_main = self.trainer.is_world_process_zero()
        if model.training and self._worker == 2 and self._step == DEATH_IN_TRAINING:
            self._kill("in training")
        if not model.training and is_main and self.trainer.state.epoch == 2:
            self._kill("in an evaluation")

    def _kill(self, where: str) -> None:
        mark = self._folder / where
        if not mark.exists():
            mark.touch()
            assert self.trainer is not None and self.trainer.session is not None
            shutil.rmtree(self.trainer.session._store.directory)  # its node is lost, too
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, parts: int, copies: int) -> None:
    torch.set_num_threads(1)
    worker = int(os.environ["LOCAL_RANK"])
    model = make_elastic(build("qwen3"))
    deaths = Deaths(model, folder, worker)
    options = common(lambda: deaths.trainer is not None and deaths.trainer.is_world_process_zero())
    options["callbacks"].append(deaths)
    trainer = deaths.trainer = ElasticTrainer(
        model,
        ElasticTrainingArguments(str(folder / "out"), gradient_accumulation_steps=parts, **OPTIONS),
        sampler=evermoe.ElasticSampler(SAMPLES, BATCH, shuffle=False),
        session={
            "replication": copies,
            "membership": evermoe.Membership(node=f"n{worker}", join_interval=1, hang_timeout=20.0, rejoin_timeout=2.0),
            "checkpoints": evermoe.Checkpoints(folder / "checkpoints", interval=3),
        },
        **options,
    )
    trainer.train()
    assert trainer.session is not None
    tested = trainer.predict(texts(7, seed=3))
    trainer.save_model(str(folder / "final"))
    found = {
        "step": trainer.state.global_step,
        "recovered": [report.members for report in trainer.session.reports],
        "lost": [report.steps_lost for report in trainer.session.reports],
        "history": trainer.state.log_history,
        "best": [trainer.state.best_metric, trainer.state.best_model_checkpoint],
        "tested": tested.metrics["test_loss"],
    }
    (folder / f"{worker}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
