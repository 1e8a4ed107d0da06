"""The profiler on real pipeline schedules of torch, over gloo.

ZBV is not among them: torch's first step sends from a rank to itself, which gloo cannot.
"""

from __future__ import annotations

import functools
import json
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evermoe.planning.schedule import CopyItem, Link, Memory, Receiver, plan_chunks
from evermoe.planning.windows import Span, StepProfile, Windows
from evermoe.profile import Profiler
from support.ranks import run_ranks

HIDDEN, ROWS, MICROBATCHES, STEPS = 128, 64, 4, 12
ROUNDING = 2e-3
"""Microseconds that times of a trace may be off: they count from the start of a week."""


def part(index):
    """A stage of the model: the same on every rank that asks for it."""
    generator = torch.Generator().manual_seed(index)
    modules = []
    for _ in range(2):
        linear = nn.Linear(HIDDEN, HIDDEN)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.uniform_(-0.1, 0.1, generator=generator)
        modules += [linear, nn.Tanh()]
    return nn.Sequential(*modules)


def stages_of(kind, size):
    return size if kind == "Schedule1F1B" else 2 * size


def schedule_of(kind, rank, size):
    """The schedule, and the modules of this rank's stages by their index."""
    from torch.distributed import pipelining as pp

    count = stages_of(kind, size)
    modules = {index: part(index) for index in range(rank, count, size)}
    example, cpu = torch.zeros(ROWS, HIDDEN), torch.device("cpu")
    stages = [
        pp.PipelineStage(module, index, count, cpu, input_args=(example,), output_args=(example,))
        for index, module in modules.items()
    ]
    loss = functools.partial(nn.functional.mse_loss, reduction="sum")
    schedule = getattr(pp, kind)(stages[0] if count == size else stages, MICROBATCHES, loss_fn=loss)
    return schedule, modules


def train(kind, rank, size, profiler=None):
    """Losses and gradients of all steps."""
    schedule, modules = schedule_of(kind, rank, size)
    first, last = 0 in modules, stages_of(kind, size) - 1 in modules
    optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=1e-4)
    found = []
    for number in (profiler.steps if profiler else iter)(range(STEPS)):
        generator = torch.Generator().manual_seed(100 + number)
        inputs, target = torch.randn(2, ROWS * MICROBATCHES, HIDDEN, generator=generator)
        losses = []
        optimizer.zero_grad()
        schedule.step(*([inputs] if first else []), **({"target": target, "losses": losses} if last else {}))
        found += [torch.stack(losses).detach()] if last else []
        found += [p.grad.clone() for module in modules.values() for p in module.parameters()]
        optimizer.step()
    return found


def wrapped():
    """Return the functions that the profiler wraps, as they are now."""
    from torch.distributed.pipelining.stage import _PipelineStageBase as Stage

    own = [dict(vars(owner)) for owner in (dist.ProcessGroup, dist.Work, Stage)]
    return [*own, torch.autograd.backward, torch.autograd.grad]


def pipeline(group, kind, folder):
    """Return what each rank found, as JSON; check that training is the same."""
    rank, size = group.rank, group.size
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    try:
        plain = train(kind, rank, size)
        before = wrapped()
        with Profiler() as profiler:
            profiled = train(kind, rank, size, profiler)
            during = wrapped()
        assert len(plain) == len(profiled) > 0
        assert all(torch.equal(a, b) for a, b in zip(plain, profiled, strict=True))
        assert before == wrapped()
        assert all(old != new for old, new in zip(before, during, strict=True))
        gathered = profiler.gather_windows()
        assert profiler.unfinished == 0
        dist.barrier()
    finally:
        dist.destroy_process_group()
    found = {
        "local": [recorded.step for recorded in profiler.recorded],
        "local_starts": [recorded.start for recorded in profiler.recorded],
        "steps": gathered.steps,
        "starts": gathered.starts,
        "windows": [windows.to_json() for windows in gathered.windows],
        "errors": gathered.clock_errors,
        "receivers": [[gathered.receiver(a, b).clock_offset for b in range(size)] for a in range(size)],
        "trace": gathered.trace(),
    }
    return json.dumps(found)


def as_step(row):
    return StepProfile(row[0], [Span(*span) for span in row[1]])


KINDS = [
    ("Schedule1F1B", 2),
    pytest.param(("Schedule1F1B", 4), marks=pytest.mark.long),
    ("ScheduleInterleaved1F1B", 2),
    ("ScheduleInterleavedZeroBubble", 2),
]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def run(request, tmp_path_factory):
    """Kind, size, and what each rank found."""
    kind, size = request.param
    folder = tmp_path_factory.mktemp("pipeline")
    found = [json.loads(text) for text in run_ranks(folder, size, pipeline, kind, str(folder))]
    for one in found:
        one["local"] = [as_step(row) for row in one["local"]]
        one["steps"] = [[as_step(row) for row in rows] for rows in one["steps"]]
    return kind, size, found


def check_every_microbatch_of_every_stage_occurs_once(run):
    kind, size, found = run
    kinds = ["backward input", "backward weight"] if "ZeroBubble" in kind else ["backward"]
    for rank, one in enumerate(found):
        stages = range(rank, stages_of(kind, size), size)
        chunks = [(stage, microbatch) for stage in stages for microbatch in range(MICROBATCHES)]
        for step in one["local"]:
            names = [span.name for span in step.spans if span.resource == "compute"]
            assert names.pop() == "optimizer SGD"
            for stage, microbatch in chunks:
                end = f" stage {stage} microbatch {microbatch}"
                assert names.count(f"forward{end}") == 1
                assert {name for name in names if name.startswith("backward") and name.endswith(end)} in (
                    {f"{k}{end}" for k in kinds},
                    {f"backward{end}"},  # zero-bubble schedules do the last ones in one go
                )
            assert len(set(names)) == len(names)


def check_transfers_have_peers_and_bytes(run):
    kind, size, found = run
    sends, receives = {}, {}
    for rank, one in enumerate(found):
        for span in one["local"][-1].spans:
            if span.resource == "network":
                assert span.kind in ("send", "receive")
                assert span.bytes == ROWS * HIDDEN * 4
                [peer] = span.peers
                pair, count = ((rank, peer), sends) if span.kind == "send" else ((peer, rank), receives)
                count[pair] = count.get(pair, 0) + 1
    assert sends == receives
    assert sum(sends.values()) == 2 * (stages_of(kind, size) - 1) * MICROBATCHES
    assert {(to - sender) % size for sender, to in sends} <= {1, size - 1}


def check_all_ranks_find_the_same(run):
    _, size, found = run
    for one in found[1:]:
        assert all(one[key] == found[0][key] for key in one if not key.startswith("local"))
    assert [len(steps) for steps in found[0]["steps"]] == [STEPS] * size


def transfers(step, kind, peer, start=0.0):
    """Beginning and end of the transfers with a peer, in order."""
    spans = [span for span in step.spans if span.kind == kind and list(span.peers) == [peer]]
    return sorted((start + span.start, start + span.start + span.seconds) for span in spans)


def pairs(size):
    return [(a, b) for a in range(size) for b in range(size) if a != b]


def check_both_ends_of_a_transfer_overlap(run):
    """On the shared clock, as each rank saw it alone."""
    _, size, found = run
    starts, errors = found[0]["starts"], found[0]["errors"]
    for number in range(STEPS):
        for sender, receiver in pairs(size):
            sent = transfers(found[sender]["local"][number], "send", receiver, starts[sender][number])
            got = transfers(found[receiver]["local"][number], "receive", sender, starts[receiver][number])
            error = errors[sender] + errors[receiver]
            assert len(sent) == len(got)
            for (begin, end), (other_begin, other_end) in zip(sent, got, strict=True):
                assert begin <= other_end + error
                assert other_begin <= end + error


def check_clocks_of_one_machine_are_one(run):
    """All processes here have the same monotonic clock: what round trips say about it must lie within their bound."""
    _, size, found = run
    for number in range(STEPS):
        origin = found[0]["starts"][0][number] - found[0]["local_starts"][number]
        for rank in range(size):
            error = found[0]["errors"][rank]
            assert found[0]["starts"][rank][number] - found[rank]["local_starts"][number] == pytest.approx(
                origin, abs=error + 1e-8
            )
    assert found[0]["errors"][0] == 0.0
    assert all(0 < error < 1 for error in found[0]["errors"][1:])
    for a, b in pairs(size):
        assert found[0]["receivers"][a][b] == pytest.approx(-found[0]["receivers"][b][a])


def check_waits_are_taken_off(run):
    """A transfer is within what both ends saw, but where it had to keep its place, and the sum is less."""
    _, size, found = run
    saw = was = 0.0
    for rank in range(size):
        for mine, met in zip(found[rank]["local"], found[0]["steps"][rank], strict=True):
            for peer in range(size):
                for kind in ("send", "receive"):
                    one, other = transfers(mine, kind, peer), transfers(met, kind, peer)
                    assert len(one) == len(other)
                    ends = zip(sorted(end for _, end in one), sorted(end for _, end in other), strict=True)
                    assert all(now <= then + 1e-6 for then, now in ends)
                    saw += sum(end - begin for begin, end in one)
                    was += sum(end - begin for begin, end in other)
    assert was < saw


def check_windows_lie_between_busy_spans(run):
    """In nearly every step: a window that opens after a span is over before the next transfer begins."""
    _, size, found = run
    for rank in range(size):
        windows = Windows.from_json(found[0]["windows"][rank])
        assert windows.steps_used > STEPS // 2
        network = [window for window in windows.windows if window.resource == "network"]
        assert network
        assert all(a.start + a.seconds <= b.start + 1e-9 for a, b in pairwise(network))
        for window in network:
            free = [is_free(step, window) for step in found[0]["steps"][rank]]
            assert free.count(True) >= windows.steps_used * 0.8


def is_free(step, window):
    """Whether no transfer of the step is in the window; None if the step has no such window."""
    spans = sorted((span for span in step.spans if span.resource == "network"), key=lambda span: span.start)
    anchors = [
        0.0 if window.after is None else span.start + span.seconds
        for span in spans
        if window.after in (None, span.name)
    ]
    if len(anchors) <= window.occurrence:
        return None
    opens = anchors[window.occurrence] + window.offset
    closes = opens + window.seconds
    return not any(span.start < closes - 1e-9 and span.start + span.seconds > opens + 1e-9 for span in spans)


def check_a_plan_fits_into_the_windows_of_both_ends(run):
    _, size, found = run
    sender, receiver = size - 1, size - 2
    theirs, mine = (Windows.from_json(found[0]["windows"][rank]) for rank in (receiver, sender))
    ends = [Receiver(receiver, theirs, found[0]["receivers"][sender][receiver])]
    piece = CopyItem("expert", 20_000, [receiver])
    plan = plan_chunks([piece], mine, Link(1e-6, 1e9), Memory(40_000, 4), policy="auto", receivers=ends)
    assert sum(chunk.bytes for chunk in plan.chunks) == 20_000
    for chunk in plan.chunks:
        if chunk.window is not None:
            assert chunk.start + chunk.seconds <= mine.windows[chunk.window].seconds + 1e-9


def check_trace(run):
    _, size, found = run
    events = json.loads(found[0]["trace"])["traceEvents"]
    assert {event["pid"] for event in events} == set(range(size))
    names = [(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"]
    assert names == [(rank, f"rank {rank}") for rank in range(size)]
    tracks = {}
    for event in (event for event in events if event["ph"] == "X"):
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        ends = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while ends and ends[-1] <= begin + ROUNDING:
                ends.pop()
            assert not ends or end <= ends[-1] + ROUNDING, "spans of a track overlap and do not nest"
            ends.append(end)
    for rank in range(size):
        mine = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        sent = sum(event["cat"] in ("send", "receive") for event in mine)
        assert sent == sum(span.resource == "network" for step in found[0]["steps"][rank] for span in step.spans)
        assert any(event["cat"] == "window" for event in mine)


CHECKS = [
    check_every_microbatch_of_every_stage_occurs_once,
    check_transfers_have_peers_and_bytes,
    check_all_ranks_find_the_same,
    check_both_ends_of_a_transfer_overlap,
    check_clocks_of_one_machine_are_one,
    check_waits_are_taken_off,
    check_windows_lie_between_busy_spans,
    check_a_plan_fits_into_the_windows_of_both_ends,
    check_trace,
]


def test_a_profile_of_all_ranks(run):
    """One job for all that is checked of it."""
    for check in CHECKS:
        check(run)
