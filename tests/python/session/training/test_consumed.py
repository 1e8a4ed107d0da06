"""Samples, tokens and epochs that a job has consumed: as attributes and in events, also after a resume."""

import math

import pytest
import torch

import evermoe
from evermoe.events import Commit
from support.habit_data import OwnSampler
from support.habits import DATA, SAMPLES, Model, adamw, count_tokens, mean_loss, targets_of

BATCH = 12


class Sized(torch.utils.data.IterableDataset):
    """With a length, which not all have."""

    def __iter__(self):
        yield from DATA

    def __len__(self):
        return SAMPLES


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield from DATA


def loader(data):
    return evermoe.ElasticLoader(torch.utils.data.DataLoader(data, batch_size=BATCH))


def train(data, until, *, counts=False, **options):
    model, found = Model(), []
    session = evermoe.Session(model, adamw(model), data, **options)
    for step in session.steps(until):
        with step as batch:
            if counts:
                count_tokens(model, step)
            else:
                step.backward(mean_loss(model, batch if batch.dim() > 1 else DATA[batch]))
        found.append((session.samples, session.tokens, session.epoch))
    return session, found


def counted(steps):
    """Tokens that are not padding in the first steps of an `ElasticSampler`."""
    sampler, found, total = evermoe.ElasticSampler(SAMPLES, BATCH), [], 0
    for _ in range(steps):
        total += int((targets_of(DATA[sampler.batch()]) >= 0).sum())
        found.append(total)
        sampler.advance()
    return found


def test_a_resumed_job_goes_on_counting(tmp_path):
    """In a new process: nothing but the checkpoint has the counts."""
    seen = []
    options = {"counts": True, "checkpoints": evermoe.Checkpoints(tmp_path), "on_event": seen.append}
    _, first = train(evermoe.ElasticSampler(SAMPLES, BATCH), 6, **options)
    session, second = train(evermoe.ElasticSampler(SAMPLES, BATCH), 11, **options)
    assert len(second) == 5
    expected = [(BATCH * n, tokens, pytest.approx(BATCH * n / SAMPLES)) for n, tokens in enumerate(counted(11), 1)]
    assert first + second == expected
    commits = [event for event in seen if isinstance(event, Commit)]
    assert [(event.samples, event.tokens, event.epoch) for event in commits] == expected
    assert session.samples == session.sampler.consumed


def test_left_out_updates_have_consumed_their_samples():
    model = Model()
    session = evermoe.Session(model, adamw(model), evermoe.ElasticSampler(SAMPLES, BATCH), on_nonfinite="skip")
    for step in session.steps(3):
        with step as indices:
            factor = math.nan if step.number == 1 else 1.0
            step.backward(factor * mean_loss(model, DATA[indices]), count=torch.tensor(factor * 8))
    assert (session.skipped, session.samples, session.tokens) == (1, 3 * BATCH, 16)


@pytest.mark.parametrize(
    ("make", "epochs"),
    [
        (OwnSampler, [math.nan] * 4),
        (lambda: loader(Sized()), [1 / 4, 2 / 4, 3 / 4, 1.0]),
        (lambda: loader(Endless()), [0.0] * 4),
    ],
    ids=["a sampler of one's own", "a loader with a length", "a loader without one"],
)
def test_epochs_of_each_kind_of_data(make, epochs, monkeypatch):
    monkeypatch.setattr(Sized, "__len__", lambda self: 4 * BATCH)
    monkeypatch.setattr(Sized, "__iter__", lambda self: iter(DATA[: 4 * BATCH]))
    _, found = train(make(), 4)
    assert [samples for samples, _, _ in found] == [BATCH, 2 * BATCH, 3 * BATCH, 4 * BATCH]
    assert [tokens for _, tokens, _ in found] == [0] * 4
    assert [epoch for _, _, epoch in found] == pytest.approx(epochs, nan_ok=True)


def test_epochs_of_a_sampler_that_changes():
    sampler = evermoe.ElasticSampler(10, 4)
    found = []
    for number in range(8):
        if number == 1:
            sampler.change(num_samples=8)
        sampler.batch()
        sampler.advance()
        found.append(sampler.epoch)
    assert found == sorted(found)
    assert 2.5 < found[-1] <= 4
