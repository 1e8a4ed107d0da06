"""The speed of a member's link, from the messages that it has sent."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from evermoe.comm.courier import Sent
from evermoe.planning.schedule import Link

MIN_SAMPLES = 8
"""Messages from which the network's speed is measured."""


def measure_link(sent: Sequence[Sent], default: Link) -> Link:
    """Fit a link to transfers: alpha and beta of a line through the medians of the smaller and of the larger half.

    The time of a message that began during another one counts only from the end of that one.

        >>> def message(start, milliseconds, nbytes):
        ...     return Sent(start, start + milliseconds * 10**6, nbytes, 1, None)
        >>> sent = [message(number * 10**9, 2 if number % 2 else 3, 10**6 if number % 2 else 2 * 10**6)
        ...         for number in range(8)]
        >>> measure_link(sent, Link(1e-4, 1e9))  # 1 MB in 2 ms, 2 MB in 3 ms
        Link(alpha=0.001, beta=1000000000.0)
        >>> measure_link(sent[:7], Link(1e-4, 1e9))  # too few
        Link(alpha=0.0001, beta=1000000000.0)

    Args:
        sent: in the order in which they ended.
        default: returned if there are fewer than `MIN_SAMPLES` messages; its alpha also if all sizes are equal.
    """
    samples = []
    before = 0
    for each in sent:
        samples.append((each.nbytes, max(1e-7, (each.end - max(each.start, before)) / 1e9)))
        before = max(before, each.end)
    if len(samples) < MIN_SAMPLES:
        return default
    samples.sort()
    half = len(samples) // 2
    (small, quick), (large, slow) = (
        [statistics.median(values) for values in zip(*part, strict=True)] for part in (samples[:half], samples[half:])
    )
    if large > 1.5 * small and slow > quick:
        alpha = max(0.0, quick - small * (slow - quick) / (large - small))
    else:
        alpha = min(default.alpha, slow / 2)
    return Link(alpha, max(1.0, large) / (slow - min(alpha, slow / 2)))
