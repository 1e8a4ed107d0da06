"""Fine-tunes peft's adapters of attention and experts by `ElasticTrainer`, as `evermoe run` starts it.

    python hub_trainer_adapters.py FOLDER

The last worker dies in training, and all have the best adapters at the end. The main process saves them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

import evermoe
from evermoe.integrations.transformers import make_elastic
from evermoe.integrations.transformers.trainer import ElasticTrainer, ElasticTrainingArguments
from support.hub import build
from support.hub_trainer import BATCH, OPTIONS, SAMPLES, common

DIES_IN = 6
MORE: dict[str, Any] = {
    "num_train_epochs": 3,
    "learning_rate": 0.1,
    "report_to": [],
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
    "greater_is_better": True,
}
"""The best adapters are the worst ones, as the last ones should be others."""


def adapted() -> Any:
    model = build("qwen3")
    torch.manual_seed(1)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=experts))


class Death(TrainerCallback):
    """Kills this process in a step, once in the job."""

    def __init__(self, mark: Path, dies: bool) -> None:
        self._mark, self._dies = mark, dies

    def on_step_begin(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        if self._dies and state.global_step == DIES_IN and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    worker = int(os.environ["LOCAL_RANK"])
    options = common()
    options["callbacks"] = [Death(folder / "died", worker == 1)]
    trainer = ElasticTrainer(
        make_elastic(adapted()),
        ElasticTrainingArguments(str(folder / "out"), **OPTIONS | MORE),
        sampler=evermoe.ElasticSampler(SAMPLES, BATCH, shuffle=False),
        session={"membership": evermoe.Membership(node=f"n{worker}", hang_timeout=30.0)},
        **options,
    )
    trainer.train()
    found = {"history": list(trainer.state.log_history), "best": trainer.state.best_model_checkpoint}
    found["loss"] = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "final"))
    trainer.save_model(str(folder / "final"))  # in place of the first
    (folder / f"{worker}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
