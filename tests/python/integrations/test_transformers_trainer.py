"""transformers' Trainer in a session: the losses of a plain Trainer, each step counted once, through a kill."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import evermoe
from support.hub import build
from support.worker import SAMPLES

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from evermoe.integrations.transformers.trainer import ElasticTrainer, ElasticTrainingArguments  # noqa: E402
from support import hub_trainer  # noqa: E402

TESTS = Path(hub_trainer.__file__).parents[1]


def plain(folder):
    """transformers' own, in one process, over the same samples in the same order."""
    model = build("qwen3")
    model.set_experts_implementation("eager")
    args = transformers.TrainingArguments(
        str(folder / "plain"),
        per_device_train_batch_size=hub_trainer.BATCH,
        train_sampling_strategy="sequential",
        **hub_trainer.OPTIONS,
    )
    args.save_strategy = "no"
    data = hub_trainer.Data()
    trainer = transformers.Trainer(model, args, train_dataset=data, eval_dataset=[data[i] for i in range(10)])
    trainer.train()
    return trainer.state.log_history


def of(history, name):
    return {entry["step"]: entry[name] for entry in history if name in entry}


def test_a_trainer_goes_on_after_a_kill_and_counts_each_step_once(tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "evermoe", "run", "--workers", "3", "--memory-dir", str(memory)]
    command += [hub_trainer.__file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, timeout=110, capture_output=True, text=True, check=False)
    found = {int(path.stem): json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert found.keys() == {0, 1}, done.stdout + done.stderr
    for each in found.values():
        assert (each["steps"], each["session"]) == (hub_trainer.STEPS, hub_trainer.STEPS)
        assert each["recovered"] == [3, 2]  # the start, and the death
    expected = plain(tmp_path)
    for name in ("loss", "eval_loss", "learning_rate"):
        for each in found.values():
            assert of(each["history"], name) == pytest.approx(of(expected, name), abs=2e-4), name
    assert list(of(expected, "loss")) == list(range(1, hub_trainer.STEPS + 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "expected gradient_accumulation_steps=1 in args, got 2"),
        ({"save_strategy": "steps"}, "expected save_strategy='no'"),
    ],
)
def test_arguments_that_the_session_does_not_follow(tmp_path, options, message):
    args = ElasticTrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **options)
    with pytest.raises(ValueError, match=message):
        ElasticTrainer(build("qwen3"), args, sampler=evermoe.ElasticSampler(SAMPLES, 12), train_dataset=[])
    with pytest.raises(ValueError, match="expected args of ElasticTrainingArguments, got TrainingArguments"):
        own = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        ElasticTrainer(build("qwen3"), own, sampler=evermoe.ElasticSampler(SAMPLES, 12), train_dataset=[])
