"""transformers' Trainer in a session: the losses of a plain Trainer, each step counted once, through a kill."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import evermoe
from support.hub import build
from support.worker import SAMPLES

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from evermoe.integrations.transformers import make_elastic  # noqa: E402
from evermoe.integrations.transformers.trainer import ElasticTrainer, ElasticTrainingArguments  # noqa: E402
from support import hub_trainer  # noqa: E402

TESTS = Path(hub_trainer.__file__).parents[1]


class Plain(transformers.Trainer):
    """transformers' own, which keeps the losses of its steps."""

    def training_step(self, *arguments, **options):
        loss = super().training_step(*arguments, **options)
        step = self.state.global_step + 1
        self.losses = getattr(self, "losses", {})
        self.losses[step] = self.losses.get(step, 0.0) + loss.item()
        return loss


def plain(folder, accumulation=1, model=None, **options):
    """transformers' own, in one process, over the same samples in the same order."""
    model = build("qwen3") if model is None else model
    model.set_experts_implementation("eager")
    args = transformers.TrainingArguments(
        str(folder / "plain"),
        per_device_train_batch_size=hub_trainer.BATCH // accumulation,
        gradient_accumulation_steps=accumulation,
        train_sampling_strategy="sequential",
        **hub_trainer.OPTIONS | options,
    )
    args.save_strategy = "no"
    data = hub_trainer.Data()
    trainer = Plain(model, args, train_dataset=data, eval_dataset=[data[i] for i in range(10)])
    trainer.train()
    return trainer


def of(history, name):
    return {entry["step"]: entry[name] for entry in history if name in entry}


@pytest.mark.parametrize("accumulation", [1, 6])  # 6: more parts than some members have samples
@pytest.mark.long
def test_a_trainer_goes_on_after_a_kill_and_counts_each_step_once(tmp_path, accumulation):
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "evermoe", "run", "--workers", "3", "--memory-dir", str(memory)]
    command += [hub_trainer.__file__, str(tmp_path), str(accumulation)]
    done = subprocess.run(command, env=environment, timeout=110, capture_output=True, text=True, check=False)
    found = {int(path.stem): json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert found.keys() == {0, 1}, done.stdout + done.stderr
    losses = []
    for each in found.values():
        assert (each["steps"], each["session"]) == (hub_trainer.STEPS, hub_trainer.STEPS)
        assert each["recovered"] == [3, 2]  # the start, and the death
        losses.append({int(step): loss for step, loss in each["losses"].items()})
    trainer = plain(tmp_path, accumulation)
    assert losses == [pytest.approx(trainer.losses, abs=1e-5)] * 2
    expected = trainer.state.log_history
    for name in ("loss", "eval_loss", "learning_rate"):
        for each in found.values():
            assert of(each["history"], name) == pytest.approx(of(expected, name), abs=2e-4), name
    assert list(of(expected, "loss")) == list(range(1, hub_trainer.STEPS + 1))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_routers_loss_is_added_once_for_each_part_as_transformers_does(tmp_path, accumulation):
    models = [build("qwen3", output_router_logits=True, router_aux_loss_coef=0.1) for _ in range(2)]
    options = {"eval_strategy": "no", "max_steps": 4}
    expected = plain(tmp_path, accumulation, models[0], **options)
    model = make_elastic(models[1])
    args = ElasticTrainingArguments(
        str(tmp_path / "out"), gradient_accumulation_steps=accumulation, **hub_trainer.OPTIONS | options
    )
    sampler = evermoe.ElasticSampler(SAMPLES, hub_trainer.BATCH, shuffle=False)
    exact = hub_trainer.Exact()
    exact.trainer = trainer = ElasticTrainer(
        model, args, sampler=sampler, train_dataset=hub_trainer.Data(), callbacks=[exact]
    )
    trainer.train()
    assert args.gradient_accumulation_steps == accumulation  # the script's own are as they were
    assert (trainer.state.global_step, trainer.session.step) == (4, 4)
    assert exact.losses == pytest.approx(expected.losses, abs=1e-5)
    found, wanted = (dict(each.named_parameters()) for each in (model, models[0]))
    shared = found.keys() & wanted.keys()
    assert len(shared) > 10
    for name in shared:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp16": True}, "expected fp16=False in args, got True"),
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
