"""The profiler: what it records and leaves alone, clocks, transfers seen from both ends, files."""

from __future__ import annotations

import json
import math
import random
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import evermoe
from commands import evermoe as command
from evermoe.errors import CorruptCopy
from evermoe.group import Group
from evermoe.parallel import reduce_dense
from evermoe.planning.schedule import Receiver, SentChunk, Span, Step, chrome_trace, find_windows
from evermoe.profile import GatheredProfile, Profiler, Recorded, clock_offset, meet
from evermoe.profile.clocks import Clock
from evermoe.profile.files import merge_files
from evermoe.profile.gathered import RankProfile, without_gaps
from evermoe.profile.meeting import in_one_order
from evermoe.profile.patches import Patches
from evermoe.profile.peers import connect, offset_of
from harness import wait_until
from ranks import run_ranks

CPU = torch.device("cpu")


def names(recorded, resource="compute"):
    return [span.name for span in recorded.step.spans if span.resource == resource]


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


# ---- one process


def test_an_ordinary_loop():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with Profiler(model) as profiler:
        for batch in profiler.steps(torch.randn(5, 4, 8)):
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [recorded.number for recorded in profiler.recorded] == [0, 1, 2, 3, 4]
    for recorded in profiler.recorded:
        spans = recorded.step.spans
        assert names(recorded) == ["forward", "backward", "optimizer AdamW"]
        assert [span.kind for span in spans] == ["forward", "backward", "optimizer"]
        assert all(a.start + a.seconds <= b.start for a, b in zip(spans, spans[1:], strict=False))
        assert all(span.seconds > 0 for span in spans)
        assert spans[-1].start + spans[-1].seconds <= recorded.step.seconds
        assert recorded.free_device_bytes is None
        assert recorded.free_host_bytes is None or recorded.free_host_bytes > 0
    starts = [recorded.start for recorded in profiler.recorded]
    ends = [recorded.start + recorded.step.seconds for recorded in profiler.recorded]
    assert starts[1:] == pytest.approx(ends[:-1], abs=1e-7)


class Parts(nn.Module):
    """Used without ever being called as a whole; its first block computes its forward again in the backward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def loss(self, x):
        x = torch.utils.checkpoint.checkpoint(self.blocks[0], x, use_reentrant=False)
        return self.head(self.blocks[1](x)).sum()


def test_a_model_that_is_used_in_parts():
    model = Parts()
    with Profiler(model) as profiler:
        model.loss(torch.randn(4, 8)).backward()
        profiler.step()
    assert names(profiler.recorded[0]) == ["forward blocks.0", "forward blocks.1", "forward head", "backward"]


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_models_stay_whole_graphs(in_place):
    from evermoe.profile import network

    class Casting(nn.Linear):
        def forward(self, x):
            return super().forward(x.to(torch.float64).to(torch.float32))

    model, graphs = nn.Sequential(Casting(8, 8), nn.Tanh()), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    x = torch.randn(4, 8)
    expected = model(x)
    torch._dynamo.reset()
    if in_place:
        model.compile(backend=backend, fullgraph=True)
        compiled = model
    else:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
    with Profiler(compiled) as profiler:
        network.attach_copies(profiler._recorder, profiler._patches)
        for _ in profiler.steps(range(2)):
            assert torch.equal(compiled(x), expected)
            compiled(x).sum().backward()
    assert torch.equal(compiled(x), expected)
    assert len(graphs) <= 2  # the second where the hooks are gone
    forwards = [] if in_place else ["forward", "forward"]
    assert names(profiler.recorded[1]) == [*forwards, "backward"]


def test_only_the_latest_steps_are_kept():
    with Profiler(keep=3) as profiler:
        for _ in range(7):
            profiler.step()
    assert [recorded.number for recorded in profiler.recorded] == [4, 5, 6]


def wrapped():
    return [dict(vars(owner)) for owner in (dist.ProcessGroup, dist.Work, Group, torch.autograd, torch.Tensor)]


def hooks(model):
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_everything_is_put_back_also_after_errors():
    from torch.optim import optimizer

    model, before = small_model(), wrapped()
    global_hooks = [dict(optimizer._global_optimizer_pre_hooks), dict(optimizer._global_optimizer_post_hooks)]
    profiler = Profiler(model)
    with pytest.raises(RuntimeError, match="shapes"), profiler:
        assert wrapped() != before
        assert sum(hooks(model)) > 0
        model(torch.randn(4, 7))
    assert wrapped() == before
    assert sum(hooks(model)) == 0
    assert [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks] == global_hooks
    model(torch.randn(4, 8)).sum().backward()
    assert profiler.recorded == []
    profiler.detach()  # once more does nothing
    profiler.step()
    assert profiler.recorded == []


def test_a_failed_forward_does_not_hide_what_follows():
    model = small_model()
    with Profiler(model) as profiler:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(4, 7))
        model(torch.randn(4, 8)).sum().backward()
        profiler.step()
    assert names(profiler.recorded[0]) == ["forward", "forward", "backward"]


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no step")


def test_a_failed_optimizer_costs_no_more_than_its_step():
    model = small_model()
    optimizer = Failing(model.parameters())
    with Profiler(model) as profiler:
        with pytest.raises(RuntimeError, match="no step"):
            optimizer.step()
        profiler.step()
        model(torch.randn(4, 8)).sum().backward()
        profiler.step()
    assert names(profiler.recorded[0]) == []
    assert names(profiler.recorded[1]) == ["forward", "backward"]


def test_what_others_wrapped_meanwhile_stays():
    owner = SimpleNamespace(method=lambda: "original")
    original, patches = owner.method, Patches()
    patches.replace(owner, "method", lambda method: lambda: f"ours({method()})")
    ours = owner.method
    owner.method = lambda: f"theirs({ours()})"
    patches.undo()
    assert owner.method() == "theirs(ours(original))"
    other = SimpleNamespace(method=original)
    patches.replace(other, "method", lambda method: lambda: f"ours({method()})")
    patches.replace(other, "method", lambda method: lambda: f"twice({method()})")
    patches.replace(other, "absent", lambda method: method)
    assert other.method() == "ours(original)"
    patches.undo()
    assert other.method is original
    assert not hasattr(other, "absent")


def test_copies_between_host_and_device():
    """The meta device stands for a GPU: what is wrapped does not care."""
    from evermoe.profile import network
    from evermoe.profile.recorder import Recorder

    recorder, patches, before = Recorder(Clock(CPU), 5), Patches(), wrapped()
    network.attach_copies(recorder, patches)
    try:
        recorder.start()
        there = torch.ones(10).to("meta")
        torch.ones(10).to(torch.float64)
        there.copy_(torch.ones(10))
        torch.ones(3).copy_(torch.ones(3))
        there.to("meta")
        recorder.next_step()
    finally:
        patches.undo()
    assert wrapped() == before
    [step] = recorder.steps()
    assert [(*span[:3], span.bytes) for span in step.step.spans] == [("copy to device", "copy", "host_link", 40)] * 2


def test_a_span_of_the_users_own():
    with Profiler() as profiler:
        with profiler.span("to the store", "send", "network", bytes=7, peers=[3]):
            time.sleep(0.002)
        profiler.step()
    with profiler.span("not recorded", "copy", "host_link"):
        pass
    [span] = profiler.recorded[0].step.spans
    assert (span.name, span.kind, span.resource, span.bytes, list(span.peers)) == (
        "to the store",
        "send",
        "network",
        7,
        [3],
    )
    assert span.seconds >= 0.002


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="keep >= 1, got 0"):
        Profiler(keep=0)
    profiler = Profiler()
    for call in (profiler.windows, lambda: profiler.write_trace("nowhere")):
        with pytest.raises(ValueError, match="no step is over yet"):
            call()
    with pytest.raises(ValueError, match=r"call of windows\(\)"):
        profiler.changed()
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        profiler.gather_windows()
    with pytest.raises(ValueError, match="got 3"):
        profiler.gather_windows(3)


def test_a_change_is_noticed():
    with Profiler() as profiler:

        def step(*transfers):
            for name in transfers:
                with profiler.span(name, "send", "network"):
                    pass
            profiler.step()

        for _ in range(6):
            step("a", "b")
        assert profiler.windows().steps_used == 6
        for _ in range(4):
            step("a", "c")
        assert profiler.changed() is None  # too few to say
        step("a", "c")
        change = profiler.changed()
        assert change.what == "sequence" and change.resource == "network"
        profiler.windows()


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
    there, stay, back = (chance.expovariate(1e3) for _ in range(3))
    asked = chance.uniform(0, 1e4)
    came = asked + there + true
    answered = came + stay
    found = offset_of(asked, came, answered, answered - true + back)
    assert abs(found.seconds - true) <= found.error + 2e-9
    assert found.error == pytest.approx((there + back) / 2, abs=1e-8)


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


def moe_loop(group, folder):
    """Data and expert parallel: a layer whose experts are on both ranks, dense gradients reduced."""

    def train(profiler=None):
        torch.manual_seed(7)
        layer = evermoe.MoE(16, 32, num_experts=4)
        layer.experts = [2 * group.rank, 2 * group.rank + 1]
        layer.weights = nn.Parameter(layer.weights.detach()[layer.experts].clone())
        layer.group, layer.matrix_RE = group, torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]).numpy()
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        found = []
        for number in (profiler.steps if profiler else iter)(range(8)):
            generator = torch.Generator().manual_seed(10 * number + group.rank)
            x = torch.randn(64, 16, generator=generator).requires_grad_()
            loss = layer(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            reduce_dense([layer.router.weight], group)
            found += [loss.detach(), layer.weights.grad.clone(), layer.router.weight.grad.clone()]
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


# ---- what both ends saw


def transfer(name, kind, start, seconds, peers):
    return Span(name, kind, "network", start, seconds, 64, peers)


def test_a_collective_begins_with_its_last_member():
    spans = [
        transfer("sum", "collective", start, 9.0 - start, [p for p in range(3) if p != rank])
        for rank, start in enumerate((1.0, 5.0, 2.0))
    ]
    met = meet([Step(10.0, [span]) for span in spans], [0.0, 0.0, 0.0])
    assert [(step.spans[0].start, step.spans[0].seconds) for step in met] == [(5.0, 4.0)] * 3


def test_several_messages_meet_in_order():
    sends = [transfer("send to 1", "send", start, 1.0, [1]) for start in (4.0, 6.0)]
    receives = [
        transfer("receive from 0", "receive", start, end - start, [0]) for start, end in ((0.0, 4.5), (1.0, 9.0))
    ]
    compute = Span("forward", "forward", "compute", 0.0, 4.0)
    met = meet([Step(10.0, [compute, *sends]), Step(10.0, receives[::-1])], [0.0, 0.0])
    assert met[0].spans[0] == compute
    assert [(span.start, span.seconds) for span in met[0].spans[1:]] == [(4.0, 0.5), (6.0, 1.0)]
    assert [(span.start, span.seconds) for span in met[1].spans] == [(6.0, 1.0), (4.0, 0.5)]


def test_what_was_seen_at_one_end_alone_stays():
    lonely = [transfer("send to 1", "send", 1.0, 2.0, [1]), transfer("sum", "collective", 4.0, 1.0, [1, 2])]
    partly = [transfer("sum", "collective", 4.5, 1.0, [0, 2])]
    steps = [Step(9.0, lonely), Step(9.0, partly), Step(9.0, [])]
    assert meet(steps, [0.0, 0.0, 0.0]) == steps


def test_clocks_that_are_off_make_no_negative_times():
    """The receiver had it before the sender began: no transfer takes less than no time."""
    send, receive = transfer("s", "send", 5.0, 2.0, [1]), transfer("r", "receive", 1.0, 3.9, [0])
    met = meet([Step(9.0, [send]), Step(9.0, [receive])], [0.0, 0.0])
    assert [(step.spans[0].start, step.spans[0].seconds) for step in met] == [pytest.approx((4.9, 0.0))] * 2


@pytest.mark.parametrize("seed", range(30))
def test_one_order(seed):
    """Sequences are equal afterwards, ends stay, and busy time never shrinks."""
    chance = random.Random(seed)
    steps = []
    for _ in range(8):
        spans = [transfer(f"t{i}", "send", chance.uniform(i, i + 3), chance.uniform(0.1, 1), [1]) for i in range(5)]
        spans += [transfer("twice", "receive", chance.uniform(0, 8), 0.5, [1]) for _ in range(2)]
        chance.shuffle(spans)
        steps.append(Step(12.0, [*spans, Span("forward", "forward", "compute", 0.0, 1.0)]))
    ordered = in_one_order(steps)
    sequences = {
        tuple(s.name for s in sorted((s for s in step.spans if s.resource == "network"), key=lambda span: span.start))
        for step in ordered
    }
    assert len(sequences) == 1
    for before, after in zip(steps, ordered, strict=True):
        for old, new in zip(before.spans, after.spans, strict=True):
            assert new.start <= old.start
            assert new.start + new.seconds == pytest.approx(old.start + old.seconds)
            assert new._replace(start=0, seconds=0) == old._replace(start=0, seconds=0)
    assert in_one_order(ordered) == ordered


def test_other_steps_keep_their_order():
    usual = [Step(9.0, [transfer("a", "send", 1.0, 1.0, [1])])] * 2
    odd = Step(9.0, [transfer("b", "send", 1.0, 1.0, [1])])
    assert in_one_order([*usual, odd]) == [*usual, odd]


# ---- profiles and files


def profile_of(rank, starts):
    step = Step(1.0, [transfer("sum", "collective", 0.25, 0.5, [1 - rank])])
    return RankProfile([Recorded(n, start, step, 100 - n, None) for n, start in enumerate(starts)], 0.001 * rank)


def test_profiles_travel_as_bytes():
    profile = profile_of(0, [10.0, 11.5])
    back = RankProfile.from_bytes(profile.to_bytes())
    assert back.clock_error == profile.clock_error
    assert [(r.number, r.start, r.step.seconds, [Span(*s) for s in r.step.spans]) for r in back.recorded] == [
        (r.number, r.start, r.step.seconds, list(r.step.spans)) for r in profile.recorded
    ]
    for broken in (b"", profile.to_bytes()[:-9], b"x\x9c\x03\x00\x00\x00\x00\x01"):
        with pytest.raises(CorruptCopy, match="the profile of a rank"):
            RankProfile.from_bytes(broken)


def test_gathered_profiles():
    gathered = GatheredProfile([profile_of(0, [10.0, 12.0]), profile_of(1, [10.1, 12.3])], quantile=0.1, gamma=0.9)
    assert gathered.clock_errors == [0.0, 0.001]
    assert gathered.free_device_bytes == [99, 99]
    assert gathered.free_host_bytes == [None, None]
    receiver = gathered.receiver(0, 1)
    assert isinstance(receiver, Receiver) and receiver.rank == 1
    assert receiver.clock_offset == pytest.approx(0.2)
    with pytest.raises(ValueError, match="one for each of 2 ranks, got 1"):
        gathered.trace([None])
    starts = [e["ts"] for e in json.loads(gathered.trace())["traceEvents"] if e["name"] == "sum"]
    assert starts == pytest.approx([10.35e6, 12.55e6] * 2)


def test_gaps_between_steps_are_idle():
    step = Step(1.0, [])
    assert without_gaps([step] * 3, [5.0, 6.0, 9.0]) == [Step(1.0, []), Step(3.0, []), Step(1.0, [])]


def test_trace_files(tmp_path):
    paths = [tmp_path / f"{rank}.json" for rank in range(2)]
    for rank, path in enumerate(paths):
        path.write_text(chrome_trace([Step(1.0, [])], rank=rank))
    out = tmp_path / "out.json"
    assert merge_files(paths, out) == [0, 1]
    good = out.read_text()
    for bad, message in (
        ([paths[0], paths[0]], "0"),
        ([paths[0], tmp_path / "absent.json"], "absent.json: expected a trace of one rank; .*No such file"),
        ([tmp_path / "no.json"], "no.json: expected a trace of one rank"),
    ):
        (tmp_path / "no.json").write_text("[1, 2")
        with pytest.raises(ValueError, match=message):
            merge_files(bad, out)
        assert out.read_text() == good
    done = command("trace", "absent.json", folder=tmp_path)
    assert done.returncode == 2
    assert "absent.json: expected a trace of one rank" in done.stderr
    done = command("trace", "0.json", "--out", "nowhere/x.json", folder=tmp_path)
    assert done.returncode == 2
    assert "nowhere/x.json: cannot be written" in done.stderr
    done = command("trace", "0.json", "--plot", "out.png", folder=tmp_path)
    assert done.returncode == 2
    assert "the trace has no events to draw" in done.stderr
    spans = [Span("forward", "forward", "compute", 0.1, 0.5), Span("sum", "collective", "network", 0.6, 0.2, 8, [1])]
    sent = [SentChunk(0.2, 0.1, 64, 1, 0), SentChunk(0.3, 0.1, 64, 1)]
    paths[0].write_text(chrome_trace([Step(1.0, spans)] * 2, find_windows([Step(1.0, spans)]), sent=sent))
    for name, begin in (("out.png", b"\x89PNG"), ("out.svg", b"<?xml")):
        assert command("trace", "0.json", "--plot", name, folder=tmp_path).returncode == 0
        assert (tmp_path / name).read_bytes().startswith(begin)
    done = command("trace", "0.json", "--plot", "nowhere/x.png", folder=tmp_path)
    assert done.returncode == 2
    assert "nowhere/x.png: cannot be written" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu():
    """Spans are those of the stream: as long as the work, although the host has gone on."""
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)
    model = nn.Linear(4096, 4096, device=device)
    with Profiler(model) as profiler:
        for _ in profiler.steps(range(6)):
            for _ in range(4):
                loss = model(a).sum()
            loss.backward()
            a.copy_(torch.empty(4096, 4096))
    for recorded in profiler.recorded[1:]:
        spans = recorded.step.spans
        assert names(recorded) == ["forward"] * 4 + ["backward"]
        assert names(recorded, "host_link") == ["copy to device"]
        assert all(span.seconds > 1e-4 for span in spans), "137 GFLOP or 64 MB take longer"
        assert all(x.start + x.seconds <= y.start + 1e-5 for x, y in zip(spans, spans[1:], strict=False))
        assert spans[-1].start + spans[-1].seconds <= recorded.step.seconds + 1e-5
        assert recorded.free_device_bytes > 0
        assert math.isfinite(recorded.start)
