"""Loaders that are slow or stuck: log, event and metrics name the member, its loader and the part of the step."""

import itertools
import logging
import time

import pytest
import torch

import evermoe
from evermoe.events import Measured, SlowLoader
from evermoe.observe import Metrics
from evermoe.session.loader_watch import RECENT_STEPS
from support.habit_data import OwnSampler
from support.habits import DATA, Model, adamw, mean_loss

DELAY = 0.05
"""Of a slow read: longer than a step, so that it takes at least a quarter of it also on a busy machine."""


class Late:
    """Calls `delay` with the number of each read."""

    def __init__(self, delay):
        self.delay, self.reads = delay, itertools.count()

    def wait(self):
        time.sleep(self.delay(next(self.reads)))


class LateStream(torch.utils.data.IterableDataset):
    def __init__(self, late):
        self.late = late

    def __iter__(self):
        for start in range(0, len(DATA) - 11, 12):
            self.late.wait()
            yield DATA[start : start + 12]


class LateSampler(OwnSampler):
    def __init__(self, late):
        super().__init__()
        self.late = late

    def share(self, rank, size):
        self.late.wait()
        return super().share(rank, size)


def loader(late):
    """An `ElasticLoader`, which reads the next batch for its state, after the vote."""
    return evermoe.ElasticLoader(torch.utils.data.DataLoader(LateStream(late), batch_size=None), batch_size=12)


def train(data, steps, tmp_path, **joining):
    """Train alone; return the events, and the text of the metrics."""
    model, seen, metrics = Model(), [], Metrics()
    membership = evermoe.Membership(memory_dir=str(tmp_path), **joining)
    session = evermoe.Session(model, adamw(model), data, membership=membership, on_event=[seen.append, metrics])
    for step in session.steps(steps):
        with step as batch:
            step.backward(mean_loss(model, batch if batch.dim() > 1 else DATA[batch]))
    return seen, metrics.registry


def of(seen, kind):
    return [event for event in seen if isinstance(event, kind)]


@pytest.mark.parametrize("make", [LateSampler, loader])
def test_a_slow_loader_is_named_once(make, tmp_path, caplog):
    seen, registry = train(make(Late(lambda number: DELAY)), RECENT_STEPS + 4, tmp_path)
    (slow,) = of(seen, SlowLoader)
    assert (slow.kind, slow.step, slow.loader) == ("slow", RECENT_STEPS - 1, type(make(None)).__name__)
    assert slow.seconds >= DELAY and 0.25 <= slow.fraction <= 1
    (line,) = [record.getMessage() for record in caplog.records if "waits" in record.getMessage()]
    assert line.startswith(slow.member) and f"its {slow.loader} is slow" in line
    assert f"{100 * slow.fraction:.0f} % of the step's time" in line
    measured = of(seen, Measured)
    assert all(DELAY <= each.data_seconds <= each.seconds for each in measured[1:])
    assert registry.get_sample_value("evermoe_slow_loader_total", {"kind": "slow"}) == 1
    assert registry.get_sample_value("evermoe_data_seconds_total") >= (len(measured) - 1) * DELAY
    assert registry.get_sample_value("evermoe_recent_data_fraction") >= 0.25


@pytest.mark.parametrize(
    "delay",
    [lambda number: 0.0, lambda number: 0.5 if number in (0, 1, 9) else 0.0],
    ids=["fast", "slow now and then"],
)
def test_a_loader_that_is_slow_now_and_then_is_not_named(delay, tmp_path, caplog):
    seen, registry = train(LateSampler(Late(delay)), RECENT_STEPS + 4, tmp_path)
    assert not of(seen, SlowLoader)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert registry.get_sample_value("evermoe_slow_loader_total", {"kind": "slow"}) is None


class LateState(LateSampler):
    """Reads again what the job has consumed to load its state."""

    def load_state_dict(self, state):
        self.late.wait()
        super().load_state_dict(state)


def test_a_loader_that_reads_again_for_long_in_a_recovery_is_named(tmp_path, caplog):
    _, registry = train(LateState(Late(lambda number: 1.0 if number == 0 else 0.0)), 2, tmp_path, hang_timeout=1.0)
    assert registry.get_sample_value("evermoe_slow_loader_total", {"kind": "stuck"}) == 1
    assert any("batch of step 0, and its LateState has not returned" in each.getMessage() for each in caplog.records)


def test_a_stuck_loader_is_named_while_it_is_stuck(tmp_path, caplog):
    began = time.monotonic()
    seen, _ = train(LateSampler(Late(lambda number: 1.5 if number == 3 else 0.0)), 5, tmp_path, hang_timeout=1.0)
    assert time.monotonic() - began >= 1.5
    (stuck,) = of(seen, SlowLoader)
    assert (stuck.kind, stuck.step, stuck.loader, stuck.fraction) == ("stuck", 3, "LateSampler", 1.0)
    assert 0.5 < stuck.seconds < 1.5
    assert seen.index(stuck) < seen.index(next(each for each in of(seen, Measured) if each.step == 3))
    assert any("its LateSampler has not returned" in record.getMessage() for record in caplog.records)
