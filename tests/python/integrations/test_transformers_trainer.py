"""transformers' Trainer in a session: losses, metrics, folders and runs of a plain Trainer, through deaths."""

import inspect
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import evermoe
from evermoe.moe.experts import expert_layers
from support.hub import build

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
from evermoe.integrations.transformers import make_elastic  # noqa: E402
from evermoe.integrations.transformers.step_batches import Epochs, check_place  # noqa: E402
from evermoe.integrations.transformers.trainer import ElasticTrainer, ElasticTrainingArguments  # noqa: E402
from evermoe.integrations.transformers.training_arguments import TrainerArguments  # noqa: E402
from support import hub_trainer, hub_trainer_best, hub_trainer_end  # noqa: E402
from support.hub_trainer import BATCH, OPTIONS, SAMPLES, STEPS, common, texts  # noqa: E402

TESTS = Path(hub_trainer.__file__).parents[1]
LOGGED = ("loss", "eval_loss", "eval_mean", "learning_rate", "grad_norm", "epoch", "train_loss")


def test_keyword_arguments_are_those_of_trainer():
    keywords = inspect.signature(transformers.Trainer.__init__).parameters.keys() - {"self", "model", "args"}
    assert keywords == TrainerArguments.__annotations__.keys()


class Call(transformers.TrainerCallback):
    """Calls a function at one event."""

    def __init__(self, event, function):
        setattr(self, event, lambda args, state, control, **more: function(state, control))


def plain(folder, parts=1, more=None, model=None, **options):
    """transformers' own Trainer, trained in one process on the same samples in the same order."""
    model = build("qwen3") if model is None else model
    model.set_experts_implementation("eager")
    args = transformers.TrainingArguments(
        str(folder / "plain"),
        per_device_train_batch_size=BATCH // parts,
        gradient_accumulation_steps=parts,
        train_sampling_strategy="sequential",
        **OPTIONS | options,
    )
    trainer = transformers.Trainer(model, args, **common() | (more or {}))
    trainer.train()
    return trainer


def elastic(folder, parts=1, more=None, session=None, model=None, **options):
    """The same in a session, untrained."""
    args = ElasticTrainingArguments(str(folder / "out"), gradient_accumulation_steps=parts, **OPTIONS | options)
    sampler = evermoe.ElasticSampler(SAMPLES, BATCH, shuffle=False)
    model = make_elastic(build("qwen3") if model is None else model)
    return ElasticTrainer(model, args, sampler=sampler, session=session, **common() | (more or {}))


def logged(history):
    """Return what was logged, by name and step, without times of day."""
    return {(name, entry["step"]): entry[name] for entry in history for name in LOGGED if name in entry}


def recorded(folder):
    """Return TensorBoard's values of the only run in a folder, by name and step; a repeated value counts once."""
    (run,) = (folder / "runs").iterdir()
    reader = events.EventAccumulator(str(run), purge_orphaned_data=False)
    reader.Reload()
    names = [name for name in reader.Tags()["scalars"] if name.rpartition("/")[2] in ("loss", "grad_norm", "mean")]
    found = {}
    for name in names:
        for event in reader.Scalars(name):
            assert found.setdefault((name, event.step), event.value) == pytest.approx(event.value, abs=1e-5)
    return found


def assert_same_weights(folder, model, atol=1e-4):
    found = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=atol, rtol=0)


def run(*arguments):
    """Runs a job by `evermoe run`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "evermoe", "run", *arguments]
    return subprocess.run(command, env=environment, timeout=170, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("workers", "spares", "parts", "copies"),
    [
        (2, 0, 2, 2),
        pytest.param(3, 1, 6, 2, marks=pytest.mark.long),  # more parts than a member has samples
        pytest.param(2, 0, 1, 1, marks=pytest.mark.long),  # without copies, so that the evaluated step is undone
    ],
)
def test_fine_tuning_through_deaths_is_that_of_a_plain_trainer(tmp_path, workers, spares, parts, copies):
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    options = ["--workers", str(workers), "--spare", str(spares), "--memory-dir", str(memory)]
    done = run(*options, hub_trainer.__file__, str(tmp_path), str(parts), str(copies))
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(found) == workers - 1, done.stdout + done.stderr
    assert (tmp_path / "in an evaluation").exists() and (tmp_path / "in training").exists() == (workers > 2)
    expected = plain(tmp_path, parts)
    for each in found:
        assert each["step"] == STEPS == expected.state.global_step
        assert each["recovered"][-1] == workers - 1
        assert (each["lost"][-1] > 0) == (copies == 1)
        assert logged(each["history"]) == pytest.approx(logged(expected.state.log_history), abs=1e-5)
        metric, folder = each["best"]
        assert metric == pytest.approx(expected.state.best_metric, abs=1e-5)
        assert Path(folder).name == Path(expected.state.best_model_checkpoint).name
    assert recorded(tmp_path / "out") == pytest.approx(recorded(tmp_path / "plain"), abs=1e-5)
    tested = expected.predict(texts(7, seed=3)).metrics["test_loss"]
    assert [each["tested"] for each in found] == [pytest.approx(tested, abs=1e-5)] * (workers - 1)
    assert_same_weights(tmp_path / "final", expected.model)
    assert {path.name for path in (tmp_path / "final").iterdir()} >= {"tokenizer.json", "training_args.bin"}
    assert_same_weights(folder, transformers.AutoModelForCausalLM.from_pretrained(expected.state.best_model_checkpoint))
    assert not list(memory.iterdir())  # the workers that are left have ended the job, though no script did


@pytest.mark.parametrize(
    ("where", "spares"),
    [
        pytest.param("training", 0, marks=pytest.mark.long),
        pytest.param("loading", 0, marks=pytest.mark.long),
        ("predict", 0),
        pytest.param("predict", 1, marks=pytest.mark.long),  # the spare serves experts of the best model
    ],
)
def test_the_best_model_is_loaded_on_all_members_through_a_death(tmp_path, where, spares):
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    options = ["--workers", "2", "--spare", str(spares), "--memory-dir", str(memory)]
    done = run(*options, hub_trainer_best.__file__, str(tmp_path), where)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert found, done.stdout + done.stderr
    assert (tmp_path / "died").exists()
    assert "differ" not in done.stdout + done.stderr
    options = hub_trainer_best.BEST_OPTIONS | {"load_best_model_at_end": False}  # its own leaves the experts out
    expected = plain(tmp_path, more={"callbacks": []}, **options)
    best = transformers.AutoModelForCausalLM.from_pretrained(expected.state.best_model_checkpoint)
    expected.model.load_state_dict(best.state_dict())
    tested = expected.predict(texts(7, seed=3)).metrics["test_loss"]
    evaluated = expected.evaluate()["eval_loss"]
    assert evaluated == pytest.approx(expected.state.best_metric, abs=1e-6)
    for each in found:
        metric, folder = each["best"]
        assert (Path(folder).name, each["same"]) == ("checkpoint-4", True)
        assert metric == pytest.approx(evaluated, abs=1e-5)
        assert each["evaluated"] == pytest.approx(metric, abs=1e-6)
        assert each["tested"] == pytest.approx(tested, abs=1e-5)
    assert_same_weights(tmp_path / "final", expected.model, atol=1e-5)
    if where == "training":  # three checkpoints and the last model, by two processes
        assert (tmp_path / "hub").read_text().splitlines() == ["me/model True"] * 4
    assert not list(memory.iterdir())


@pytest.mark.long
def test_a_death_in_end_leaves_it_to_the_others_to_end_the_job(tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    options = ["--workers", "2", "--memory-dir", str(memory)]
    done = run(*options, hub_trainer_end.__file__, str(tmp_path))
    assert (tmp_path / "ended.json").exists(), done.stdout + done.stderr
    found = json.loads((tmp_path / "ended.json").read_text())
    assert (found["members"][0], found["members"][-1], found["step"]) == (2, 1, hub_trainer_end.STEPS)
    assert list((tmp_path / "checkpoints").glob("step-*")), sorted(tmp_path.rglob("checkpoints/*"))
    assert not list(memory.iterdir())


@pytest.mark.full
def test_after_training_a_trainer_evaluates_predicts_and_saves_as_transformers_does(tmp_path):
    more = {"callbacks": []}
    expected = plain(tmp_path, more=more, num_train_epochs=1.5, save_strategy="no", logging_steps=4)
    trainer = elastic(tmp_path, more=more, num_train_epochs=1.5, save_strategy="epoch", logging_steps=4)
    trainer.train()
    assert logged(trainer.state.log_history) == pytest.approx(logged(expected.state.log_history), abs=1e-5)
    for function, data in ((trainer.evaluate, None), (trainer.predict, texts(7, seed=3))):
        wanted = getattr(expected, function.__name__)(data)
        found = function(data)
        if data is not None:
            assert found.predictions.shape == wanted.predictions.shape
            assert found.predictions == pytest.approx(wanted.predictions, abs=1e-4)
            assert (found.label_ids == wanted.label_ids).all()
            found, wanted = found.metrics, wanted.metrics
        for name in wanted.keys() - {each for each in wanted if "runtime" in each or "per_second" in each}:
            assert found[name] == pytest.approx(wanted[name], abs=1e-5), name
    shuffled = torch.utils.data.DataLoader(trainer.eval_dataset, 4, shuffle=True, collate_fn=common()["data_collator"])
    with pytest.raises(ValueError, match="shuffle=False, got one with a RandomSampler"):
        trainer.evaluation_loop(shuffled, "shuffled")
    trainer.save_model()  # a folder that has others in it
    trainer.save_model()
    assert_same_weights(tmp_path / "out", expected.model)
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    with pytest.raises(RuntimeError, match="train was called before"):
        trainer.train()
    trainer.end()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], abs=1e-5)


def test_adapters_are_trained_chosen_and_saved_as_transformers_does_through_a_death(tmp_path):
    peft = pytest.importorskip("peft")
    from safetensors.torch import load_file

    from support import hub_trainer_adapters

    more = {"callbacks": []}
    expected = plain(tmp_path, more=more, model=hub_trainer_adapters.adapted(), **hub_trainer_adapters.MORE)
    expected.save_model(str(tmp_path / "expected"))
    done = run("--workers", "2", hub_trainer_adapters.__file__, str(tmp_path))
    assert (tmp_path / "0.json").exists(), done.stdout + done.stderr
    found = json.loads((tmp_path / "0.json").read_text())
    assert logged(found["history"]) == pytest.approx(logged(expected.state.log_history), abs=1e-4)
    best = Path(expected.state.best_model_checkpoint).name
    assert Path(found["best"]).name == best != f"checkpoint-{expected.state.global_step}"
    assert found["loss"] == pytest.approx(expected.evaluate()["eval_loss"], abs=1e-4)
    for folder, other in (("final", "expected"), (f"out/{best}", f"plain/{best}")):
        ours, theirs = ({path.name for path in (tmp_path / each).iterdir()} for each in (folder, other))
        assert theirs - ours <= {"optimizer.pt", "scheduler.pt", "rng_state.pth"} and not ours - theirs
        tensors = [load_file(tmp_path / each / "adapter_model.safetensors") for each in (folder, other)]
        torch.testing.assert_close(*tensors, atol=1e-4, rtol=0)
    peft.PeftModel.from_pretrained(build("qwen3"), tmp_path / "final")


@pytest.mark.parametrize("event", ["on_step_end", "on_log", "on_step_begin"])
@pytest.mark.full
def test_a_callback_that_stops_ends_the_job_where_transformers_does(tmp_path, event):
    steps = []
    for make in (lambda more: plain(tmp_path, more=more), lambda more: elastic(tmp_path, more=more)):

        def stop(state, control):
            control.should_training_stop = control.should_training_stop or state.global_step == 3

        trainer = make({"callbacks": [Call(event, stop)]})
        if isinstance(trainer, ElasticTrainer):
            trainer.train()
            assert trainer.session.step == trainer.state.global_step
            trainer.end()
        steps.append((trainer.state.global_step, logged(trainer.state.log_history)))
    assert steps[0][0] == steps[1][0] <= 4
    assert steps[1][1] == pytest.approx(steps[0][1], abs=1e-5)


class Crash(Exception):
    pass


@pytest.mark.parametrize(("event", "step"), [("on_step_begin", 9), ("on_evaluate", 8)])
@pytest.mark.full
def test_a_job_that_is_started_again_keeps_its_patience_best_metric_and_run(tmp_path, event, step):
    expected = plain(tmp_path)

    def crash(state, control):
        if state.global_step == step - (event == "on_step_begin"):
            raise Crash

    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    session = {
        "preset": evermoe.presets.Auto(snapshot_interval=1),
        "membership": evermoe.Membership(job="patience", memory_dir=str(memory)),
    }
    first = elastic(tmp_path, session=session, more={"callbacks": [*common()["callbacks"], Call(event, crash)]})
    with pytest.raises(Crash):
        first.train()
    again = elastic(tmp_path, session=session)
    again.train()
    assert [each.step for each in again.session.reports] == [8]
    assert again.state.global_step == STEPS
    assert again.state.best_metric == pytest.approx(expected.state.best_metric, abs=1e-5)
    assert Path(again.state.best_model_checkpoint).name == Path(expected.state.best_model_checkpoint).name
    assert recorded(tmp_path / "out") == pytest.approx(recorded(tmp_path / "plain"), abs=1e-5)
    again.end()


@pytest.mark.full
def test_a_collator_draws_the_same_numbers_in_a_step_that_is_repeated(tmp_path):
    drawn = [[], []]
    for found, seed in zip(drawn, (1, 2), strict=True):
        padded = common()["data_collator"]

        def collate(samples, found=found, padded=padded):
            found.append(torch.rand(()).item())
            return padded(samples)

        trainer = elastic(
            tmp_path,
            more={"data_collator": collate, "callbacks": []},
            max_steps=3,
            eval_strategy="no",
            save_strategy="no",
            seed=seed,
        )
        torch.manual_seed(seed)
        trainer.train()
        trainer.end()
    assert len(set(drawn[0])) == 3
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.full
def test_a_routers_loss_is_added_once_for_each_part_as_transformers_does(tmp_path, parts):
    models = [build("qwen3", output_router_logits=True, router_aux_loss_coef=0.1) for _ in range(2)]
    options = {"eval_strategy": "no", "save_strategy": "no", "max_steps": 4, "metric_for_best_model": None}
    more = {"callbacks": []}
    expected = plain(tmp_path, parts, more=more, model=models[0], **options)
    trainer = elastic(tmp_path, parts, more=more, model=models[1], **options)
    trainer.train()
    assert logged(trainer.state.log_history) == pytest.approx(logged(expected.state.log_history), abs=1e-5)
    trainer.save_model(str(tmp_path / "final"))
    assert_same_weights(tmp_path / "final", expected.model)
    trainer.end()


def test_several_optimizers_are_refused_by_name(tmp_path):
    model = build("qwen3")
    make_elastic(model)
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()][:2]
    options = {"eval_strategy": "no", "save_strategy": "no", "max_steps": 1, "metric_for_best_model": None}
    more = {"callbacks": [], "optimizers": (optimizers, None)}
    trainer = elastic(tmp_path, more=more, model=model, **options)
    with pytest.raises(ValueError, match="ElasticTrainer: expected one optimizer, got 2: SGD, SGD"):
        trainer.train()


def test_parts_without_samples_reach_no_expert_and_count_no_labels(tmp_path):
    options = {"eval_strategy": "no", "save_strategy": "no", "max_steps": 1, "metric_for_best_model": None}
    trainer = elastic(tmp_path, BATCH + 4, more={"callbacks": []}, **options)
    layers, found, compute_loss = list(expert_layers(trainer.model).values()), [], trainer.compute_loss

    def noted(model, inputs, num_items_in_batch):
        found.append((*(layer.has_samples for layer in layers), num_items_in_batch.item()))
        return compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)

    trainer.compute_loss = noted
    trainer.train()
    trainer.end()
    labels = sum(len(each["labels"]) - 1 for each in texts(SAMPLES)[:BATCH])  # the first token is not predicted
    assert sorted(found) == [(False, False, labels)] * 4 + [(True, True, labels)] * BATCH


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp16": True}, "expected fp16=False in args, got True"),
        ({"bf16_full_eval": True}, "it would change the weights that the session trains"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "other than 'reduce_lr_on_plateau'"),
        ({"train_sampling_strategy": "group_by_length"}, "other than 'group_by_length': the sampler orders"),
        ({"include_num_input_tokens_seen": "all"}, "expected include_num_input_tokens_seen='no'"),
    ],
)
def test_arguments_that_the_session_does_not_follow(tmp_path, options, message):
    args = ElasticTrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **options)
    with pytest.raises(ValueError, match=message):
        ElasticTrainer(build("qwen3"), args, sampler=evermoe.ElasticSampler(SAMPLES, 12), train_dataset=[])


def test_arguments_of_transformers_own_are_refused(tmp_path):
    own = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="expected args of ElasticTrainingArguments, got TrainingArguments"):
        ElasticTrainer(build("qwen3"), own, sampler=evermoe.ElasticSampler(SAMPLES, 12), train_dataset=[])


@pytest.mark.parametrize(("samples", "batch"), [(10, 4), (4, 8), (7, 7), (100, 12)])
def test_epochs_end_with_the_step_that_has_their_last_sample(samples, batch):
    epochs = Epochs(samples, batch)
    for step in range(1, 40):
        first, last = (step - 1) * batch, step * batch - 1
        assert epochs.is_end(step) == (first // samples != step * batch // samples)
        assert epochs.progress(step - 1) < epochs.progress(step)
        assert last // samples + 1 >= epochs.progress(step) > (step - 1) * batch // samples
        if epochs.is_end(step):
            assert epochs.progress(step) == step * batch // samples


@pytest.mark.parametrize("others", [{}, {"batch_size": 20}, {"num_samples": 400}])
def test_a_job_with_other_batches_is_not_continued(others):
    """Its epochs could not be counted."""
    arguments = {"num_samples": 100, "batch_size": 10}
    sampler, again = evermoe.ElasticSampler(**arguments), evermoe.ElasticSampler(**arguments | others)
    for _ in range(15):
        sampler.advance()
    again.load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="after 15 steps with 150 samples") if others else nullcontext():
        check_place(again, 15)
