"""With dense="sharded" owners sum gradients concurrently with backward: the same bits, and deaths meanwhile."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evermoe.comm.collectives import complete_gradients, reduce_to_owners
from evermoe.comm.group import Group
from evermoe.session import early_sums
from evermoe.session.early_sums import EarlySums
from support.harness import PATIENCE
from support.history import check_history, check_recovered, committed_steps
from support.ranks import run_each
from support.worker import Fault

SIZE = 3
FAULT = 5
STEPS = 6


class Shared(nn.Module):
    """A weight that is used twice, one that not every rank uses, one that none does, and others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.rare, self.unused, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x, is_rare):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        x = torch.tanh(self.first(x))
        return self.last(self.rare(x) if is_rare else x).square().mean()


def computed(model, rank, step, kind):
    """Backpropagates as a script may; yields before each backpropagation."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    for part in range({"twice": 2, "more": 1 + step // 3, "fewer": 3 - step // 2}.get(kind, 1)):
        yield
        loss = model(torch.randn(4, 8, generator=generator), is_rare=(step + rank + part) % 4 == 0)
        loss.backward(retain_graph=False)
    if kind == "clipped" and step % 2 and rank == 1:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    if kind == "replaced" and rank == 1:
        model.second.weight.grad = model.second.weight.grad * 2


def summed(group, folder, kind, bucket_bytes):
    """Gradients that this rank owns after each step, and buckets of the last one: early, and after backward."""
    early_sums.BUCKET_BYTES = bucket_bytes
    side = Group()
    store = dist.FileStore(f"{folder}/side", group.size)
    side.rebuild(store, group.rank, group.size, torch.device("cpu"), timedelta(seconds=PATIENCE / 2))
    found = []
    for is_early in (False, True):
        model, gradients, began, kept = Shared(), [], [], 0
        parameters = list(model.parameters())
        early = EarlySums(side if is_early else Group(), group)
        side.on_begin = lambda name, _, began=began: began.append(name)
        for step in range(STEPS):
            model.zero_grad(set_to_none=True)
            early.begin_step()
            for _ in computed(model, group.rank, step, kind):
                early.begin_backward()
            changed = complete_gradients(parameters, group, early.send_rest())
            ids = early.finish(changed)
            kept += len(ids)
            stepped_R = [[p for p in parameters[r::SIZE] if p.grad is not None] for r in range(SIZE)]
            reduce_to_owners([[p.grad for p in each if id(p) not in ids] for each in stepped_R], group)
            early.plan(stepped_R)
            gradients.append([p.grad.clone() for p in stepped_R[group.rank]])
        early.forget()
        found.append({"gradients": gradients, "began": len(began), "kept": kept})
    return found


def test_early_sums_have_the_bits_of_late_ones(tmp_path):
    kinds = ["once", "twice", "more", "fewer", "clipped", "replaced"]
    for kind in kinds:
        (tmp_path / kind).mkdir()
    for results in run_each(tmp_path, SIZE, summed, [(str(tmp_path / kind), kind, 64) for kind in kinds]):
        for late, early in results:
            for a, b in zip(late["gradients"], early["gradients"], strict=True):
                assert len(a) == len(b) and all(map(torch.equal, a, b))
            assert (late["began"], late["kept"]) == (0, 0)
            assert early["began"] > STEPS and early["kept"] > 0, "they were summed early, in several buckets"


def trained(start_job, bucket_bytes, worker, **session):
    workers = start_job(shard_optimizer=True, **session).start_all({}, bucket_bytes=bucket_bytes, **worker)
    assert [each.join() for each in workers] == [0, 0, 0]
    check_history(workers)
    digests = {unit: value for each in workers for unit, value in each.events("done")[0]["digests"].items()}
    return [event["loss"] for event in workers[0].events("commit")], digests


@pytest.mark.parametrize(
    ("worker", "session"),
    [
        ({"parts": 3, "optimizer": "evermoe"}, {"max_grad_norm": 0.5}),
        ({"optimizer": "masters", "dtype": "bfloat16", "narrow": 2}, {"preset": "gemini"}),
        pytest.param({"compiled": True}, {}, marks=pytest.mark.long),
    ],
    ids=["micro-batches", "masters", "compiled"],
)
def test_a_session_trains_to_the_same_bits(start_job, worker, session):
    assert trained(start_job, 1, worker, **session) == trained(start_job, 0, worker, **session)


@pytest.mark.parametrize("action", ["kill", pytest.param("stop", marks=pytest.mark.long)])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_member_is_lost_while_its_gradients_are_summed(start_job, nth, action):
    """At its n-th bucket of the step, where others may be in backward, in the sum or at the vote."""
    fault = Fault("bucket", FAULT, action, nth=nth)
    workers = start_job(shard_optimizer=True).start_all({"b": [fault]}, bucket_bytes=1)
    a, b, c = workers
    assert [each.join() for each in (a, c)] == [0, 0]
    if action == "stop":
        b.signal(9)
    assert b.join() == -9
    assert b.events("fault"), "it came to this bucket"
    check_history(workers)
    for survivor in (a, c):
        recovered = check_recovered(workers, survivor)
        assert (recovered["step"], recovered["steps_lost"]) == (FAULT, 0), "the step was not taken by anybody"
        assert recovered["step"] >= committed_steps([b])
        [verified] = survivor.events("verified")
        assert verified["digests_mismatched"] == 0, verified["units"]
