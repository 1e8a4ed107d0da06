"""A script whose schedule or settings differ from the job's: what differs is named, and either of the two is taken."""

import functools
import json
import logging
import math
import warnings

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

import evermoe
from evermoe.errors import UnsupportedState
from evermoe.state import loop_state
from evermoe.state.loop_state import LoopParts
from support.habits import DATA, Model, mean_loss

STEPS, MORE = 20, 15


def rate(step, total):
    return 1 / (1 + step / total)


class Own(LRScheduler):
    """A schedule of one's own, with a counter and a constant."""

    def __init__(self, optimizer, halving_interval):
        self.halving_interval, self.seen = halving_interval, 0
        super().__init__(optimizer)

    def get_lr(self):
        self.seen += 1
        return [base * 0.5 ** (self.last_epoch // self.halving_interval) for base in self.base_lrs]


def warm(optimizer, total):
    warmup = LinearLR(optimizer, 0.1, total_iters=6)
    return SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, total)], [6])


SCHEDULES = {
    "LambdaLR": (lambda o, n: LambdaLR(o, functools.partial(rate, total=n)), (50, 90), {"functions of lr_lambdas"}),
    "MultiplicativeLR": (
        lambda o, n: MultiplicativeLR(o, functools.partial(rate, total=n)),
        (50, 90),
        {"functions of lr_lambdas"},
    ),
    "StepLR": (StepLR, (7, 4), {"step_size"}),
    "MultiStepLR": (MultiStepLR, ([4, 9, 30], [5, 25, 28]), {"milestones"}),
    "ConstantLR": (lambda o, n: ConstantLR(o, 0.5, n), (30, 10), {"total_iters"}),
    "LinearLR": (lambda o, n: LinearLR(o, 0.1, 1.0, n), (30, 10), {"total_iters"}),
    "ExponentialLR": (ExponentialLR, (0.9, 0.95), {"gamma"}),
    "PolynomialLR": (lambda o, n: PolynomialLR(o, n, 2.0), (40, 70), {"total_iters"}),
    "CosineAnnealingLR": (CosineAnnealingLR, (20, 40), {"T_max"}),
    "CosineAnnealingWarmRestarts": (CosineAnnealingWarmRestarts, (8, 11), {"T_0"}),
    "CyclicLR": (lambda o, n: CyclicLR(o, 0.01, 0.1, n, cycle_momentum=False), (8, 11), {"total_size"}),
    "OneCycleLR": (lambda o, n: OneCycleLR(o, 0.1, n), (40, 80), {"total_steps", "_schedule_phases"}),
    "SequentialLR": (warm, (20, 40), {"[1].T_max"}),
    "ChainedScheduler": (
        lambda o, n: ChainedScheduler([ConstantLR(o, 0.5, 4), ExponentialLR(o, n)]),
        (0.9, 0.8),
        {"[1].gamma"},
    ),
    "SWALR": (lambda o, n: SWALR(o, 0.001, n), (10, 30), {"anneal_epochs"}),
    "one's own": (Own, (5, 9), {"halving_interval"}),
}


def make(kind, number, lr=0.05):
    """A loop with two groups and a schedule."""
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": lr / 2}], lr=lr, momentum=0.5)
    build, numbers, _ = SCHEDULES[kind]
    return LoopParts(None, optimizer, build(optimizer, numbers[number]))


def rates(parts, steps):
    """The learning rates and momenta of the next steps."""
    found = []
    for _ in range(steps):
        loop_state.advance(parts.scheduler, 1.0)
        found.append([(group["lr"], group["momentum"]) for group in parts.optimizer.param_groups])
    return found


@pytest.fixture(autouse=True)
def _without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer is not stepped here
        yield


def after(parts):
    """The state of a job, as its copies have it."""
    rates(parts, STEPS)
    return json.loads(loop_state.encoded(loop_state.collect(parts)))


def test_all_of_torchs_schedulers_are_tried():
    known = {
        name for name, kind in vars(lr_scheduler).items() if isinstance(kind, type) and issubclass(kind, LRScheduler)
    }
    assert known - {"LRScheduler", "_LRScheduler", "ReduceLROnPlateau"} == SCHEDULES.keys() - {"SWALR", "one's own"}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_what_differs_is_named_and_what_is_equal_is_not(kind):
    job, same, other = after(make(kind, 0)), make(kind, 0), make(kind, 1)
    assert loop_state.differences(job, loop_state.settings_of(same, is_used=False)) == {}
    found = loop_state.differences(job, loop_state.settings_of(other, is_used=False))
    assert found.keys() == {f"scheduler's {name}" for name in SCHEDULES[kind][2]}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_jobs_schedule_continues(kind):
    """But for functions, which are the script's."""
    straight, resumed = make(kind, 0), make(kind, 0 if kind in ("LambdaLR", "MultiplicativeLR") else 1)
    loop_state.restore(after(straight), resumed)
    assert rates(resumed, MORE) == rates(straight, MORE)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_scripts_schedule_is_as_if_it_had_been_stepped_from_its_start(kind):
    """To the last bit, with other learning rates, too; and again, from a state of that."""
    job, script, straight = after(make(kind, 0)), make(kind, 1, 0.02), make(kind, 1, 0.02)
    settings = loop_state.settings_of(script, is_used=True)
    rates(straight, STEPS)
    expected = loop_state.encoded(loop_state.collect(straight))
    for _ in range(2):
        loop_state.restore_with(settings, job, script, STEPS)
        assert loop_state.encoded(loop_state.collect(script)) == expected
        job = loop_state.collect(script)
    assert rates(script, MORE) == rates(straight, MORE)
    newcomer = make(kind, 1, 0.07)
    loop_state.restore(json.loads(expected), newcomer)
    assert rates(newcomer, 1)[0] == rates(make_at(kind, STEPS), 1)[0]


def make_at(kind, steps):
    parts = make(kind, 1, 0.02)
    rates(parts, steps)
    return parts


def plateau(lr, **options):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=lr, weight_decay=options.pop("weight_decay", 0.0))
    return LoopParts(None, optimizer, ReduceLROnPlateau(optimizer, **options))


def test_a_plateau_keeps_its_progress_and_takes_the_scripts_constants():
    job = plateau(0.1, patience=3, factor=0.5)
    for loss in (3.0, 2.0, 2.1, 2.1, 2.1, 2.1, 2.1):
        loop_state.advance(job.scheduler, loss)
    assert job.optimizer.param_groups[0]["lr"] == 0.05
    script = plateau(0.3, patience=1, factor=0.1, weight_decay=0.2)
    settings = loop_state.settings_of(script, is_used=True)
    state = json.loads(loop_state.encoded(loop_state.collect(job)))
    found = loop_state.differences(state, settings)
    assert found == {
        "scheduler's patience": (1, 3),
        "scheduler's factor": (0.1, 0.5),
        "optimizer's weight_decay": (0.2, 0.0),
    }
    loop_state.restore_with(settings, state, script, 7)
    assert (script.scheduler.best, script.scheduler.num_bad_epochs, script.scheduler.last_epoch) == (2.0, 1, 7)
    assert (script.optimizer.param_groups[0]["lr"], script.optimizer.param_groups[0]["weight_decay"]) == (0.05, 0.2)
    loop_state.advance(script.scheduler, 2.1)
    assert script.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


def test_another_class_is_refused_unless_the_scripts_is_taken():
    job, script = after(make("StepLR", 0)), make("CosineAnnealingLR", 0)
    settings = loop_state.settings_of(script, is_used=True)
    names = tuple(f"torch.optim.lr_scheduler.{name}" for name in ("CosineAnnealingLR", "StepLR"))
    assert loop_state.differences(job, settings)["scheduler's class"] == names
    with pytest.raises(
        UnsupportedState, match=r"trained with the scheduler torch.optim.lr_scheduler.StepLR.*resume_sett"
    ):
        loop_state.restore(job, script)
    loop_state.restore_with(settings, job, script, STEPS)
    assert loop_state.collect(script) == loop_state.collect(straight(make("CosineAnnealingLR", 0)))


def straight(parts):
    rates(parts, STEPS)
    return parts


def test_a_scheduler_on_one_side_alone_is_named():
    job, without = after(make("StepLR", 0)), make("StepLR", 0)._replace(scheduler=None)
    found = loop_state.differences(job, loop_state.settings_of(without, is_used=False))
    assert found["scheduler"] == ("None", "torch.optim.lr_scheduler.StepLR")


# ---- in a session


def train(folder, steps, total, resume_settings="job"):
    """The learning rates with which the steps were computed."""
    model, found = Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = CosineAnnealingLR(optimizer, total)
    sampler = evermoe.ElasticSampler(len(DATA), 12)
    checkpoints = evermoe.Checkpoints(folder, resume_settings=resume_settings)
    session = evermoe.Session(model, optimizer, sampler, checkpoints=checkpoints, scheduler=scheduler)
    for step in session.steps(steps):
        found.append(optimizer.param_groups[0]["lr"])
        with step:
            step.backward(mean_loss(model, DATA[step.indices]))
    return found


def cosine(step, total):
    return 0.005 * (1 + math.cos(math.pi * step / total))


@pytest.mark.parametrize(("whose", "total"), [("job", 4), ("script", 8)])
def test_a_restart_takes_the_settings_that_were_asked_for(tmp_path, caplog, whose, total):
    assert train(tmp_path, 3, 4) == pytest.approx([cosine(step, 4) for step in range(3)])
    with caplog.at_level(logging.INFO, logger="evermoe"):
        found = train(tmp_path, 6, 8, resume_settings=whose)
    assert found == pytest.approx([cosine(step, total) for step in range(3, 6)])
    told = [record.getMessage() for record in caplog.records if "T_max" in record.getMessage()]
    expected = "T_max is 8 in this script, but 4 where" if whose == "job" else "T_max was 4 in job"
    assert len(told) == 1
    assert expected in told[0]
