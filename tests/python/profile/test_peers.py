"""Clocks, of the GPU and of other ranks, and the profiler on several ranks of real groups."""

from __future__ import annotations

import json
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import evermoe
from evermoe.comm.group import Group
from evermoe.profile import Profiler
from evermoe.profile.clocks import Clock
from evermoe.profile.peers import clock_offset, connect, offset_of
from support.commands import evermoe as command
from support.harness import wait_until
from support.ranks import run_ranks, sum_gradients

CPU = torch.device("cpu")


# ---- clocks


class FakeEvent:
    """An event of a stream whose clock runs fast and started at another time; it is reached a while later."""

    host = 0.0
    """Nanoseconds of the host now."""
    LAG = 300e3

    def record(self):
        self.at = FakeEvent.host + FakeEvent.LAG

    def synchronize(self):
        FakeEvent.host = max(FakeEvent.host, self.at)

    def query(self):
        return self.at <= FakeEvent.host

    def elapsed_time(self, other):
        milliseconds = (other.at - self.at) / 1e6
        return struct_float32(milliseconds)


def struct_float32(value):
    return torch.tensor(value, dtype=torch.float32).item()


def test_events_become_times_of_the_host(monkeypatch):
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(FakeEvent.host))
    FakeEvent.host = 1e9
    clock = Clock(torch.device("cuda", 0), FakeEvent)
    last, worst = None, 0.0
    for _ in range(2000):  # a long run: 33 minutes
        FakeEvent.host += 1e9
        mark = clock.mark()
        expected = mark.at
        assert not mark.query()
        worst = max(worst, abs(clock.nanoseconds(mark) - expected))
        clock.advance(mark)
        assert last is None or clock.nanoseconds(mark) > last
        last = clock.nanoseconds(mark)
    assert worst < 50_000  # 2000 roundings of a second in float32 milliseconds
    clock.anchor()
    mark = clock.mark()
    assert clock.nanoseconds(mark) == pytest.approx(mark.at, abs=200)
    assert clock.nanoseconds(clock.mark(CPU)) == pytest.approx(FakeEvent.host, abs=1)


@pytest.mark.parametrize("seed", range(20))
def test_offsets_lie_within_their_error(seed):
    """Round trips of any asymmetry."""
    chance = random.Random(seed)
    true = chance.uniform(-1e3, 1e3)
    out, stay, back = (chance.expovariate(1e3) for _ in range(3))
    asked = chance.uniform(0, 1e4)
    came = asked + out + true
    answered = came + stay
    found = offset_of(asked, came, answered, answered - true + back)
    assert abs(found.seconds - true) <= found.error + 2e-9
    assert found.error == pytest.approx((out + back) / 2, abs=1e-8)


# ---- several ranks


def skewed_clock(group):
    """Rank 1's clock is behind by 5 seconds, rank 2's ahead by 1000."""
    ahead = [0.0, -5.0, 1000.0][group.rank]
    return list(clock_offset(connect(group), rounds=8, now=lambda: time.perf_counter_ns() / 1e9 + ahead))


def test_clocks_of_ranks_are_compared(tmp_path):
    found = run_ranks(tmp_path, 3, skewed_clock)
    assert found[0] == [0.0, 0.0]
    for (offset, error), true in zip(found[1:], (5.0, -1000.0), strict=True):
        assert abs(offset - true) <= error + 2e-9
        assert 0 < error < 1


def wrapped():
    return [dict(vars(owner)) for owner in (dist.ProcessGroup, dist.Work, Group, torch.autograd, torch.Tensor)]


def moe_loop(group, folder):
    """Data and expert parallel: a layer whose experts are on both ranks, dense gradients reduced."""

    def train(profiler=None):
        torch.manual_seed(7)
        layer = evermoe.MoE(16, 32, num_experts=4)
        layer.experts.ids = [2 * group.rank, 2 * group.rank + 1]
        layer.experts.weights = nn.Parameter(layer.experts.weights.detach()[layer.experts.ids].clone())
        layer.experts.group, layer.experts.matrix_RE = group, torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]).numpy()
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        found = []
        for number in (profiler.steps if profiler else iter)(range(8)):
            generator = torch.Generator().manual_seed(10 * number + group.rank)
            x = torch.randn(64, 16, generator=generator).requires_grad_()
            loss = layer(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            sum_gradients([layer.router.weight], group)
            found += [loss.detach(), layer.experts.weights.grad.clone(), layer.router.weight.grad.clone()]
            optimizer.step()
        return found

    before = wrapped()
    plain = train()
    torch.manual_seed(7)
    with Profiler(rank=group.rank) as profiler:
        profiled = train(profiler)
    assert wrapped() == before
    assert all(torch.equal(a, b) for a, b in zip(plain, profiled, strict=True))
    gathered = profiler.gather_windows(group)
    profiler.write_trace(f"{folder}/rank-{group.rank}.json")
    steps = [[[span._asdict() for span in step.spans] for step in each] for each in gathered.steps]
    return json.dumps([steps, [r.number for r in profiler.recorded], gathered.clock_errors, gathered.free_host_bytes])


def test_an_expert_parallel_loop(tmp_path):
    found = [json.loads(text) for text in run_ranks(tmp_path, 2, moe_loop, str(tmp_path))]
    assert found[0][0] == found[1][0]
    assert found[0][1] == found[1][1] == list(range(8))
    assert found[0][2:] == found[1][2:]
    for rank, steps in enumerate(found[0][0]):
        for spans in steps:
            network = sorted((s for s in spans if s["resource"] == "network"), key=lambda span: span["start"])
            order = ["all_gather", "all_to_all", "all_to_all", "all_to_all", "all_to_all", "all_reduce"]
            assert [span["name"] for span in network] == order
            assert all(span["peers"] == [1 - rank] for span in network)
            assert network[0]["bytes"] == 4 * 8  # the counts of 4 experts
            assert network[-1]["bytes"] == 4 * 16 * 4  # the router's gradient
            assert sum(span["name"] == "backward" for span in spans) == 1
            backward = next(span for span in spans if span["name"] == "backward")
            inside = [s for s in network if backward["start"] <= s["start"] <= backward["start"] + backward["seconds"]]
            assert [span["name"] for span in inside] == ["all_to_all"] * 2
    done = command("trace", "rank-0.json", "rank-1.json", "--out", "both.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "both.json: ranks 0, 1" in done.stdout
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    sums = [event for event in events if event["name"] == "all_reduce"]
    assert {event["pid"] for event in sums} == {0, 1}
    mine, theirs = ([event for event in sums if event["pid"] == rank] for rank in (0, 1))
    assert len(mine) == len(theirs) == 8
    for a, b in zip(mine, theirs, strict=True):  # a sum ends nowhere before it has begun everywhere
        assert min(a["ts"] + a["dur"], b["ts"] + b["dur"]) >= max(a["ts"], b["ts"]) - 1e6 * sum(found[0][2]) - 1


def torch_collectives(group, folder):
    """All functions of torch.distributed that move tensors, plain and asynchronous."""
    rank, size = group.rank, group.size
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    other, ones = 1 - rank, torch.ones(8)
    try:
        with Profiler() as profiler:
            gathered, one = [torch.empty(8), torch.empty(8)], torch.empty(4)
            dist.all_reduce(ones.clone())
            dist.all_gather(gathered, ones)
            dist.all_gather_into_tensor(torch.empty(16), ones)
            dist.reduce_scatter_tensor(one, ones.clone())
            dist.all_to_all_single(torch.empty(8), ones)
            dist.broadcast(ones.clone(), 0)
            dist.barrier()
            (dist.send if rank == 0 else dist.recv)(ones.clone(), other)
            operations = [dist.P2POp(dist.isend, ones, other), dist.P2POp(dist.irecv, torch.empty(8), other)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            assert profiler._recorder._works.keyrefs() == []
            profiler.step()
            work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
            [span] = profiler._recorder._step.spans
            wait_until(lambda: span.end is not None, "the end of a sum that nobody waits for")
            end = span.end
            work.wait()
            assert span.end == end
            profiler.step()
            lost = dist.isend(ones, other) if rank == 0 else dist.irecv(torch.empty(8), other)
            profiler.step()
            profiler.step()
            lost.wait()
        steps = profiler.recorded
        unfinished = profiler.unfinished
        with pytest.raises(ValueError, match="no step in common"):
            Profiler().gather_windows()
    finally:
        dist.barrier()
        dist.destroy_process_group()
    first = [[span.name, span.kind, span.bytes, list(span.peers)] for span in steps[0].step.spans]
    return json.dumps([first, steps[1].step.spans, [len(r.step.spans) for r in steps[2:]], unfinished])


def test_everything_of_torch_distributed(tmp_path):
    for rank, text in enumerate(run_ranks(tmp_path, 2, torch_collectives, str(tmp_path))):
        first, second, rest, unfinished = json.loads(text)
        other = [1 - rank]
        to, source = f"send to {1 - rank}", f"receive from {1 - rank}"
        assert first[:7] == [
            ["all_reduce", "collective", 32, other],
            ["all_gather", "collective", 64, other],
            ["all_gather", "collective", 64, other],
            ["reduce_scatter", "collective", 32, other],
            ["all_to_all", "collective", 32, other],
            ["broadcast", "collective", 32, other],
            ["barrier", "collective", 0, other],
        ]
        assert first[7:] == [
            [to, "send", 32, other] if rank == 0 else [source, "receive", 32, other],
            [to, "send", 32, other],
            [source, "receive", 32, other],
        ]
        [[name, _, _, _, seconds, nbytes, _]] = second
        assert (name, nbytes) == ("all_reduce", 4 << 20)
        assert seconds > 0
        assert rest == [0, 0]
        assert unfinished == 1


def steps_differ(group):
    with Profiler() as profiler:
        for _ in range(3 + group.rank):
            profiler.step()
    return profiler.gather_windows(group).size, len(profiler.recorded)


def test_ranks_with_different_steps_share_those_that_both_have(tmp_path):
    assert [tuple(found) for found in run_ranks(tmp_path, 2, steps_differ)] == [(2, 3), (2, 4)]
