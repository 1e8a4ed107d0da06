"""Both ends of a transfer make one profile; profiles and traces as bytes and files."""

from __future__ import annotations

import json
import random

import pytest

from evermoe.errors import CorruptCopy
from evermoe.planning.schedule import Receiver
from evermoe.planning.trace import SentChunk, chrome_trace
from evermoe.planning.windows import Span, StepProfile, find_windows
from evermoe.profile.files import merge_files
from evermoe.profile.gathered import GatheredProfile, RankProfile, without_gaps
from evermoe.profile.meeting import in_one_order, meet
from evermoe.profile.recorder import Recorded
from support.commands import evermoe as command

# ---- what both ends saw


def transfer(name, kind, start, seconds, peers):
    return Span(name, kind, "network", start, seconds, 64, peers)


def test_a_collective_begins_with_its_last_member():
    spans = [
        transfer("sum", "collective", start, 9.0 - start, [p for p in range(3) if p != rank])
        for rank, start in enumerate((1.0, 5.0, 2.0))
    ]
    met = meet([StepProfile(10.0, [span]) for span in spans], [0.0, 0.0, 0.0])
    assert [(step.spans[0].start, step.spans[0].seconds) for step in met] == [(5.0, 4.0)] * 3


def test_several_messages_meet_in_order():
    sends = [transfer("send to 1", "send", start, 1.0, [1]) for start in (4.0, 6.0)]
    receives = [
        transfer("receive from 0", "receive", start, end - start, [0]) for start, end in ((0.0, 4.5), (1.0, 9.0))
    ]
    compute = Span("forward", "forward", "compute", 0.0, 4.0)
    met = meet([StepProfile(10.0, [compute, *sends]), StepProfile(10.0, receives[::-1])], [0.0, 0.0])
    assert met[0].spans[0] == compute
    assert [(span.start, span.seconds) for span in met[0].spans[1:]] == [(4.0, 0.5), (6.0, 1.0)]
    assert [(span.start, span.seconds) for span in met[1].spans] == [(6.0, 1.0), (4.0, 0.5)]


def test_what_was_seen_at_one_end_alone_stays():
    lonely = [transfer("send to 1", "send", 1.0, 2.0, [1]), transfer("sum", "collective", 4.0, 1.0, [1, 2])]
    partly = [transfer("sum", "collective", 4.5, 1.0, [0, 2])]
    steps = [StepProfile(9.0, lonely), StepProfile(9.0, partly), StepProfile(9.0, [])]
    assert meet(steps, [0.0, 0.0, 0.0]) == steps


def test_clocks_that_are_off_make_no_negative_times():
    """The receiver had it before the sender began: no transfer takes less than no time."""
    send, receive = transfer("s", "send", 5.0, 2.0, [1]), transfer("r", "receive", 1.0, 3.9, [0])
    met = meet([StepProfile(9.0, [send]), StepProfile(9.0, [receive])], [0.0, 0.0])
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
        steps.append(StepProfile(12.0, [*spans, Span("forward", "forward", "compute", 0.0, 1.0)]))
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
    usual = [StepProfile(9.0, [transfer("a", "send", 1.0, 1.0, [1])])] * 2
    odd = StepProfile(9.0, [transfer("b", "send", 1.0, 1.0, [1])])
    assert in_one_order([*usual, odd]) == [*usual, odd]


# ---- profiles and files


def profile_of(rank, starts):
    step = StepProfile(1.0, [transfer("sum", "collective", 0.25, 0.5, [1 - rank])])
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
    step = StepProfile(1.0, [])
    assert without_gaps([step] * 3, [5.0, 6.0, 9.0]) == [
        StepProfile(1.0, []),
        StepProfile(3.0, []),
        StepProfile(1.0, []),
    ]


@pytest.mark.long
def test_trace_files(tmp_path):
    paths = [tmp_path / f"{rank}.json" for rank in range(2)]
    for rank, path in enumerate(paths):
        path.write_text(chrome_trace([StepProfile(1.0, [])], rank=rank))
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
    paths[0].write_text(chrome_trace([StepProfile(1.0, spans)] * 2, find_windows([StepProfile(1.0, spans)]), sent=sent))
    for name, begin in (("out.png", b"\x89PNG"), ("out.svg", b"<?xml")):
        assert command("trace", "0.json", "--plot", name, folder=tmp_path).returncode == 0
        assert (tmp_path / name).read_bytes().startswith(begin)
    done = command("trace", "0.json", "--plot", "nowhere/x.png", folder=tmp_path)
    assert done.returncode == 2
    assert "nowhere/x.png: cannot be written" in done.stderr
