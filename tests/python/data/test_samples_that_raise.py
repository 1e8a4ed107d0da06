"""Samples that raise an exception: named, or left out in the same way by all members, and counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import evermoe
from evermoe import ElasticReaders
from evermoe.data import Packed
from evermoe.errors import NonFiniteLoss
from evermoe.events import SampleSkipped
from evermoe.observe import Metrics
from support.habits import DATA, Model, adamw, mean_loss

READERS, SIZE = 3, 6


class Decoded:
    """Samples by index; some cannot be decoded."""

    def __init__(self, reader: int, damaged: Any) -> None:
        self.reader, self.damaged = reader, damaged

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        if (self.reader, index) in self.damaged:
            raise OSError(f"cannot decode {index}")
        return self.reader * SIZE + index


class Continuing:
    """An iterator that continues after an exception, with a state."""

    def __init__(self, reader: int, damaged: Any) -> None:
        self.samples, self.place = Decoded(reader, damaged), 0

    def __iter__(self):
        return self

    def __next__(self) -> int:
        if self.place == SIZE:
            raise StopIteration
        self.place += 1
        return self.samples[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


DAMAGED = {(0, 2), (1, 0), (1, 1), (2, 4)}
KINDS = {
    "by index": Decoded,
    "iterator": Continuing,
    "map": lambda reader, damaged: map(Decoded(reader, damaged).__getitem__, range(SIZE)),
}


def make(kind: Any, damaged: Any = DAMAGED, **options: Any) -> ElasticReaders:
    options = {"on_error": "skip", "collate_fn": list, **options}
    return ElasticReaders(lambda reader, _: kind(reader, damaged), readers=READERS, batch_size=READERS, **options)


def batches(data: ElasticReaders, steps: int) -> tuple[list[list[int]], list[Any]]:
    found, failures = [], []
    for _ in range(steps):
        share = data.share(0, 1)
        found.append(share.batch if share.weight else [])
        failures += [(reader, *each) for reader, each in data.failures]
        data.advance()
    return found, failures


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_left_out_samples_keep_their_numbers(kind: Any, num_workers: int) -> None:
    """All others are in the batches in which they are without damage."""
    data = make(kind, num_workers=num_workers)
    found, failures = batches(data, SIZE)
    complete, none = batches(make(kind, set()), SIZE)
    damaged = {reader * SIZE + number for reader, number in DAMAGED}
    assert found == [[sample for sample in batch if sample not in damaged] for batch in complete]
    assert sorted(failures) == [
        (reader, number, f"OSError: cannot decode {number}") for reader, number in sorted(DAMAGED)
    ]
    assert not none
    assert (data.consumed, data.epoch) == (READERS * SIZE - len(DAMAGED), 1)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_one_that_is_not_left_out_is_named(kind: Any) -> None:
    data = make(kind, {(1, 2)}, on_error="raise")
    batches(data, 1)
    with pytest.raises(
        RuntimeError, match=r"sample 2 of reader 1 in epoch 0 has raised OSError: cannot decode 2\. .*'skip'"
    ):
        batches(data, 2)


def test_a_reader_whose_last_samples_are_damaged_ends_before_them() -> None:
    damaged = {(reader, number) for reader in range(READERS) for number in (SIZE - 2, SIZE - 1)}
    data = make(Decoded, damaged)
    found, failures = batches(data, SIZE - 2)
    assert (data.epoch, sum(map(len, found)), len(failures)) == (1, READERS * (SIZE - 2), len(damaged))


@pytest.mark.parametrize("last", [False, True], ids=["in the middle", "at the end"])
def test_a_generator_cannot_continue_and_loses_nothing_silently(last: bool) -> None:
    def generate(reader: int, damaged: Any) -> Any:
        samples = Decoded(reader, damaged)
        return (samples[number] for number in range(SIZE))

    data = make(generate, {(1, SIZE - 1 if last else 2)})
    with pytest.raises(RuntimeError, match=r"the iterator of generator has ended with item \d, which has raised"):
        batches(data, SIZE)


def test_damaged_documents_are_left_out_of_sequences() -> None:
    class Documents(Decoded):
        def __getitem__(self, index: int) -> list[int]:
            return [super().__getitem__(index)] * 3

    def sequences(damaged: Any) -> tuple[list[int], list[Any]]:
        data = ElasticReaders(
            lambda reader, _: Packed(Documents(reader, damaged), 4, pad_id=-1),
            readers=1,
            batch_size=1,
            collate_fn=lambda samples: samples[0]["input_ids"].tolist(),
            on_error="skip",
        )
        found, failures = batches(data, 3)
        return [token for sequence in found for token in sequence if token >= 0], failures

    found, failures = sequences({(0, 1), (0, 5)})
    assert found == [token for document in (0, 2, 3, 4) for token in [document] * 3]
    assert [number for _, number, _ in failures] == [1, 5]


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(ValueError, match="on_error"):
        make(Decoded, on_error="ignore")


# ---- in a session


def train(damaged: Any, **options: Any) -> tuple[Any, list[SampleSkipped], Any]:
    data = make(Decoded, damaged, collate_fn=lambda samples: DATA[samples])
    model, seen, metrics = Model(), [], Metrics()
    session = evermoe.Session(model, adamw(model), data, on_event=[seen.append, metrics], **options)
    for step in session.steps(SIZE):
        with step as batch:
            step.backward(mean_loss(model, batch))
    return session, [event for event in seen if isinstance(event, SampleSkipped)], metrics.registry


def test_they_are_reported_once_by_event_metric_and_log(caplog: pytest.LogCaptureFixture) -> None:
    session, skipped, registry = train(DAMAGED)
    assert {(event.reader, event.number) for event in skipped} == DAMAGED
    assert all(event.step == event.number and event.epoch == 0 for event in skipped)
    assert registry.get_sample_value("evermoe_skipped_samples_total") == len(DAMAGED)
    lines = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    assert len(lines) == len(DAMAGED)
    assert "sample 2 of reader 0 in epoch 0 is left out, as it has raised OSError: cannot decode 2" in lines
    assert session.samples == READERS * SIZE - len(DAMAGED)


def test_the_gradient_is_the_mean_over_the_others() -> None:
    session, _, _ = train({(1, SIZE - 1)})
    model = Model()
    optimizer = adamw(model)
    for number in range(SIZE):
        batch = [reader * SIZE + number for reader in range(READERS) if (reader, number) != (1, SIZE - 1)]
        optimizer.zero_grad()
        loss = mean_loss(model, DATA[batch])
        loss.backward()
        optimizer.step()
    assert session.loss == pytest.approx(loss.item(), abs=2e-6)


def test_a_batch_without_samples_is_named() -> None:
    with pytest.raises(NonFiniteLoss, match=r"step 2: .* all samples of its batch have raised exceptions"):
        train({(reader, 2) for reader in range(READERS)})
    session, skipped, _ = train({(reader, 2) for reader in range(READERS)}, on_nonfinite="skip")
    assert (session.skipped, len(skipped), session.samples) == (1, READERS, READERS * (SIZE - 1))
    assert torch.isfinite(torch.tensor(session.loss))
