"""From what a pacer has recorded to cuts and places: pure, and the same at both ends."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from evermoe.courier import Sent, TimedStep
from evermoe.pacing import COPIES, Load, Offer, as_steps, cuts_of, measure_link, places_of, plan_of
from evermoe.planning.schedule import Link, find_windows

MS = 10**6
LINK = Link(1e-3, 1e6)
"""A message of 4000 bytes takes 5 ms."""
LOADS = [Load(0, [1, 2], [(128, 6000), (6128, 3000), (9128, 1000)]), Load(3, [1], [(64, 7000), (7064, 500)])]


def timed(begin=0, idle=40):
    """Idle for 20, `idle` and 10 ms around two reductions; then copies, a vote, and an update of 30 ms."""
    busy, now = [], begin + 20 * MS
    for name, lasts, pause in (("reduce", 5, idle), ("reduce", 5, 10), (COPIES, 15, 1), ("reduce", 1, 30)):
        busy.append((name, now, now + lasts * MS))
        now += (lasts + pause) * MS
    return TimedStep(begin, now, busy)


def rows(windows):
    return {place: (number, pytest.approx(seconds)) for place, (number, seconds) in places_of(windows).items()}


def test_what_follows_the_vote_is_no_window_where_versions_must_be_whole_before_it():
    until_vote = find_windows(as_steps([timed()] * 3, True), gamma=1.0)
    assert until_vote.step_seconds == pytest.approx(0.127)
    assert places_of(until_vote) == rows(until_vote)
    assert [seconds for _, seconds in places_of(until_vote).values()] == pytest.approx([0.02, 0.04, 0.01])
    assert list(places_of(until_vote)) == [(None, 0), ("reduce", 0), ("reduce", 1)]
    always = find_windows(as_steps([timed()] * 3, False), gamma=1.0)
    assert [seconds for _, seconds in places_of(always).values()] == pytest.approx([0.02, 0.04, 0.01, 0.001, 0.03])
    assert list(places_of(always))[3:] == [(COPIES, 0), ("reduce", 2)]


def offers(starts=(0.0, 0.004, 0.002)):
    windows = find_windows(as_steps([timed()] * 3, True)).to_json()
    mine = Offer(windows, [0.0, 1.0], "", tuple(LINK), [])
    return [replace(mine, starts=[start, start + 1.0], loads=LOADS * (start == 0.0)) for start in starts]


@pytest.mark.parametrize("policy", ["gemini", "baft", "moetion", "auto"])
def test_cuts_are_all_of_every_bundle_for_every_holder(policy):
    cuts = cuts_of(plan_of(0, offers(), policy, 4000), LOADS, policy)
    found = defaultdict(list)
    for cut in cuts:
        assert 0 < cut.nbytes <= 4000
        found[cut.bundle, cut.peer].append(cut)
    assert set(found) == {(0, 1), (0, 2), (3, 1)}
    for (bundle, _), parts in found.items():
        assert [cut.place for cut in parts] == list(range(len(parts)))
        ends = [cut.offset + cut.nbytes for cut in sorted(parts, key=lambda cut: cut.offset)]
        starts = sorted(cut.offset for cut in parts)
        assert starts == [0, *ends[:-1]]
        assert ends[-1] == next(sum(load.parts[-1]) for load in LOADS if load.bundle == bundle)
    numbers = {number for number, _ in places_of(find_windows(as_steps([timed()] * 3, True))).values()}
    assert {cut.window for cut in cuts} - {None} <= numbers
    assert sum(cut.nbytes for cut in cuts if cut.window is not None) > 0


def test_whole_units_of_baft_are_not_cut_where_a_window_has_room():
    cuts = cuts_of(plan_of(0, offers(), "baft", 10_000), LOADS, "baft")
    assert {(cut.offset, cut.nbytes) for cut in cuts if cut.bundle == 0} == {*LOADS[0].parts, (0, 128)}


def test_a_receiver_whose_steps_run_late_has_other_rooms():
    early = plan_of(0, offers(), "gemini", 4000)
    late = plan_of(0, offers((0.0, 0.05, 0.05)), "gemini", 4000)
    assert early == plan_of(0, offers(), "gemini", 4000)
    assert late.reason.used_seconds < early.reason.used_seconds


def message(start, milliseconds, nbytes):
    return Sent(start * MS, (start + milliseconds) * MS, nbytes, 1, None)


def test_a_link_is_measured_from_messages_that_travel_side_by_side():
    sent = []
    for number in range(10):  # 3 ms of which one is the latency, and behind it 2 ms with 1 MB
        sent += [message(100 * number, 3, 2 * 10**6), message(100 * number, 5, 10**6)]
    assert measure_link(sent, LINK) == pytest.approx(Link(1e-3, 1e9))
    assert measure_link(sent[:7], LINK) == LINK


def test_messages_of_one_size_tell_no_latency():
    link = measure_link([message(100 * number, 3, 2 * 10**6) for number in range(10)], LINK)
    assert link == pytest.approx(Link(1e-3, 1e9))
    link = measure_link([message(100 * number, 1, 10**6) for number in range(10)], LINK)
    assert link == pytest.approx(Link(0.5e-3, 2e9))  # no more than half of it


@pytest.mark.parametrize("policy", ["gemini", "baft", "moetion", "auto"])
def test_who_sends_nothing_has_an_empty_plan(policy):
    plan = plan_of(1, offers(), policy, 4000)
    assert (plan.chunks, plan.reason.fits, cuts_of(plan, [], policy)) == ([], True, [])
