"""Buckets of gradients that are summed concurrently with backward: the same bits, and deaths in each of them."""

from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from evermoe import MoE
from evermoe.comm import arrivals
from evermoe.comm.group import Group
from evermoe.session import buckets as buckets_module
from evermoe.session.bucket import plan_buckets
from evermoe.session.buckets import Buckets
from evermoe.state.training_state import TrainingState
from support.harness import PATIENCE
from support.history import check_history, check_recovered, committed_steps
from support.ranks import run_each, run_threads
from support.worker import Fault

SIZE = 3
FAULT = 5
STEPS = 6
KINDS = ["once", "twice", "more", "fewer", "clipped", "replaced", "removed", "frozen"]
HOSTS = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]])
"""Expert 0 is on all ranks, each of the others on one."""


class Shared(nn.Module):
    """A weight that is used twice, one that not every rank uses, one that none does, a transposed one, and experts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = nn.Parameter(self.second.weight.detach().t())
        self.experts = MoE(8, 8, 4, top_k=1).experts
        self.rare, self.unused, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x, is_rare):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        x = torch.tanh(self.first(x))
        scale = self.experts.weights.sum() if is_rare else 1.0
        return (self.last(self.rare(x) if is_rare else x) * scale).square().mean()


def computed(model, rank, step, kind):
    """Backpropagate as a script may; yield before each backpropagation."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    if step >= 3:
        model.rare.requires_grad_(True)
    for part in range({"twice": 2, "more": 1 + step // 3, "fewer": 3 - step // 2}.get(kind, 1)):
        yield
        is_rare = (step + rank + part) % 4 == 0 or (kind == "removed" and rank == 1)
        model(torch.randn(4, 8, generator=generator), is_rare=is_rare).backward()
    if kind == "clipped" and step % 2 and rank == 1:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    if kind == "replaced" and rank == 1:
        model.second.weight.grad = model.second.weight.grad * 2
    if kind == "removed" and rank == 1 and step % 2:
        model.experts.weights.grad = model.last.weight.grad = None


def place(model, is_sharded, rank):
    """Return the state of a model whose experts are placed by `HOSTS`; units have the ranks as owners, in turn."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState(model, optimizer, is_sharded=is_sharded)
    state.adopt({"experts": np.flatnonzero(HOSTS[rank]).tolist()}, {})
    model.experts.matrix_RE = HOSTS
    state.owners.place({unit: number % SIZE for number, unit in enumerate(state.owners.units)})
    return state


def connect(group, folder):
    side = Group()
    side.rebuild(
        dist.FileStore(f"{folder}/side", group.size),
        group.rank,
        group.size,
        torch.device("cpu"),
        timedelta(seconds=PATIENCE / 2),
    )
    return side


def members(group, side):
    """The groups of members without islands."""
    return SimpleNamespace(trainer_group=group, side_group=side, groups=SimpleNamespace(position=Group()))


def summed(group, folder, kind, is_sharded):
    """Return the gradients of this rank after each step: local ones, sums without a background, and with one."""
    buckets_module.BUCKET_BYTES, arrivals.PATIENT_STEPS = 64, 1
    side, found = connect(group, folder), []
    for is_early in (False, True):
        model, local, sums, early = Shared(), [], [], []
        state = place(model, is_sharded, group.rank)
        parameters = dict(model.named_parameters())
        membership = members(group, side if is_early else Group())
        buckets = Buckets(model, state, membership, torch.device("cpu"))
        for step in range(STEPS):
            model.zero_grad(set_to_none=True)
            if step == 0:
                model.rare.requires_grad_(kind != "frozen" and (kind != "removed" or group.rank == 1))
                buckets.plan()
            buckets.begin_step()
            for _ in computed(model, group.rank, step, kind):
                buckets.begin_backward()
            early.append(len(buckets._sums))
            local.append({name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()})
            buckets.complete()
            buckets.reduce()
            assert all(each.isfinite() for each in buckets.extremes)
            sums.append({name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()})
            assert is_sharded or len(buckets.flats.replicated) >= 4
        buckets.close()
        found.append({"local": local, "sums": sums, "early": early, "buckets": len(buckets._buckets)})
    return found


def expected(results, rank, step, name, is_sharded, owners):
    """Return the sum of the local gradients in rank order, as this rank has it; None for no gradient."""
    local = [result["local"][step][name] for result in results]
    if all(each is None for each in local):
        return None
    if name == "experts.weights":
        some = next(each for each in local if each is not None)
        local = [torch.zeros_like(some) if each is None else each for each in local]
        mine = local[rank].clone()
        mine[0] = local[0][0] + local[1][0] + local[2][0]
        return mine
    if is_sharded and owners[name] != rank:
        return None
    return sum(torch.zeros(()) if each is None else each for each in local)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicated", "sharded"])
def test_sums_have_the_same_bits_whenever_they_begin(tmp_path, is_sharded):
    for kind in KINDS:
        (tmp_path / kind).mkdir()
    owners = {}
    state = place(model := Shared(), is_sharded, 0)
    for unit, owner in state.owners.by_unit.items():
        owned = {id(tensor) for tensor in state.dense_tensors(unit).values()}
        owners |= {name: owner for name, p in model.named_parameters() if id(p) in owned}
    each = run_each(tmp_path, SIZE, summed, [(str(tmp_path / kind), kind, is_sharded) for kind in KINDS])
    for kind, results in zip(KINDS, each, strict=True):
        for step in range(STEPS):
            for rank, (late, early) in enumerate(results):
                for name, total in early["sums"][step].items():
                    mine = expected([result[1] for result in results], rank, step, name, is_sharded, owners)
                    if mine is None:
                        assert total is None, (kind, step, name)
                    else:
                        torch.testing.assert_close(total, mine, msg=f"{kind} {step} {name}")
                        assert torch.equal(total, late["sums"][step][name]), (kind, step, name)
        for late, early in results:
            assert late["early"] == [0] * STEPS and early["early"][0] == 0
            if kind not in ("more", "fewer", "frozen"):
                assert max(early["early"]) == early["buckets"] - 1 > 3


def test_most_bytes_leave_during_backward(tmp_path):
    """All but the last bucket, counted at the beginning of the collectives."""

    def bytes_before_the_end(group, folder):
        buckets_module.BUCKET_BYTES = 1 << 12
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(16)))
        state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
        side = connect(group, folder)
        buckets = Buckets(model, state, members(group, side), torch.device("cpu"))
        buckets.plan()
        shares = []
        for _ in range(2):
            model.zero_grad()
            buckets.begin_step()
            buckets.begin_backward()
            model(torch.ones(1, 32)).sum().backward()
            sent = sum(p.nbytes for bucket in buckets._buckets[: len(buckets._sums)] for p in bucket.parameters)
            shares.append(sent / sum(p.nbytes for p in model.parameters()))
            buckets.complete()
            buckets.reduce()
        buckets.close()
        return shares

    for first, second in run_threads(tmp_path, 2, bytes_before_the_end, str(tmp_path)):
        assert first == 0 and second > 0.9


def test_buckets_have_all_parameters_once_and_the_last_first():
    model = Shared()
    state = place(model, False, 0)
    parameters, layers = list(model.parameters()), list(state.layers.values())
    for nbytes in (1, 300, 700, 1 << 20):
        found = plan_buckets(parameters, layers, {}, 0, SIZE, nbytes)
        order = {id(p): number for number, p in enumerate(parameters)}
        numbers = [sorted(order[id(p)] for p in bucket.parameters) for bucket in found]
        assert sorted(n for some in numbers for n in some) == list(range(len(parameters)))
        assert all(before[0] > after[-1] for before, after in zip(numbers, numbers[1:], strict=False))
        for bucket in found:
            *_, smallest = sorted(bucket.parameters, key=lambda p: -order[id(p)])
            counted = sum(p.nbytes for p in bucket.parameters if p is not model.experts.weights and p is not smallest)
            assert counted < nbytes, "a bucket is full with its last parameter"
    assert plan_buckets([], [], {}, 0, SIZE, 1)[0].parameters == [], "flags are sent even if nothing is trained"


def trained(start_job, bucket_bytes, worker, **session):
    workers = start_job(**session).start_all({}, bucket_bytes=bucket_bytes, **worker)
    assert [each.join() for each in workers] == [0, 0, 0]
    check_history(workers)
    digests = {unit: value for each in workers for unit, value in each.events("done")[0]["digests"].items()}
    return [event["loss"] for event in workers[0].events("commit")], digests


@pytest.mark.parametrize(
    ("worker", "session"),
    [
        ({"parts": 3, "optimizer": "evermoe"}, {"shard_optimizer": True, "max_grad_norm": 0.5}),
        ({"optimizer": "masters", "dtype": "bfloat16", "narrow": 2}, {"shard_optimizer": True, "preset": "gemini"}),
        pytest.param({"compiled": True}, {"shard_optimizer": True}, marks=pytest.mark.long),
    ],
    ids=["micro-batches", "masters", "compiled"],
)
def test_a_session_trains_to_the_same_bits(start_job, worker, session):
    assert trained(start_job, 1, worker, **session) == trained(start_job, 1 << 30, worker, **session)


@pytest.mark.parametrize("action", ["kill", pytest.param("stop", marks=pytest.mark.long)])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("nth", [1, 3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4, 5, 6, 7, 8))])
def test_a_member_is_lost_while_its_gradients_are_summed(start_job, nth, is_sharded, action):
    """At its n-th collective of a bucket, where others may be in backward, in the sum or at the vote."""
    fault = Fault("bucket", FAULT, action, nth=nth)
    workers = start_job(shard_optimizer=is_sharded).start_all({"b": [fault]}, bucket_bytes=1)
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
