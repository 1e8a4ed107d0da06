"""The typed face of the schedule: profile in, windows, chunks and traces out, errors that name their argument."""

import json

import pytest

from evermoe.planning.schedule import (
    CHUNK_POLICIES,
    ChunkPlan,
    CopyItem,
    Link,
    Memory,
    Receiver,
    plan_chunks,
    snapshot_memory,
)
from evermoe.planning.trace import SentChunk, chrome_trace, merge_traces
from evermoe.planning.windows import Span, StepProfile, Windows, find_windows, has_changed

LINK, MEMORY = Link(0.5, 10.0), Memory(40, 4, Link(0.1, 50.0))


def step(idle=3.0, name="dispatch"):
    """A pipeline stage: compute with a bubble, two all-to-alls that leave `idle` seconds of the network."""
    return StepProfile(
        seconds=10.0,
        spans=[
            Span("forward", "forward", "compute", 0.0, 3.0),
            Span("backward", "backward", "compute", 5.0, 5.0),
            Span(name, "collective", "network", 1.0, 1.0, 4096, [1, 2]),
            Span("combine", "collective", "network", 2.0 + idle, 1.0, 4096, (1, 2)),
        ],
    )


def windows(**options):
    return find_windows([step()] * 20, **options)


def pieces(nbytes=30, destinations=(1,)):
    return [CopyItem(f"expert{number}", nbytes, destinations) for number in range(4)]


def test_windows_of_a_step():
    found = windows(gamma=0.5)
    rows = [(window.resource, window.after, window.start, window.expected, window.seconds) for window in found.windows]
    assert rows == [
        ("compute", "forward", 3.0, 2.0, 1.0),
        ("network", None, 0.0, 1.0, 0.5),
        ("network", "dispatch", 2.0, 3.0, 1.5),
        ("network", "combine", 6.0, 4.0, 2.0),
        ("host_link", None, 0.0, 10.0, 5.0),
    ]
    assert (found.step_seconds, found.steps_used, found.steps_left_out) == (10.0, 20, 0)


def test_one_odd_step_of_many_counts_for_nothing():
    steps = [step()] * 10 + [step(name="evaluation")]
    found = find_windows(steps)
    assert found.windows == windows().windows
    assert (found.steps_used, found.steps_left_out) == (10, 1)
    assert has_changed(found, steps) is None
    change = has_changed(found, [step(name="evaluation")])
    assert (change.what, change.resource, change.after) == ("sequence", "network", "evaluation")
    change = has_changed(found, [step(idle=1.0)])
    assert (change.what, change.resource, change.after, change.before, change.now) == (
        "window",
        "network",
        "dispatch",
        3.0,
        1.0,
    )


def test_no_majority_no_windows():
    found = find_windows([step(), step(name="evaluation")])
    assert (found.windows, found.steps_used, found.steps_left_out) == ([], 0, 2)
    assert "no windows" in found.evidence
    plan = plan_chunks(pieces(), found, LINK, MEMORY, max_steps=4)
    assert not plan.reason.fits
    assert plan.reason.steps_per_version == 4
    assert all(chunk.window is None for chunk in plan.chunks)


@pytest.mark.parametrize("policy", CHUNK_POLICIES)
def test_plans_move_every_byte_within_windows(policy):
    found = windows()
    ends = [Receiver(1, found, 0.25), Receiver(2, found, -0.25)]
    plan = plan_chunks(pieces(destinations=[1, 2]), found, LINK, MEMORY, policy=policy, receivers=ends)
    moved = {}
    for chunk in plan.chunks:
        assert moved.setdefault((chunk.unit, chunk.destination), 0) == chunk.offset or policy == "baft"
        moved[chunk.unit, chunk.destination] += chunk.bytes
        assert 0 < chunk.bytes <= 10
        if chunk.window is not None:
            window = found.windows[chunk.window]
            assert window.resource == "network"
            assert chunk.start + chunk.seconds <= window.seconds + 1e-9
    assert moved == {(f"expert{number}", rank): 30 for number in range(4) for rank in (1, 2)}
    assert plan.reason.bytes == 240
    if policy == "auto":
        assert repr(plan.reason.delay_seconds) == "0.0"
        assert str(plan.reason).endswith("nothing is delayed")


def test_json_comes_back():
    found = windows()
    plan = plan_chunks(pieces(), found, LINK, MEMORY)
    again = Windows.from_json(found.to_json())
    assert again == found
    assert again != windows(gamma=0.8)
    assert plan_chunks(pieces(), again, LINK, MEMORY) == plan == ChunkPlan.from_json(plan.to_json())
    assert repr(plan).startswith("ChunkPlan(")


def test_snapshots_go_where_there_is_room():
    assert snapshot_memory(10, [5, 6, 5]) == ["host", "device", "host"]
    assert snapshot_memory(10, [5, 6, 5], reserve=11) == ["host"] * 3


def events(trace, kind):
    return [event for event in json.loads(trace)["traceEvents"] if event["ph"] == "X" and event["cat"] == kind]


def test_the_trace_shows_chunks_inside_windows():
    steps = [step(3.0), step(3.5), step(3.0)]
    found = find_windows(steps)
    plan = plan_chunks(pieces(), found, LINK, MEMORY)
    trace = chrome_trace(steps, found, plan, rank=7, start=2.0)
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in json.loads(trace)["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert set(tracks.values()) >= {"compute", "network", "chunks", "network windows", "host link windows"}
    opened = [event for event in events(trace, "window") if tracks[7, event["tid"]] == "network windows"]
    chunks = events(trace, "chunk")
    assert len(opened) == 9
    assert chunks
    for chunk in chunks:
        ends = chunk["ts"] + chunk["dur"]
        assert any(
            window["ts"] <= chunk["ts"] + 1e-3 and ends <= window["ts"] + window["dur"] + 1e-3 for window in opened
        )
    for busy in events(trace, "collective"):
        assert all(
            busy["ts"] + busy["dur"] <= window["ts"] + 1e-3 or window["ts"] + window["dur"] <= busy["ts"] + 1e-3
            for window in opened
        )
    assert events(trace, "forward")[0]["ts"] == 2e6
    assert events(trace, "collective")[0]["args"] == {"bytes": 4096, "peers": [1, 2]}


def test_the_trace_shows_what_was_sent_meanwhile():
    early, inside = SentChunk(1.0, 0.5, 64, 1), SentChunk(2.5, 0.25, 32, 1, 4)
    long, late = SentChunk(3.0, 9.0, 16, 2), SentChunk(23.0, 1.0, 8, 1)
    trace = chrome_trace([step(3.0)] * 2, windows(), sent=[early, inside, long, late], rank=7, start=2.0)
    found = events(trace, "copy")
    assert [(each["pid"], each["name"], each["ts"], each["dur"]) for each in found] == [
        (7, "copy to 1", 2.5e6, 0.25e6),
        (7, "copy to 2", 3e6, 9e6),
    ]
    assert found[0]["args"] == {"bytes": 32, "destination": 1, "window": 4}
    assert found[1]["args"]["window"] is None
    windows_shown = [each["args"]["number"] for each in events(trace, "window")]
    assert set(windows_shown) == set(range(len(windows().windows)))


def test_spans_that_overlap_without_nesting_go_to_a_second_track():
    spans = [Span(name, "send", "network", start, 2.0) for name, start in (("a", 0.0), ("b", 1.0), ("c", 3.0))]
    spans.append(Span("in c", "send", "network", 3.5, 1.0))
    trace = json.loads(chrome_trace([StepProfile(9.0, spans)]))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    tracks = {event["name"]: names[event["tid"]] for event in trace if event["ph"] == "X"}
    assert tracks == {"a": "network", "b": "network 2", "c": "network", "in c": "network"}


def test_traces_of_all_ranks_are_one():
    traces = [chrome_trace([step()], rank=rank) for rank in range(3)]
    merged = json.loads(merge_traces(traces))
    assert merged["traceEvents"] == [event for trace in traces for event in json.loads(trace)["traceEvents"]]
    assert {event["pid"] for event in merged["traceEvents"]} == {0, 1, 2}
    assert json.loads(merge_traces([]))["traceEvents"] == []


def plan(found=None, **changes):
    arguments = {"pieces": pieces(), "windows": found or windows(), "link": LINK, "memory": MEMORY} | changes
    return plan_chunks(**arguments)


SPAN = Span("a", "send", "network", 0.0, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_windows([]), r"steps: expected at least 1, better 20, got none"),
        (lambda: find_windows(7), r"steps: expected a list of steps"),
        (lambda: find_windows([7]), r"steps: step 0: expected seconds and a list of spans"),
        (lambda: find_windows([StepProfile(0.0, [])]), r"steps: step 0: seconds: expected a finite number above 0"),
        (
            lambda: find_windows([StepProfile(1.0, [SPAN._replace(kind="sleep")])]),
            r"steps: step 0: span 0: kind: expected",
        ),
        (
            lambda: find_windows([StepProfile(1.0, [SPAN._replace(resource="gpu")])]),
            r"span 0: resource: expected one of",
        ),
        (
            lambda: find_windows([StepProfile(1.0, [SPAN._replace(start=2.0)])]),
            r"steps: step 0: start of \"a\": expected",
        ),
        (lambda: find_windows([StepProfile(1.0, [SPAN._replace(seconds=float("nan"))])]), r"step 0: seconds of \"a\""),
        (lambda: find_windows([StepProfile(1.0, [SPAN._replace(bytes=-1)])]), r"steps: step 0: span 0: "),
        (lambda: find_windows([StepProfile(1.0, [SPAN._replace(name=3)])]), r"steps: step 0: span 0: "),
        (lambda: find_windows([step()], quantile=0.6), r"quantile: expected a number from 0 to 0.5, got 0.6"),
        (lambda: find_windows([step()], gamma=0.0), r"gamma: expected a number above 0, up to 1, got 0"),
        (lambda: find_windows([step()], gamma="1"), r"gamma: expected a number, got '1'"),
        (lambda: find_windows([step()], ignore="copy"), r"ignore: expected a list of names, got 'copy'"),
        (lambda: has_changed(windows(), []), r"steps: expected at least 1, got none"),
        (lambda: has_changed(windows(), [step()], tolerance=-1), r"tolerance: expected a finite part of a step"),
        (lambda: has_changed("windows", [step()]), r"windows: expected Windows of find_windows"),
        (lambda: Windows.from_json("{}"), r"text: expected the JSON of windows: missing field"),
        (lambda: Windows.from_json(windows().to_json().replace("0.9", "1.9")), r"text: gamma: expected"),
        (lambda: ChunkPlan.from_json("[]"), r"text: expected the JSON of a chunk plan"),
        (lambda: plan(link=Link(-1, 1)), r"link\.alpha: expected finite seconds, 0 or more, got -1"),
        (lambda: plan(link=Link(0, 0)), r"link\.beta: expected finite bytes a second, above 0, got 0"),
        (lambda: plan(memory=Memory(8, 0)), r"memory\.buffers: expected 1 or more, got 0"),
        (lambda: plan(memory=Memory(3, 4)), r"memory\.bytes: expected at least one for each of 4 buffers, got 3"),
        (lambda: plan(memory=Memory(8, 2, Link(0, -1))), r"memory\.drain\.beta: expected"),
        (lambda: plan(memory=Memory(1, 1), pieces=pieces(1 << 40)), r"memory: sub-buffers of 1 bytes make 439804651"),
        (lambda: plan(policy="moon"), r"policy: expected one of gemini, baft, moetion, auto, got 'moon'"),
        (lambda: plan(max_steps=0), r"max_steps: expected 1 to 4096, got 0"),
        (lambda: plan(pieces=[*pieces(), *pieces()]), r"pieces: unit \"expert0\" occurs twice"),
        (lambda: plan(pieces=pieces(destinations=[])), r"pieces: unit \"expert0\" has no destination"),
        (lambda: plan(pieces=pieces(destinations=[1, 1])), r"pieces: unit \"expert0\" has a destination twice"),
        (lambda: plan(pieces=pieces(-1)), r"pieces: bytes: expected an integer"),
        (lambda: plan(pieces=[CopyItem(3, 1, [1])]), r"pieces: unit: expected names, which are strings, got 3"),
        (
            lambda: plan(policy="baft"),
            r"receivers: \"baft\" sends in the windows of both ends; rank 1 has none",
        ),
        (lambda: plan(receivers=[Receiver(1, windows())] * 2), r"receivers: rank 1 occurs twice"),
        (lambda: plan(receivers=[Receiver(1, windows(), float("inf"))]), r"receivers: clock_offset of rank 1"),
        (lambda: chrome_trace([step()], None, plan()), r"plan: a chunk is in a window that is not one of the 0"),
        (lambda: chrome_trace([step()], start=float("nan")), r"start: expected finite seconds"),
        (lambda: chrome_trace([step()], sent=[SentChunk(0.0, -1.0, 1, 1)]), r"sent: number 0 has a time that is none"),
        (lambda: merge_traces(["{}"]), r"traces: number 0 is not a trace of one rank: traceEvents is missing"),
        (lambda: merge_traces(["x"]), r"traces: number 0 is not a trace of one rank: expected value"),
        (lambda: merge_traces([chrome_trace([step()])] * 2), r"traces: numbers 0 and 1 are both of rank 0"),
        (lambda: snapshot_memory(-1, []), r"free_bytes: expected an integer"),
    ],
)
def test_errors_name_their_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
