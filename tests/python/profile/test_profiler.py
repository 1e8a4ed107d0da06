"""The profiler in one process: what it records and leaves alone."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evermoe.comm.group import Group
from evermoe.profile import Profiler
from evermoe.profile.clocks import Clock
from evermoe.profile.patches import Patches

CPU = torch.device("cpu")


def names(recorded, resource="compute"):
    return [span.name for span in recorded.step.spans if span.resource == resource]


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


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
    """Its parts are called, not the module itself; its first block computes its forward again in the backward."""

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
def test_compiled_models_stay_single_graphs(in_place):
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
        made = torch.ones(10).to("meta")
        torch.ones(10).to(torch.float64)
        made.copy_(torch.ones(10))
        torch.ones(3).copy_(torch.ones(3))
        made.to("meta")
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


@pytest.mark.gpu
@pytest.mark.chip
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
