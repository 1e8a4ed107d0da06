"""The speed of a member's link, from the messages that it has sent, and the size of its messages."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from evermoe.comm.courier import Sent
from evermoe.planning.schedule import BYTES_PER_SECOND, Link

MIN_SAMPLES = 8
"""Messages from which the network's speed is measured."""
MESSAGE_SECONDS = 2e-3
"""Time of a message between the bounds of its size. Each one costs a member some 0.1 ms, of which the next one hides a
part, and a window that closes waits for the message that is under way."""
MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES = 4 << 20, 64 << 20
"""Bounds of `message_bytes`."""


def message_bytes(bytes_per_second: float) -> int:
    """Return the maximum size of a message: the power of two that a link sends in 1 to 2 ms, from 4 to 64 MiB.

    A power of two stays the same while the measured speed fluctuates.

        >>> [message_bytes(gigabytes * 1e9) >> 20 for gigabytes in (1, 5, 10, 25, 50)]
        [4, 8, 16, 32, 64]

    Args:
        bytes_per_second: of the link; of the copy from GPU to host, if that is slower.
    """
    fitting = int(max(bytes_per_second, 1.0) * MESSAGE_SECONDS)
    return min(max(1 << max(fitting.bit_length() - 1, 0), MIN_MESSAGE_BYTES), MAX_MESSAGE_BYTES)


def common_message_bytes(links: Iterable[tuple[float, float] | None]) -> int:
    """Return the size of messages that no plan divides, by the slowest measured link of all members.

    Args:
        links: latency and bytes per second of each member's link; None where it was not measured.
    """
    return message_bytes(min((link[1] for link in links if link is not None), default=BYTES_PER_SECOND))


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
