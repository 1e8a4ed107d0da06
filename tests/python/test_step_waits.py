"""Waits of the host for a GPU from the loss to the vote, and the collectives of a vote."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from evermoe import MoE
from evermoe.comm import vote
from evermoe.comm.group import Group
from evermoe.data.sampler import Share
from evermoe.events import Reduce, Vote
from evermoe.session.buckets import Buckets
from evermoe.session.islands import Place
from evermoe.session.reduced_gradients import ReducedGradients
from evermoe.session.session_driver import SessionDriver
from evermoe.session.step import Step
from evermoe.state.training_state import TrainingState
from support.paper_gpu import PaperGpu
from support.ranks import run_threads

H, E, PARTS = 16, 4, 3


class Model(nn.Module):
    """A layer between two others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.moe, self.last = nn.Linear(H, H), MoE(H, H, E, dtype=torch.bfloat16), nn.Linear(H, H)

    def forward(self, x):
        return self.last(self.moe(self.first(x)))


def driver_of(model, clip, seen):
    """The parts of a driver that `SessionDriver.finish_step` uses: the state is real, and there is no other member."""
    answers = {
        "_protection.finish_exchange.return_value": (True, False),
        "_protection.measured_seconds.return_value": (0.0, 0.0),
    }
    driver = mock.MagicMock(**answers, **{"is_stale.return_value": False})
    driver._state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), session=None)
    driver._group, driver._config.max_grad_norm = Group(), clip
    driver._script.loss_scale.value, driver.lost.reported, driver.lost.is_returning = 1.0, 0.0, False
    checkpointer = driver.saving.checkpointer
    checkpointer.is_over = checkpointer.is_overdue = driver.saving.is_save_over = False
    driver._config.on_gradients = None
    driver._script.optimizer = driver._state.optimizer
    membership = mock.Mock(side_group=Group(), trainer_group=driver._group)
    driver._buckets = Buckets(model, driver._state, membership, torch.device("cpu"))
    driver._buckets.plan()
    driver._reduced = ReducedGradients(driver._script, driver._state, driver._group, driver._config, Place())
    driver._emit = seen
    driver._with_own = partial(SessionDriver._with_own, driver)
    return driver


def take(model, xs, count, clip, waits):
    """A step of several parts: its ballot, and the waits so far when gradients are reduced, and before the vote."""
    seen = []
    driver = driver_of(model, clip, lambda event: seen.append((event, *waits)))
    watcher = mock.Mock(check_loss=lambda loss: 1.0)
    step = Step(
        0,
        1,
        lambda: Share(torch.arange(3 * PARTS), 1.0),
        watcher,
        commit=lambda step: True,
        fail=lambda error: None,
        lose=lambda reason: None,
    )
    waits.clear()  # of the state, which is made once
    for _, x in zip(step.micro_batches(PARTS), xs, strict=True):
        step.backward(model(x).float().square().sum() + model.moe.balance_loss, count=count)
    return SessionDriver.finish_step(driver, step), seen


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_host_waits_once_for_loss_norms_and_whether_all_is_finite(clip, counts):
    xs, count = torch.randn(PARTS, 3, H), torch.tensor(7.0) if counts else None
    expected, _ = take(Model(), xs, count, clip, [])
    with PaperGpu() as gpu:
        moved = [gpu.tensor(x) for x in xs]
        ballot, seen = take(gpu.move(Model()), moved, count and gpu.tensor(count), clip, gpu.waits)
        assert gpu.waits == ["aten::_to_copy from the GPU"]
    assert seen == [(Reduce(0),), (Vote(0),)], "none before"
    assert ballot == pytest.approx(expected, rel=1e-3)
    assert ballot.votes == 1 and ballot.is_finite and ballot.squares == ballot.reduced_squares > 0
    assert ballot.counted == 7 * PARTS * counts


def vote_of(group):
    before = group.begun.count
    sums, _ = vote.cast(group, vote.Ballot(votes=1.0, loss=0.5 + group.rank))
    return {"collectives": group.begun.count - before, "votes": sums.votes, "loss": sums.loss}


def test_a_vote_is_one_collective(tmp_path):
    assert run_threads(tmp_path, 2, vote_of) == [{"collectives": 1, "votes": 2.0, "loss": 2.0}] * 2


def test_a_step_whose_batch_cannot_be_read_leaves_the_job():
    """The others would wait for this member."""
    failed, error = [], ValueError("no such file")
    step = Step(0, 1, mock.Mock(side_effect=error), mock.Mock(), mock.Mock(), failed.append, mock.Mock())
    with pytest.raises(ValueError, match="no such file"), step:
        pass
    assert failed == [error]
