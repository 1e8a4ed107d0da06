"""Snapshots travel in windows that the session has found itself: real processes, and traces of what they did."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from support.early_states import EarlyStatesWorker
from support.fast_links import LARGEST, SMALLEST, FastLinkWorker
from support.harness import FEWEST
from support.history import check_history
from support.lineage import check_losses
from support.outgoing import OutgoingWorker
from support.worker import Fault

PROFILE = {"profile_steps": 6, "profile_interval": 8}
BUSY = 60
"""Multiplications, some milliseconds in each of which the network is idle."""
ROUNDING = 1.0
"""Microseconds."""


def events(text, kind):
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X" and event["cat"] == kind]


def ends(event):
    return event["ts"] + event["dur"]


def run(start_job, preset, size=2, steps=30, **options):
    """The workers of a job that has ended well, and the traces of their sessions."""
    job = start_job(size, preset=preset, on_corruption="ignore", **PROFILE)  # calls that are repeated travel, too
    job.session |= options.pop("session", {})
    workers = job.start_all({}, "abc"[:size], steps=steps, work=BUSY, trace=True, **options)
    assert [each.join() for each in workers] == [0] * size, workers[0].log()
    check_history(workers)
    return workers, [(Path(job.folder) / f"{each.name}.session.json").read_text() for each in workers]


def check_in_windows(trace):
    """Bytes sent in windows; each message begins in its window, outside of all collectives."""
    busy = [event for event in events(trace, "collective") if event["name"] != "copies"]
    windows = events(trace, "window")
    copies = [copy for copy in events(trace, "copy") if copy["ts"] >= windows[0]["ts"]]
    assert copies
    for copy in copies:
        number = copy["args"]["window"]
        if number is None:
            continue
        found = [w for w in windows if w["args"]["number"] == number and w["ts"] <= copy["ts"] + ROUNDING]
        assert copy["ts"] <= ends(found[-1]) + ROUNDING
        assert not [span for span in busy if span["ts"] + ROUNDING < copy["ts"] < ends(span) - ROUNDING]
    return sum(copy["args"]["bytes"] for copy in copies if copy["args"]["window"] is not None)


@pytest.mark.parametrize(
    ("preset", "size"), [("gemini", 2), pytest.param("gemini", 3, marks=pytest.mark.long), ("baft", 3)]
)
def test_bytes_travel_in_windows(start_job, preset, size):
    """The user's own profiler sees them; and with baft each message is all of a unit, or a table of digests."""
    workers, traces = run(start_job, preset, size, **({"kind": OutgoingWorker} if preset == "baft" else {}))
    for worker, trace in zip(workers, traces, strict=True):
        assert check_in_windows(trace) > 0
        assert worker.events("paced")[-1]["plans"] >= 1
        assert "a version takes 1 step" in worker.events("paced")[-1]["summary"]
        if size == 2:
            check_users_profile(worker, trace)
        if preset == "baft":
            check_complete_units(worker, trace)


def check_users_profile(worker, trace):
    """A profiler of the user's sees the copies of one of two members, and what training itself sends."""
    user = (Path(worker.options.folder) / f"{worker.name}.user.json").read_text()
    names = {event["name"] for event in events(user, "collective")}
    assert names == {"all_gather", "all_to_all", "all_reduce"}
    others = events(user, "send") + events(user, "receive")  # when clocks were compared; copies are not among them
    assert max(event["args"]["bytes"] for event in others) <= 16
    peer = 1 - worker.events("share")[0]["rank"]
    assert {event["args"]["destination"] for event in events(user, "copy")} == {peer}
    assert events(user, "forward")
    assert events(user, "window")
    assert len(events(user, "copy")) >= len(events(trace, "copy"))


def check_complete_units(worker, trace):
    """Each message is all of a unit, or the table of a bundle's digests."""
    told = worker.events("outgoing")[-1]["bundles"]
    units, tables = {size for parts in told for _, size in parts}, {parts[0][0] for parts in told}
    sent = [copy["args"] for copy in events(trace, "copy") if copy["args"]["window"] is not None]
    assert {copy["bytes"] for copy in sent} <= units | tables
    assert sum(copy["bytes"] in units for copy in sent) >= len(units), "most of what is sent are units"


@pytest.mark.parametrize(("share", "when"), [(0.9, "window"), (1e-4, "background")])
@pytest.mark.long
def test_moetion_sends_the_states_of_owners_in_windows_and_the_rest_during_compute(start_job, share, when):
    """A worker sends the state of what it owns, where the optimizer's steps cannot be repeated."""
    session = {"shard_optimizer": True, "window_share": share}
    workers, traces = run(start_job, "moetion", 3, steps=20, session=session, optimizer="masters")
    for worker, trace in zip(workers, traces, strict=True):
        assert (check_in_windows(trace) > 0) == (when == "window")
        planned = [chunk["when"] for chunk in worker.events("chunk_sent") if 3 <= chunk["step"] < 20]
        assert when in planned
        assert set(planned) <= {when, "vote"}


def most_at_once(trace):
    """Messages that were under way at the same time, at most."""
    copies = events(trace, "copy")
    return max(sum(other["ts"] <= copy["ts"] < ends(other) - ROUNDING for other in copies) for copy in copies)


@pytest.mark.parametrize("buffers", [1, 4])
@pytest.mark.long
def test_messages_are_under_way_at_a_time_as_there_are_buffers(start_job, buffers):
    """One alone is the variant without a pipeline."""
    small = {"copy_buffer_bytes": 1024, "copy_buffers": buffers}
    for trace in run(start_job, "gemini", session=small)[1]:
        assert 1 <= most_at_once(trace) <= buffers
        assert buffers == 1 or most_at_once(trace) > 2, "more than the two of the default"


def test_one_buffer_of_the_size_of_a_bundle_gives_one_message_for_each(start_job):
    """Gemini's naive interleaving: what is copied is not cut, and nothing else is under way with it."""
    job = start_job(2, preset="gemini", profile_steps=0, copy_buffer_bytes=1 << 28, copy_buffers=1)
    workers = job.start_all({}, "ab", steps=8)
    assert [each.join() for each in workers] == [0, 0]
    check_history(workers)
    for each, peer in (workers, workers[::-1]):
        assert {number for _, number, _ in plans(each)} == {0}, "no profile where none is wanted"
        for step in range(1, 8):
            messages, bundles = each.events("chunk_sent", step=step), peer.events("snapshot_received", step=step)
            assert len(messages) == 2 * len(bundles) > 0, "what a bundle has in one, and its digests in another"
            assert messages[-1]["sent"] == messages[-1]["total"]


def sizes(worker, step):
    """Bytes of each message of a version."""
    sent = [event["sent"] for event in worker.events("chunk_sent", step=step)]
    return [after - before for before, after in itertools.pairwise([0, *sent])]


def test_messages_are_larger_once_the_link_is_known_to_be_fast(start_job):
    """All members divide bundles the same way, also with one that has sent nothing."""
    job = start_job(2, preset="gemini", snapshot_interval=1, **PROFILE, **FEWEST)
    job.open_gate(12)
    workers = job.start_all({}, "ab", kind=FastLinkWorker, model="wide", gated=True, steps=30, work=BUSY)
    workers[0].wait_for("gate", step=12)
    joiner = job.start("c", kind=FastLinkWorker, model="wide", steps=30, work=BUSY)
    job.take_in(joiner, until=30)
    assert [each.join() for each in (*workers, joiner)] == [0, 0, 0], workers[0].log()
    check_history([*workers, joiner])
    joined = joiner.events("recovered")[0]["step"]
    for each in workers:
        assert SMALLEST < max(sizes(each, step=11)) <= LARGEST
        assert SMALLEST < max(sizes(each, step=joined)) <= LARGEST, "first copies, with the newcomer"


@pytest.mark.long
def test_copies_use_a_part_of_windows_and_none_where_training_waits_for_them(start_job):
    for trace in run(start_job, "gemini", session={"window_share": 0.25, "snapshot_interval": 1})[1]:
        assert check_in_windows(trace) > 0
        for window in events(trace, "window"):
            assert window["dur"] == pytest.approx(0.25 * window["args"]["expected_us"], rel=0.01, abs=ROUNDING)
    job = start_job(2, preset="gemini", copy_pacing="blocking")
    workers = job.start_all({}, "ab", steps=12)
    assert [each.join() for each in workers] == [0, 0]
    check_history(workers)
    for each in workers:
        check_blocked(each)


@pytest.mark.long
def test_where_versions_of_one_step_are_asked_for_the_frequency_that_loses_least_is_said(start_job):
    """A given frequency stays: the plan only advises."""
    workers, _ = run(start_job, "gemini", session={"window_share": 0.002, "snapshot_interval": 1})
    for worker in workers:
        summary = worker.events("paced")[-1]["summary"]
        assert re.search(r"have no window and delay a step by .*; a version in \d+ steps would delay training", summary)
        assert "(Gemini's Eq. 1): the least loss" in summary


def check_blocked(worker):
    """All of a version is sent before the next step begins, and no plan was made."""
    sent = {}
    for event in worker.events():
        if event["event"] == "chunk_sent":
            sent[event["step"]] = event["sent"] == event["total"]
        elif event["event"] == "begin" and event["step"] > 1:
            assert sent[event["step"]], f"the version of step {event['step']} is complete when it begins"
    assert {event["plans"] for event in worker.events("paced")} == {0}


def plans(worker):
    """By step, how often it was planned, and the plan."""
    return [(event["step"], event["plans"], event["summary"]) for event in worker.events("paced")]


@pytest.mark.long
def test_steps_that_slow_down_and_speed_up_are_planned_again_by_all_at_once(start_job):
    workers, traces = run(start_job, "gemini", steps=44, forwards=[[12, 3], [28, 1]])
    a, b = [plans(worker) for worker in workers]
    assert a == b  # at the same steps, with the same words
    by_step = {step: number for step, number, _ in a}
    assert by_step[0] == 0
    assert by_step[1] == 1, "planned from the first step that is recorded"
    assert by_step[27] > by_step[11]
    assert by_step[43] > by_step[27]
    for trace in traces:
        check_in_windows(trace)


@pytest.mark.long
def test_windows_stay_in_use_when_members_change(start_job):
    """From the first step with a joiner on, all send in windows; the joiner in those of another member."""
    job = start_job(2, preset="baft", **PROFILE)
    job.open_gate(14)
    workers = job.start_all({}, "ab", gated=True, steps=40, work=BUSY)
    workers[0].wait_for("gate", step=14)
    joiner = job.start("c", steps=40, work=BUSY)
    job.take_in(joiner, until=40)
    workers.append(joiner)
    assert [each.join() for each in workers] == [0, 0, 0]
    check_history(workers)
    joined = joiner.events("recovered")[0]["step"]
    assert joined >= 15
    counts = {step: number for step, number, _ in plans(workers[0])}
    assert counts[joined] == counts[joined - 1] + 1
    assert plans(joiner)[0][:2] == (joined, 1)
    assert "a version takes" in plans(joiner)[0][2]
    assert {chunk["when"] for chunk in joiner.events("chunk_sent")} <= {"window", "vote", "recovery"}
    for each in workers[:2]:
        later = [chunk["when"] for chunk in each.events("chunk_sent") if chunk["step"] >= 3]
        assert "window" in later
        assert set(later) <= {"window", "vote", "recovery"}


@pytest.mark.parametrize("preset", ["auto", pytest.param("moetion", marks=pytest.mark.long)])
def test_presets_that_send_gradients_profile_for_their_next_arrangement(start_job, preset):
    workers, traces = run(start_job, preset, steps=14)
    for worker, trace in zip(workers, traces, strict=True):
        last = worker.events("paced")[-1]
        assert last["plans"] >= 1
        assert last["seconds"] > 0
        assert last["budgets"] == workers[0].events("paced")[-1]["budgets"]
        if preset == "moetion":
            assert all(budget is None or budget > last["seconds"] * 1e6 for budget in last["budgets"])
        assert events(trace, "collective")


CHOSEN = {"preset": "moetion", "remote_bytes_per_step": 60_000, "rebalance_interval": 0, **FEWEST}
"""Fewer experts than are trained are followed, and not always the same."""


@pytest.mark.long
def test_states_of_newly_chosen_experts_travel_in_windows(start_job):
    job = start_job(2, **CHOSEN, **PROFILE)
    workers = [job.start(name, kind=EarlyStatesWorker, steps=30, work=BUSY, trace=True) for name in "ab"]
    assert [each.join() for each in workers] == [0, 0], workers[0].log()
    check_history(workers)
    for each in workers:
        assert check_in_windows((Path(job.folder) / f"{each.name}.session.json").read_text()) > 0
    told = [event["sent"] for each in workers for event in each.events("early") if event["step"] > 3]
    sent = {when: sum(each.get(when, 0) for each in told) for when in ("window", "idle", "background", "vote")}
    assert sent["window"] > 0.5 * sum(sent.values()) > 0, sent
    came = [record for each in workers for event in each.events("early") for record in event["came"]]
    assert sum(came) == sum(sum(event["sent"].values()) for each in workers for event in each.events("early"))
    for each in workers:
        assert "waits for its full state" not in each.log()


@pytest.mark.parametrize(("point", "step"), [("early", 9), ("reduce", 8)], ids=["torn", "complete, without gradients"])
def test_states_of_a_step_that_ends_in_a_loss_count_for_nothing(start_job, point, step):
    """Until the gradients come, replicas are what the ledger says, and that is what a loss costs."""
    job = start_job(4, **CHOSEN, **PROFILE, copy_buffer_bytes=1024)
    faults = {"b": [Fault(point, step)]}
    workers = [
        job.start(name, *faults.get(name, []), kind=EarlyStatesWorker, steps=16, work=BUSY // 4, lineage=True)
        for name in "abcd"
    ]
    assert [each.join() for each in workers] == [0, -9, 0, 0]
    assert workers[1].events("fault")
    check_history(workers, undone=True)
    lost = check_losses(workers)[-1]
    assert lost.state.lost_now
    assert lost.is_new
    assert {report["step"] for report in lost.reports} == {8}
    for each in (workers[0], *workers[2:]):
        assert each.events("verified")[0]["digests_mismatched"] == 0
