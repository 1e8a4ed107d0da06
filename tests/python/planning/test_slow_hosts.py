"""Slow networks among simulated hosts: which one is named, and that none is where all are equally fast."""

import numpy as np
import pytest

from evermoe.planning.slow_hosts import DISTANCES, MIN_FACTOR, MIN_SECONDS, ROUNDS, Round, find_slow_hosts

SECONDS = 1e-3
SLOW = 50 * SECONDS


def rounds(hosts, count=ROUNDS, seed=0, sends=(), receives=(), ends=()):
    """Times with the noise of a busy machine, and those of hosts that send or receive slowly, or of single links."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        distance = DISTANCES[number % len(DISTANCES)]
        seconds = SECONDS * np.exp(random.standard_normal(hosts))
        for host in range(hosts):
            target = (host + distance) % hosts
            if host in sends or target in receives or (host, target) in ends:
                seconds[host] += SLOW
        made.append(Round(distance, seconds.tolist()))
    return made


def named(made):
    return [each.rank for each in find_slow_hosts(made)]


@pytest.mark.parametrize("hosts", [3, 4, 5, 8, 64])
@pytest.mark.parametrize("harm", [("sends",), ("receives",), ("sends", "receives")], ids="+".join)
def test_a_slow_host_is_named_by_either_direction(hosts, harm):
    for seed in range(20):
        slow = seed % hosts
        (found,) = find_slow_hosts(rounds(hosts, seed=seed, **{each: [slow] for each in harm}))
        assert found.rank == slow
        assert found.factor >= MIN_FACTOR
        assert found.seconds > SLOW > found.usual


@pytest.mark.parametrize("hosts", [3, 4, 8, 64])
def test_none_is_named_where_all_are_equally_fast(hosts):
    """Messages of single rounds take up to 30 times as long as others."""
    made = rounds(hosts, count=500)
    assert all(named(made[: end + 1]) == [] for end in range(len(made)))


def test_a_single_slow_link_names_neither_end():
    assert named(rounds(5, ends=[(1, 2)])) == []


def test_a_host_that_waits_in_half_of_the_rounds_is_not_slow():
    made = rounds(4, receives=[2])
    calm = rounds(4)
    assert named([calm[at] if at % 4 < 2 else each for at, each in enumerate(made)]) == []


def test_two_hosts_among_many():
    assert sorted(named(rounds(8, sends=[1, 5]))) == [1, 5]


def test_a_difference_that_nobody_notices_names_nobody():
    short = [Round(each.distance, [s * MIN_SECONDS / SLOW / 2 for s in each.seconds]) for each in rounds(4, sends=[1])]
    assert named(short) == []


@pytest.mark.parametrize(("hosts", "count"), [(2, ROUNDS), (4, ROUNDS - 1)])
def test_too_few_hosts_or_rounds(hosts, count):
    assert named(rounds(hosts, count, sends=[1])) == []
