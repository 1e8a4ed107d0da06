"""Loaders with a state of any size: a process that resumes reads each sample of the epoch once."""

import pytest
import torch

import evermoe
from evermoe import ElasticLoader
from evermoe.data.reader_states import EXCHANGE_PERIOD, STATE_PERIOD
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
    """The next n batches, and the job's state after them, as its copies have it."""
    parts, kept, found = parts_of(loader), LoopState(), []
    kept.store(loop_state.collect(parts))
    for _ in range(n):
        loader.share(0, 2)
        found.append(values(loader))
        if loader.states.is_due:
            loader.states.keep([loader.states.own(), b""])
        loader.advance()
        kept.store(loop_state.collect(parts))
    return found, (kept.load(), loader.states.tensor.clone())


def restore(loader, saved):
    state, tensor = saved
    loader.states.tensor.copy_(tensor)
    loop_state.restore(state, parts_of(loader))


@pytest.mark.parametrize("nbytes", [10, LARGE])
@pytest.mark.parametrize("kind", [Lazy, Ready])
def test_the_same_samples_come_after_a_restart_and_after_going_back(kind, nbytes):
    """At each step of two epochs and a half, in each of which the state grows, and shrinks again."""
    expected, _ = take(ElasticLoader(kind(nbytes)), 54)
    for steps in range(50):
        first = ElasticLoader(kind(nbytes))
        before, state = take(first, steps)
        assert before == expected[:steps]
        second = ElasticLoader(kind(nbytes))
        loop_state.collect(parts_of(second))  # a session reads the first batch before it knows what the job has
        restore(second, state)
        assert loop_state.collect(parts_of(second)) == loop_state.collect(parts_of(first)), "on all members"
        assert second.consumed == BATCH * steps
        found, after = take(second, 4)
        assert found == expected[steps : steps + 4]
        assert after[0] == take(first, 4)[1][0], "and later"
        restore(second, state)
        assert take(second, 3)[0] == expected[steps : steps + 3], "and back again"


def test_a_state_that_does_not_fit_is_named_once_and_read_again(caplog):
    def loader():
        return ElasticLoader(Ready(LARGE), state_bytes=64)

    expected = take(ElasticLoader(Ready(0)), 40)[0]
    saved = take(loader(), 36)[1]
    again = loader()
    restore(again, saved)
    assert take(again, 4)[0] == expected[36:]
    assert [record.getMessage().count("state_bytes is 64") for record in caplog.records] == [1]


def test_a_restored_loader_reads_the_batches_since_its_latest_state_alone():
    class Counted(Ready):
        read = 0

        def __next__(self):
            Counted.read += 1
            return super().__next__()

    saved = take(ElasticLoader(Counted(LARGE)), 100)[1]
    again = ElasticLoader(Counted(LARGE))
    Counted.read = 0
    restore(again, saved)
    again.batch()
    ends = 100 // 7
    assert Counted.read <= EXCHANGE_PERIOD + STATE_PERIOD + ends


def train(folder, loader, steps, seen):
    model = Model()
    session = evermoe.Session(model, adamw(model), loader, checkpoints=evermoe.Checkpoints(folder, interval=2))
    for step in session.steps(steps):
        with step as batch:
            seen.append(batch.tolist())
            step.backward(mean_loss(model, DATA[batch % len(DATA)]))


class Numbers:
    """The samples of a reader, with a state; counts those that are read."""

    read = 0

    def __init__(self, reader, _):
        self.reader, self.place = reader, 0

    def __iter__(self):
        while self.place < 60:
            self.place, Numbers.read = self.place + 1, Numbers.read + 1
            yield self.place + 1000 * self.reader

    def state_dict(self):
        return {"place": self.place, "buffer": "x" * LARGE}

    def load_state_dict(self, state):
        self.place = state["place"]


def readers():
    return evermoe.ElasticReaders(Numbers, readers=2, batch_size=BATCH)


@pytest.mark.parametrize("make", [lambda: ElasticLoader(Ready(LARGE)), readers], ids=["loader", "readers"])
def test_a_session_resumes_in_an_epoch_whose_state_is_large(make, tmp_path):
    seen, expected = [], []
    for steps in (5, 30, 36):
        Numbers.read = 0
        train(tmp_path / "parts", make(), steps, seen)
    assert Numbers.read <= 2 * (16 + 6 + 2) * 2, "the states came with the checkpoint"
    train(tmp_path / "once", make(), 36, expected)
    assert seen == expected


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
