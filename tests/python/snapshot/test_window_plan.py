"""From what a pacer has recorded to cuts and places: pure, and the same at both ends."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from evermoe.comm.courier import Sent
from evermoe.comm.pacer import ANY_TIME
from evermoe.comm.timed_steps import TimedStep
from evermoe.copies.snapshot.link import MAX_MESSAGE_BYTES, MIN_MESSAGE_BYTES, measure_link, message_bytes
from evermoe.copies.snapshot.rank_plan import COPIES, Outgoing, RankReport, as_steps, places_of, plan_of, segments_of
from evermoe.planning.schedule import Link, Memory
from evermoe.planning.windows import find_windows

MS = 10**6
LINK = Link(1e-3, 1e6)
"""A message of 4000 bytes takes 5 ms."""
OUTGOING = [
    Outgoing(0, [1, 2], [(128, 6000), (6128, 3000), (9128, 1000)], 128),
    Outgoing(3, [1], [(64, 7000), (7064, 500)], 64),
]


def timed(begin=0, idle=40):
    """Idle for 20, `idle` and 10 ms around two reductions; then copies, a vote, and an update of 30 ms."""
    busy, now = [], begin + 20 * MS
    for name, lasts, pause in (("reduce", 5, idle), ("reduce", 5, 10), (COPIES, 15, 1), ("reduce", 1, 30)):
        busy.append((name, now, now + lasts * MS))
        now += (lasts + pause) * MS
    return TimedStep(begin, now, busy)


def rows(windows):
    return {place: (number, pytest.approx(seconds)) for place, (number, seconds) in places_of(windows).items()}


def test_time_after_the_vote_is_no_window_where_versions_must_be_complete_before_it():
    until_vote = find_windows(as_steps([timed()] * 3, True), gamma=1.0)
    assert until_vote.step_seconds == pytest.approx(0.127)
    assert places_of(until_vote) == rows(until_vote)
    assert [seconds for _, seconds in places_of(until_vote).values()] == pytest.approx([0.02, 0.04, 0.01])
    assert list(places_of(until_vote)) == [(None, 0), ("reduce", 0), ("reduce", 1)]
    always = find_windows(as_steps([timed()] * 3, False), gamma=1.0)
    assert [seconds for _, seconds in places_of(always).values()] == pytest.approx([0.02, 0.04, 0.01, 0.001, 0.03])
    assert list(places_of(always))[3:] == [(COPIES, 0), ("reduce", 2)]


def reports(starts=(0.0, 0.004, 0.002)):
    windows = find_windows(as_steps([timed()] * 3, True)).to_json()
    mine = RankReport(windows, [0.0, 1.0], "", tuple(LINK), [])
    return [replace(mine, starts=[start, start + 1.0], outgoing=OUTGOING * (start == 0.0)) for start in starts]


@pytest.mark.parametrize("policy", ["gemini", "baft", "moetion", "auto"])
def test_cuts_are_all_of_every_bundle_for_every_holder(policy):
    segments = segments_of(plan_of(0, reports(), policy, Memory(2 * 4000, 2)), OUTGOING, policy)
    found = defaultdict(list)
    for segment in segments:
        assert 0 < segment.nbytes <= 4000
        found[segment.bundle, segment.peer].append(segment)
    assert set(found) == {(0, 1), (0, 2), (3, 1)}
    for (bundle, _), parts in found.items():
        assert [segment.place for segment in parts] == list(range(len(parts)))
        ends = [segment.offset + segment.nbytes for segment in sorted(parts, key=lambda segment: segment.offset)]
        starts = sorted(segment.offset for segment in parts)
        assert starts == [0, *ends[:-1]]
        assert ends[-1] == next(sum(each.parts[-1]) for each in OUTGOING if each.bundle == bundle)
    numbers = {number for number, _ in places_of(find_windows(as_steps([timed()] * 3, True))).values()}
    assert {segment.window for segment in segments} - {None, ANY_TIME} <= numbers
    assert sum(segment.nbytes for segment in segments if segment.window is not None) > 0


def test_whole_units_of_baft_are_not_cut_where_a_window_has_room():
    segments = segments_of(plan_of(0, reports(), "baft", Memory(2 * 10_000, 2)), OUTGOING, "baft")
    assert {(segment.offset, segment.nbytes) for segment in segments if segment.bundle == 0} == {
        *OUTGOING[0].parts,
        (0, 128),
    }


@pytest.mark.parametrize("policy", ["gemini", "baft"])
def test_a_version_that_is_longer_than_the_windows_of_a_step_takes_several(policy):
    slow = [replace(report, link=(1e-3, 3e5)) for report in reports()]
    steps = plan_of(0, slow, policy, Memory(2 * 2000, 2), None).reason.steps_per_version
    assert 1 < steps == plan_of(0, slow, policy, Memory(2 * 2000, 2)).reason.steps_in_windows
    segments = segments_of(plan_of(0, slow, policy, Memory(2 * 2000, 2), steps + 1), OUTGOING, policy)
    assert [segment.step for segment in segments] == sorted(segment.step for segment in segments)
    assert {segment.step for segment in segments} == set(range(steps))
    assert all(segment.window is not None for segment in segments)


def test_what_moetion_has_no_window_for_goes_first_and_at_any_time():
    slow = [replace(report, link=(1e-3, 3e5)) for report in reports()]
    segments = segments_of(plan_of(0, slow, "moetion", Memory(2 * 2000, 2)), OUTGOING, "moetion")
    unplanned = [segment.window == ANY_TIME for segment in segments]
    assert 0 < sum(unplanned) < len(unplanned)
    assert unplanned == sorted(unplanned, reverse=True)
    over_steps = segments_of(plan_of(0, slow, "moetion", Memory(2 * 2000, 2), 2), OUTGOING, "moetion")
    places = [(segment.step, segment.window != ANY_TIME) for segment in over_steps]
    assert {step for step, _ in places} == {0, 1}
    assert places == sorted(places)


@pytest.mark.parametrize("policy", ["gemini", "baft"])
def test_messages_from_a_gpu_keep_pace_with_the_copy_to_its_host(policy):
    """The copy continues while the network is idle: what was sent at any moment of a window has been copied by then."""
    speed = 2e5  # a fifth of the link's
    for is_on_gpu, host_speed in ((True, speed), (True, 0.0), (False, speed)):
        told = [replace(each, is_on_gpu=is_on_gpu, host_speed=host_speed) for each in reports()]
        plan = plan_of(0, told, policy, Memory(2 * 1000, 2))
        windows = find_windows(as_steps([timed()] * 3, True)).windows
        before = [[each for each in windows[:number] if each.resource == "network"] for number in range(len(windows))]
        idle = [sum(each.seconds for each in some) for some in before]
        inside = [chunk for chunk in plan.chunks if chunk.window is not None]
        assert inside
        sent, late = 0, 0
        for chunk in sorted(inside, key=lambda chunk: (chunk.window, chunk.start)):
            sent += chunk.bytes
            late += sent > speed * (idle[chunk.window] + chunk.start + chunk.seconds)
        assert (late == 0) == (told[0].pace.beta == speed) == told[0].waits_for_host
        assert told[0].waits_for_host == (is_on_gpu and host_speed > 0)


def test_a_copy_to_the_host_that_is_quicker_than_the_network_changes_no_plan():
    quick = [replace(each, is_on_gpu=True, host_speed=1e7) for each in reports()]
    assert plan_of(0, quick, "gemini", Memory(2 * 4000, 2)) == plan_of(0, reports(), "gemini", Memory(2 * 4000, 2))


@pytest.mark.parametrize("factor", [0.2, 0.6, 1.0, 2.5])
def test_a_message_that_takes_less_than_half_as_long_is_planned_again(factor):
    before = replace(reports()[0], link=(0.0, 1e6))
    said = replace(before, link=(0.0, 1e6 / factor)).new_pace(before, 4000)
    assert bool(said) == (factor == 0.2)
    assert not said or f"takes {factor * 4e-3:.6f} s, not 0.004000 s" in said


def test_a_receiver_whose_steps_run_late_has_other_rooms():
    early = plan_of(0, reports(), "gemini", Memory(2 * 4000, 2))
    late = plan_of(0, reports((0.0, 0.05, 0.05)), "gemini", Memory(2 * 4000, 2))
    assert early == plan_of(0, reports(), "gemini", Memory(2 * 4000, 2))
    assert late.reason.used_seconds < early.reason.used_seconds


def message(start, milliseconds, nbytes):
    return Sent(start * MS, (start + milliseconds) * MS, nbytes, 1, None)


def test_a_link_is_measured_from_messages_that_travel_side_by_side():
    sent = []
    for number in range(10):  # 3 ms of which one is the latency, and behind it 2 ms with 1 MB
        sent += [message(100 * number, 3, 2 * 10**6), message(100 * number, 5, 10**6)]
    assert measure_link(sent, LINK) == pytest.approx(Link(1e-3, 1e9))
    assert measure_link(sent[:7], LINK) == LINK


def test_messages_of_one_size_do_not_show_the_latency():
    link = measure_link([message(100 * number, 3, 2 * 10**6) for number in range(10)], LINK)
    assert link == pytest.approx(Link(1e-3, 1e9))
    link = measure_link([message(100 * number, 1, 10**6) for number in range(10)], LINK)
    assert link == pytest.approx(Link(0.5e-3, 2e9))  # no more than half of it


@pytest.mark.parametrize("policy", ["gemini", "baft", "moetion", "auto"])
def test_who_sends_nothing_has_an_empty_plan(policy):
    plan = plan_of(1, reports(), policy, Memory(2 * 4000, 2))
    assert (plan.chunks, plan.reason.fits, segments_of(plan, [], policy)) == ([], True, [])


def test_messages_grow_with_the_speed_of_the_link():
    sizes = [message_bytes(10 ** (exponent / 20)) for exponent in range(-20, 260)]
    assert sizes == sorted(sizes)
    assert (sizes[0], message_bytes(2e9), sizes[-1]) == (MIN_MESSAGE_BYTES, MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES)
    for speed in (4.3e9, 1e10, 2.2e10):
        assert 1e-3 < message_bytes(speed) / speed <= 2e-3
        assert message_bytes(speed).bit_count() == 1
