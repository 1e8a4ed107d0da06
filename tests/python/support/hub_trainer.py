"""Trains a transformers model by `ElasticTrainer`, as `evermoe run` starts it; worker 2 kills itself on the way."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback

import evermoe
from evermoe.integrations.transformers import make_elastic
from evermoe.integrations.transformers.trainer import ElasticTrainer, ElasticTrainingArguments
from support.hub import build
from support.worker import SAMPLES, dataset

STEPS, BATCH = 8, 12
LAST = 6
"""The step in which worker 2 dies: the one before shows that all members have evaluated after step 4."""


class Data(torch.utils.data.Dataset):
    """Samples as transformers' collators take them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = dataset()[index]
        labels = tokens.masked_fill(torch.arange(len(tokens)) < index % 5, -100)  # as many have none on no two workers
        return {"input_ids": tokens, "labels": labels}


class Exact(TrainerCallback):
    """The losses of all steps, which logs round."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.trainer: ElasticTrainer | None = None

    def on_step_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        assert self.trainer is not None and self.trainer.session is not None
        self.losses[state.global_step] = self.trainer.session.loss


class Kill(TrainerCallback):
    """Kills this process in the forward of a step."""

    def __init__(self, model: torch.nn.Module, step: int) -> None:
        self._begun = 0
        self._step = step
        model.register_forward_pre_hook(self._die)

    def on_step_begin(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        self._begun += 1

    def _die(self, *_: object) -> None:
        if self._begun == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


OPTIONS = {
    "max_steps": STEPS,
    "learning_rate": 2e-3,
    "report_to": [],
    "logging_steps": 1,
    "use_cpu": True,
    "disable_tqdm": True,
    "max_grad_norm": 1.0,
    "warmup_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 4,
}


def main(folder: Path, accumulation: int) -> None:
    torch.set_num_threads(1)
    worker = int(os.environ["LOCAL_RANK"])
    model, exact = make_elastic(build("qwen3")), Exact()
    trainer = ElasticTrainer(
        model,
        ElasticTrainingArguments(str(folder / "out"), gradient_accumulation_steps=accumulation, **OPTIONS),
        sampler=evermoe.ElasticSampler(SAMPLES, BATCH, shuffle=False),
        session={"join_every": 1, "hang_limit": 20.0, "rejoin_limit": 2.0},
        train_dataset=Data(),
        eval_dataset=torch.utils.data.Subset(Data(), range(10)),
        callbacks=[exact, *([Kill(model, LAST)] if worker == 2 else [])],
    )
    exact.trainer = trainer
    trainer.train()
    assert trainer.session is not None
    found = {
        "steps": trainer.state.global_step,
        "session": trainer.session.step,
        "recovered": [report.members for report in trainer.session.reports],
        "history": trainer.state.log_history,
        "losses": exact.losses,
    }
    (folder / f"{worker}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
