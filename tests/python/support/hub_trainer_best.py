"""Loads the best model at the end of a training by `ElasticTrainer`, as `evermoe run` starts it; one worker dies.

    python hub_trainer_best.py FOLDER WHERE

The first of three evaluations is the best one. Each worker has an `output_dir` of its own. The main process
dies WHERE: "training" in a step after the first evaluation, "loading" between reading the best model and using it, or
"predict" in a forward with the best model. The memory of a worker that dies is lost, as if it were a node. Where it
dies in training, all checkpoints and the last model go to a stand-in of the Hub, too. Each process that is left writes
what it has found to FOLDER.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

import evermoe
from evermoe.integrations.transformers import make_elastic
from evermoe.integrations.transformers.hub_weights import HubWeights
from evermoe.integrations.transformers.trainer import ElasticTrainer, ElasticTrainingArguments
from support.hub import build
from support.hub_trainer import BATCH, OPTIONS, SAMPLES, common, texts

BEST_OPTIONS = OPTIONS | {
    "num_train_epochs": 3,
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
    "report_to": [],
}


class Hub:
    """Stands in for the Hub's client: what is uploaded is noted in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def create_repo(self, name: str, **_: object) -> Any:
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, repo_id: str, folder_path: str, run_as_future: bool, **_: object) -> Any:
        has_model = (Path(folder_path) / "model.safetensors").exists()
        with self._file.open("a") as file:
            file.write(f"{repo_id} {has_model}\n")
        done: Future[None] = Future()
        done.set_result(None)
        return done if run_as_future else None


def die(trainer: ElasticTrainer, folder: Path) -> None:
    mark = folder / "died"
    if trainer.is_world_process_zero() and not mark.exists():
        mark.touch()
        assert trainer.session is not None
        shutil.rmtree(trainer.session._store.directory)
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, where: str) -> None:
    torch.set_num_threads(1)
    worker = int(os.environ["LOCAL_RANK"])
    transformers.trainer.hf_api = lambda: Hub(folder / "hub")
    model = make_elastic(build("qwen3"))
    phase = [""]
    trainer = ElasticTrainer(
        model,
        ElasticTrainingArguments(
            str(folder / f"out{worker}"), push_to_hub=where == "training", hub_model_id="me/model", **BEST_OPTIONS
        ),
        sampler=evermoe.ElasticSampler(SAMPLES, BATCH, shuffle=False),
        session={
            "membership": evermoe.Membership(node=f"n{worker}", hang_timeout=20.0, rejoin_timeout=2.0),
            "checkpoints": str(folder / "checkpoints"),
        },
        **common() | {"callbacks": []},
    )

    def forward(model: torch.nn.Module, _: object) -> None:
        if (where == "training" and model.training and trainer.state.global_step == 6) or phase[0] == where:
            die(trainer, folder)

    model.register_forward_pre_hook(forward)
    fill = HubWeights.fill

    def filled(*arguments: object) -> None:
        fill(*arguments)  # type: ignore[arg-type]
        if where == "loading" and trainer.state.global_step == trainer.state.max_steps:
            die(trainer, folder)

    HubWeights.fill = filled  # type: ignore[method-assign, assignment]
    trainer.train()
    phase[0] = "predict"
    tested = trainer.predict(texts(7, seed=3))
    evaluated = trainer.evaluate()
    trainer.save_model(str(folder / "final"))
    own = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    trainer.end()
    assert trainer.session is not None
    found = {
        "recovered": [report.members for report in trainer.session.reports],
        "best": [trainer.state.best_metric, trainer.state.best_model_checkpoint],
        "tested": tested.metrics["test_loss"],
        "evaluated": evaluated["eval_loss"],
        "same": all(torch.equal(tensor, own[name]) for name, tensor in model.named_parameters()),
    }
    (folder / f"{worker}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
