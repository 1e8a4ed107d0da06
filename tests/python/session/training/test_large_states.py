"""Loaders with a state of any size: a process that resumes reads each sample of the epoch once."""

import itertools
import logging

import pytest
import torch

import evermoe
from evermoe import ElasticLoader
from evermoe.errors import UnsupportedState
from evermoe.state import loop_state
from evermoe.state.loop_state import LoopParts, LoopState
from support.habits import DATA, Model, adamw, mean_loss

ROWS, BATCH = 12, 4
LARGE = 30_000


class Lazy:
    """Three sources, read in turns; `__iter__` is a generator, which starts at the place that was loaded."""

    batch_size = BATCH

    def __init__(self, nbytes):
        self.nbytes, self.places, self.is_loaded = nbytes, [0, 0, 0], False

    def __iter__(self):
        if not self.is_loaded:
            self.places = [0, 0, 0]
        self.is_loaded = False
        while min(self.places) < ROWS // BATCH:
            source = self.places.index(min(self.places))
            place, self.places[source] = self.places[source], self.places[source] + 1
            yield {"x": torch.arange(BATCH) + 100 * source + BATCH * place}

    def state_dict(self):
        return {"places": self.places, "buffer": "x" * self.nbytes * (sum(self.places) % 5 > 1)}

    def load_state_dict(self, state):
        self.places, self.is_loaded = list(state["places"]), True


class Ready:
    """A loader that is its own iterator, as torchdata's nodes are, and knows the number of its epoch itself."""

    batch_size = BATCH

    def __init__(self, nbytes):
        self.nbytes, self.place, self.epoch = nbytes, 0, 0

    def __iter__(self):
        if self.place == 7:
            self.place, self.epoch = 0, self.epoch + 1
        return self

    def __next__(self):
        if self.place == 7:
            raise StopIteration
        self.place += 1
        return torch.arange(BATCH) + 1000 * self.epoch + BATCH * self.place

    def state_dict(self):
        return {"place": self.place, "epoch": self.epoch, "buffer": "x" * self.nbytes * (self.place > 2)}

    def load_state_dict(self, state):
        self.place, self.epoch = state["place"], state["epoch"]


def values(loader):
    batch = loader.batch()
    return (batch["x"] if isinstance(batch, dict) else batch).tolist()


def parts_of(loader):
    model = torch.nn.Linear(2, 2)
    return LoopParts(loader, torch.optim.SGD(model.parameters(), lr=0.1), None)


def take(loader, n):
    """The next n batches, and the job's state after each of them, as its copies have it."""
    parts, kept, found = parts_of(loader), LoopState(), []
    kept.store(loop_state.collect(parts))
    for _ in range(n):
        found.append(values(loader))
        loader.advance()
        kept.store(loop_state.collect(parts))
    return found, kept.load()


@pytest.mark.parametrize("nbytes", [10, LARGE])
@pytest.mark.parametrize("kind", [Lazy, Ready])
def test_the_same_samples_come_after_a_restart_and_after_going_back(kind, nbytes):
    """At each step of two epochs and a half, in each of which the state grows, and shrinks again."""
    expected, _ = take(ElasticLoader(kind(nbytes)), 24)
    for steps in range(20):
        first = ElasticLoader(kind(nbytes))
        before, state = take(first, steps)
        assert before == expected[:steps]
        second = ElasticLoader(kind(nbytes))
        loop_state.collect(parts_of(second))  # a session reads the first batch before it knows what the job has
        loop_state.restore(state, parts_of(second))
        assert loop_state.collect(parts_of(second)) == loop_state.collect(parts_of(first)), "on all members"
        assert second.consumed == BATCH * steps
        found, after = take(second, 4)
        assert found == expected[steps : steps + 4]
        assert after == take(first, 4)[1], "and later"
        loop_state.restore(state, parts_of(second))
        assert take(second, 3)[0] == expected[steps : steps + 3], "and back again"


def test_a_state_is_left_out_where_it_is_large_and_returns_in_the_next_epoch(caplog):
    loader = ElasticLoader(Ready(LARGE))
    with caplog.at_level(logging.WARNING):
        has_state = ["loader" in take(loader, 1)[1]["sampler"] for _ in range(10)]
    assert has_state == [True, True, False, False, False, False, False, True, True, False]
    (record,) = caplog.records
    assert "the loader's state_dict() takes 30038 bytes as JSON, too many" in record.getMessage()


def test_a_state_of_any_size_leaves_room_for_results_of_a_step():
    """With a loader's state at the border between what is kept and what is left out."""
    for nbytes in range(15_900, 16_400, 10):
        loader = ElasticLoader(Ready(nbytes))
        take(loader, 3)
        results = {"loss": -1.2345678901234567e-100, "grad_norm": -1.2345678901234567e-100}
        LoopState().store(loop_state.collect(parts_of(loader)) | results)


def train(folder, loader, steps, seen):
    model = Model()
    session = evermoe.Session(
        model, adamw(model), ElasticLoader(loader), checkpoints=evermoe.Checkpoints(folder, interval=2)
    )
    for step in session.steps(steps):
        with step as batch:
            seen.append(batch.tolist())
            step.backward(mean_loss(model, DATA[batch % len(DATA)]))


def test_a_session_resumes_in_an_epoch_whose_state_is_large(tmp_path):
    seen, expected = [], []
    for steps in (5, 12):
        train(tmp_path / "parts", Ready(LARGE), steps, seen)
    train(tmp_path / "once", Ready(LARGE), 12, expected)
    assert seen == expected
    assert len(set(itertools.chain(*seen))) == 12 * BATCH


@pytest.mark.parametrize("what", ["scheduler", "stateful"])
def test_other_states_that_do_not_fit_are_refused_at_the_start(tmp_path, what):
    model = Model()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    large = Ready(0)
    scheduler.table = list(range(10_000)) if what == "scheduler" else []
    large.epoch = "x" * LARGE if what == "stateful" else 0
    with pytest.raises(UnsupportedState, match=r"take \d+ bytes as JSON; at most 16384 fit"):
        evermoe.Session(
            model,
            optimizer,
            ElasticLoader(Ready(0)),
            membership=evermoe.Membership(memory_dir=str(tmp_path)),
            scheduler=scheduler,
            stateful={"large": large},
        )
