"""Search for hosts whose network is slower than that of the others, by the times of equal messages among them.

In a round each host sends one message to the host a number of places further in a ring, and measures the one that
arrives. The time of one message shows that one of two hosts is slow, not which. So rounds alternate between two
distances: a host is slow if the messages to both of its receivers are, or those from both of its senders.

Messages are short and the receiving thread may wait for a processor, which makes single times many times as long. A
slow link is slow in every round: so a host is judged by the shorter half of its times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evermoe.planning.stragglers import Straggler

DISTANCES = (1, 2)
"""Places in the ring from a host to those to which it sends, in turns."""
MIN_HOSTS = 3
"""Hosts from which on the two ends of a slow link can be distinguished."""
ROUNDS = 4 * len(DISTANCES)
"""Rounds that are compared: the latest ones."""
MIN_FACTOR = 3.0
"""Factor by which the messages of a slow host take longer than the others, at least."""
MIN_SECONDS = 0.005
"""Seconds by which they take longer, at least."""


class Round(NamedTuple):
    """Times of messages, each from one host to the host `distance` places further."""

    distance: int
    seconds: Sequence[float]
    """By sender."""


def find_slow_hosts(rounds: Sequence[Round], min_factor: float = MIN_FACTOR) -> list[Straggler]:
    """Return the hosts whose messages take longer than those among the others, the slowest first.

    `Straggler.rank` is the place of a host in the ring, and its other fields are of the slower direction. Of two hosts
    between which messages take long only the slower one is returned.

        >>> times = [Round(distance, [0.001, 0.05, 0.001, 0.001]) for distance in DISTANCES] * 4
        >>> [(found.rank, found.factor) for found in find_slow_hosts(times)]
        [(1, 50.0)]

    Args:
        rounds: the latest round last; of fewer than `ROUNDS` nothing is known.
        min_factor: factor by which a slow host's messages take longer, at least.
    """
    last = list(rounds)[-ROUNDS:]
    if len(last) < ROUNDS or len(last[0].seconds) < MIN_HOSTS:
        return []
    seconds_SN = np.asarray([each.seconds for each in last], np.float64)
    distance_S = np.asarray([each.distance for each in last])
    usual_S = np.median(np.sort(seconds_SN, axis=1)[:, :-2], axis=1)  # a slow host makes two messages of a round long
    slow = [each for sends in (True, False) for each in _slow_hosts(seconds_SN, usual_S, distance_S, min_factor, sends)]
    found: dict[int, Straggler] = {}
    for peers, each in sorted(slow, key=lambda pair: -pair[1].factor):
        if each.rank not in found and not found.keys() & peers:  # else it may be slow for that host's sake
            found[each.rank] = each
    return list(found.values())


def _slow_hosts(
    seconds_SN: NDArray[np.float64],
    usual_S: NDArray[np.float64],
    distance_S: NDArray[np.int64],
    min_factor: float,
    sends: bool,
) -> list[tuple[set[int], Straggler]]:
    """Return the hosts that are slow in one direction, each with those to which it sends, or from which it receives."""
    size = seconds_SN.shape[1]
    own_SN = seconds_SN if sends else np.stack([np.roll(*each) for each in zip(seconds_SN, distance_S, strict=True)])
    low_DN = np.stack(
        [_lower_median(own_SN[distance_S == each] / usual_S[distance_S == each, None]) for each in DISTANCES]
    )
    excess_DN = np.stack([_lower_median((own_SN - usual_S[:, None])[distance_S == each]) for each in DISTANCES])
    is_slow_N = (low_DN.min(0) >= min_factor) & (excess_DN.min(0) >= MIN_SECONDS)
    towards = 1 if sends else -1
    return [
        (
            {(int(host) + towards * each) % size for each in DISTANCES},
            Straggler(
                int(host), float(np.median(own_SN[:, host])), float(np.median(usual_S)), float(low_DN[:, host].min())
            ),
        )
        for host in np.flatnonzero(is_slow_N)
    ]


def _lower_median(values_SN: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sort(values_SN, axis=0)[(len(values_SN) - 1) // 2]
