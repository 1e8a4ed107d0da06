"""Slow members among simulated ones: who is named, after how many steps, and how often by mistake."""

import numpy as np
import pytest

from evermoe.planning.stragglers import MIN_FACTOR, STEPS, find_stragglers, is_still_slow

STEP = 0.2
"""Seconds of a step without noise."""


def times(steps, members, spread=0.05, seed=0, kind="normal"):
    """Seconds `[S, R]` of members that are equally fast on average."""
    random = np.random.default_rng(seed)
    draw = random.standard_normal if kind == "normal" else lambda shape: random.standard_t(3, shape)
    return STEP * np.exp(spread * draw((steps, members)))


def named(seconds, **options):
    return [each.rank for each in find_stragglers(seconds, **options)]


def named_over_time(seconds):
    """Ranks that are named, with the number of steps after which each is first."""
    found = {}
    for end in range(STEPS, len(seconds) + 1):
        for rank in named(seconds[:end]):
            found.setdefault(rank, end)
    return found


@pytest.mark.parametrize("members", [3, 4, 8, 32])
@pytest.mark.parametrize("slower", [lambda s: 1.3 * s, lambda s: s + 0.1], ids=["30 %", "100 ms"])
def test_a_slow_member_is_named_within_20_steps(members, slower):
    for seed in range(20):
        seconds, rank = times(60, members, seed=seed), seed % members
        seconds[30:, rank] = slower(seconds[30:, rank])
        assert list(found := named_over_time(seconds[:50])) == [rank], seed
        assert 30 < found[rank] <= 50


@pytest.mark.parametrize("members", [2, 3, 4, 8, 32])
@pytest.mark.parametrize(("spread", "kind"), [(0.05, "normal"), (0.1, "normal"), (0.2, "normal"), (0.1, "t")])
def test_nobody_is_named_where_all_are_equally_fast(members, spread, kind):
    assert named_over_time(times(1000, members, spread, seed=members, kind=kind)) == {}


def test_what_slows_all_members_names_nobody():
    load = np.where(np.arange(200) % 7 < 3, 4.0, 1.0)[:, None]
    assert named_over_time(load * times(200, 4)) == {}


def test_some_long_steps_are_no_slow_member():
    """A collection of garbage, or a log that is written: in a third of the steps of one member."""
    seconds = times(200, 4)
    seconds[::3, 1] *= 3
    assert named_over_time(seconds) == {}


def test_several_slow_members_and_most_members():
    seconds = times(STEPS, 6)
    seconds[:, 1] *= 1.5
    seconds[:, 4] *= 2
    assert named(seconds) == [4, 1]
    seconds[:, [1, 2, 3, 4, 5]] = 2 * times(STEPS, 5, seed=1)
    assert named(seconds) == [], "the others are as slow"


def test_floors():
    few = times(STEPS, 4, spread=0.001)
    few[:, 2] *= MIN_FACTOR - 0.01
    assert named(few) == []
    few[:, 2] *= 1.02
    assert named(few) == [2]
    assert named(few / 100) == [], "0.4 ms"
    assert named(few[:-1]) == []
    assert named(few, min_factor=1.5) == []


def test_a_member_with_more_work_may_take_longer():
    seconds = times(STEPS, 4, spread=0.01)
    seconds[:, 2] *= 1.5
    assert named(seconds, work=[1, 1, 1, 1]) == [2]
    assert named(seconds, work=[10, 10, 14, 10]) == []
    assert named(seconds, work=[10, 10, 5, 10]) == [2]


def test_of_two_members_the_one_that_has_become_slower():
    seconds = times(64, 2, spread=0.01)
    seconds[:, 1] *= 1.4
    assert named(seconds) == [], "perhaps another machine"
    seconds[-STEPS:, 1] *= 1.4
    assert named(seconds) == [1]
    seconds[-STEPS:] = times(STEPS, 2, spread=0.01) * [0.5, 1.4]
    assert named(seconds) == [], "the other one has become faster"


def test_a_slow_member_stays_slow_until_half_of_it_is_over():
    seconds = times(STEPS, 4, spread=0.01)
    seconds[:, 0] *= 1.15
    assert is_still_slow(seconds, 0)
    assert not is_still_slow(seconds, 1)
    assert not is_still_slow(seconds, 0, min_factor=1.5)


def test_rows_without_times():
    """Of replica nodes, and of a step that a member has not measured."""
    seconds = times(STEPS, 3)
    seconds[-1] = 0
    assert named(seconds) == named(np.zeros((0, 3))) == named(times(STEPS, 1)) == []
