"""Models other than causal language models: classification, question answering, vision-language models."""

import pytest
import torch

import evermoe
from support.families import CLASSES, build_family
from support.hub import Loss, build, config, labels_of
from support.optimizers import make_optimizer
from support.worker import SAMPLES, Fault, dataset

transformers = pytest.importorskip("transformers")
from evermoe.errors import CorruptCopy  # noqa: E402
from evermoe.integrations.transformers import export, from_pretrained, make_elastic  # noqa: E402
from evermoe.integrations.transformers.hub_shape import read_shape  # noqa: E402
from evermoe.integrations.transformers.trainer import ElasticTrainer, ElasticTrainingArguments  # noqa: E402

HEADS = ["SequenceClassification", "TokenClassification", "QuestionAnswering"]
STEPS, BATCH = 4, 12


def auto(head):
    return getattr(transformers, f"AutoModelFor{head}")


def train_alone(model):
    training, data, losses = Loss(model), dataset(), []
    model.set_experts_implementation("eager")
    optimizer, sampler = make_optimizer("adamw", training), evermoe.ElasticSampler(SAMPLES, BATCH)
    for _ in range(STEPS):
        loss = training(data[sampler.batch()])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sampler.advance()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("head", HEADS[:2])
def test_a_new_head_on_the_folder_of_a_language_model(tmp_path, head):
    """It is named, trains as transformers' own, and is in the exported folder."""
    build("qwen3", classifier_dropout=0.0).save_pretrained(tmp_path / "source")
    with pytest.warns(UserWarning, match="has no weights for score.weight"):
        model, weights = from_pretrained(tmp_path / "source", model_class=auto(head))
    session = evermoe.Session(
        Loss(model),
        make_optimizer("adamw", model),
        evermoe.ElasticSampler(SAMPLES, BATCH),
        weights=weights,
    )
    plain, losses = auto(head).from_pretrained(tmp_path / "source"), []
    for step in session.steps(STEPS):
        if session.step == 0:
            state = model.state_dict()
            other = {key for key, value in plain.state_dict().items() if not torch.equal(value, state[key])}
            assert other == {"score.weight"} and 0 < state["score.weight"].std() < 0.05
            plain.load_state_dict(state)
        with step as indices:
            step.backward(session.model(dataset()[indices]))
        losses.append(session.loss)
        if session.step == STEPS:
            export(session, model, tmp_path / "out")
    assert losses == pytest.approx(train_alone(plain), abs=1e-5)
    again = auto(head).from_pretrained(tmp_path / "out")
    assert type(again).__name__ == f"Qwen3MoeFor{head}"
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_what_is_missing_below_the_head_is_no_new_head(tmp_path):
    build("qwen3").save_pretrained(tmp_path / "source")
    more = config("qwen3", num_hidden_layers=3)
    model, weights = from_pretrained(tmp_path / "source", model_class=auto(HEADS[0]), config=more)
    with pytest.raises(CorruptCopy, match=r"has no weights for model.layers.2"):
        export(weights, model, tmp_path / "out")


@pytest.mark.parametrize("family", [family for family, name in CLASSES.items() if name.endswith("Generation")])
def test_a_vision_language_model_is_read_and_written_as_transformers_does(tmp_path, family):
    build_family(family).save_pretrained(tmp_path / "source")
    model, weights = from_pretrained(tmp_path / "source")
    assert type(model).__name__ == CLASSES[family]
    export(weights, model, tmp_path / "out")
    found, expected = (type(model).from_pretrained(tmp_path / each) for each in ("out", "source"))
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert read_shape(tmp_path / "source").experts == 8


@pytest.mark.parametrize("head", HEADS)
def test_a_head_trains_through_a_kill_as_on_one_process(tmp_path, start_job, head):
    torch.manual_seed(0)
    auto(head).from_config(config("qwen3", classifier_dropout=0.0)).save_pretrained(tmp_path / "source")
    job = start_job(3, join_interval=1)
    workers = job.start_all({"c": [Fault("reduce", 1)]}, hub=str(tmp_path / "source"), steps=STEPS, batch_size=BATCH)
    assert [each.join(80) for each in workers] == [0, 0, -9]
    assert [event["steps_lost"] for event in workers[0].events("recovered", members=2)] == [0]
    expected = train_alone(auto(head).from_pretrained(tmp_path / "source"))
    assert [event["loss"] for event in workers[0].events("commit")] == pytest.approx(expected, abs=1e-5)


def test_the_trainer_takes_a_classifier(tmp_path):
    model = make_elastic(auto(HEADS[0]).from_config(config("qwen3")))
    rows = [
        {"input_ids": row, **{key: value[0] for key, value in labels_of(model, row[None]).items()}}
        for row in dataset()[:24]
    ]
    options = {"use_cpu": True, "disable_tqdm": True, "report_to": [], "num_train_epochs": 1, "learning_rate": 1e-3}
    trainer = ElasticTrainer(
        model,
        ElasticTrainingArguments(str(tmp_path / "out"), **options),
        sampler=evermoe.ElasticSampler(len(rows), 6),
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )
    trainer.train()
    assert 0 <= trainer.evaluate()["eval_accuracy"] <= 1
    trainer.save_model(str(tmp_path / "saved"))
    trainer.end()
    again = auto(HEADS[0]).from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
