"""Search for members that are slower than the others: a robust comparison of the times of their own work.

Steps differ, and so do members from step to step: a page fault, a collection of garbage, other processes. So each
member is compared with the median of the others *in the same step*, which takes out all that slows every member. It is
judged by the median of these ratios over many steps, which must be large, also compared with its own standard error:
the spread of the ratios (median absolute deviation) over the root of their number. Among five members or more that
error is at least the spread of the members' medians, which also contains what makes consecutive steps similar.

Simulated, with times that vary by 10 % (log-normal): of 3 to 32 members none was named in 20,000 steps, and one that
became 30 % slower was named within 20 steps in 95 to 99 % of cases with 3, 4 and 32 members, in 82 % with 8. By 20 %:
none was named in 20,000 steps, either, and the slow one within 20 steps in 7 to 26 % of cases. Noise that persists
over many steps looks like a slow member: where a member's speed drifts by 20 %, 0.5 to 6 members are named by
mistake in 1000 steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

STEPS = 16
"""Steps that are compared: the latest ones."""
HISTORY = 64
"""Steps that are kept: of two members, the earlier ones show what each usually takes."""
MIN_FACTOR = 1.2
"""Factor by which a slow member takes longer than the others, at least, unless a caller sets another one."""
MIN_SECONDS = 0.005
"""Seconds by which it takes longer, at least: with steps of milliseconds everything takes a large part of them."""
MIN_ERRORS = 5.0
"""Standard errors by which the logarithm of its factor differs from zero, at least."""
_NORMAL = 1.4826
"""Standard deviation of normal numbers over their median absolute deviation."""
_MEDIAN = 1.2533
"""Standard error of the median of many normal numbers, over that of their mean."""
MANY = 5
"""Members from which on the spread of their medians is known."""


class Straggler(NamedTuple):
    """A member that is slower than the others."""

    rank: int
    seconds: float
    """Median of its own seconds a step."""
    usual: float
    """Median over the steps of the others' median seconds."""
    factor: float
    """Median of the ratios of the two."""


def find_stragglers(
    seconds: ArrayLike, work: ArrayLike | None = None, min_factor: float = MIN_FACTOR
) -> list[Straggler]:
    """Return the members that are slower than the others in the latest `STEPS` steps, the slowest first.

    At most half of the members can be slower than the others. Two members do not show which of them is unusual: the
    slower one must also be slower than in its own earlier steps.

        >>> [(found.rank, round(found.factor, 3)) for found in find_stragglers([[0.10, 0.10, 0.15]] * 16)]
        [(2, 1.5)]

    Args:
        seconds: `[S, R]` seconds that each of R members has taken for its own work in each step, the latest step last.
        work: `[R]` work of each member in the latest step, in any unit: a member with more than the others may take
            longer by that factor. None: the same for all.
        min_factor: factor by which a slow member takes longer than the others, at least.
    """
    all_SR = np.asarray(seconds, np.float64)
    if all_SR.shape[0] < STEPS or all_SR.shape[1] < 2 or all_SR[-STEPS:].min() <= 0:
        return []
    last_SR = all_SR[-STEPS:]
    others_SR = _median_of_others(last_SR)
    ratios_SR = np.log(last_SR / others_SR)
    median_R = np.median(ratios_SR, axis=0)
    allowed_R = np.log(min_factor * _shares(work, all_SR.shape[1]))
    is_slow_R = (median_R >= allowed_R) & (median_R >= MIN_ERRORS * _errors(ratios_SR, median_R))
    is_slow_R &= np.median(last_SR - others_SR, axis=0) >= MIN_SECONDS
    if all_SR.shape[1] == 2:
        is_slow_R &= _is_slower_than_before(all_SR, min_factor)
    found = [
        Straggler(int(rank), *(float(np.median(each[:, rank])) for each in (last_SR, others_SR, np.exp(ratios_SR))))
        for rank in np.flatnonzero(is_slow_R)
    ]
    return sorted(found, key=lambda each: -each.factor)


def is_still_slow(seconds: ArrayLike, rank: int, min_factor: float = MIN_FACTOR) -> bool:
    """Return whether a member that was slow still is, by half of the excess, so that it is not named twice.

    Args:
        seconds: `[S, R]`, as of `find_stragglers`.
        rank: of the member.
        min_factor: with which it was found.
    """
    last_SR = np.asarray(seconds, np.float64)[-STEPS:]
    return bool(np.median(last_SR[:, rank] / _median_of_others(last_SR)[:, rank]) >= (1 + min_factor) / 2)


def _median_of_others(seconds_SR: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of all but one member, `[S, R]`, from one sort of each row.

    Without a member of the lower half, it is the median of the rest one place further up, and so on.
    """
    size = seconds_SR.shape[1]
    order_SR = np.argsort(seconds_SR, axis=1)
    sorted_SR = np.take_along_axis(seconds_SR, order_SR, axis=1)
    place_SR = np.argsort(order_SR, axis=1)
    low, high = (size - 2) // 2, (size - 1) // 2  # places of the middle of size - 1 numbers
    parts = [np.where(place_SR <= middle, sorted_SR[:, [middle + 1]], sorted_SR[:, [middle]]) for middle in (low, high)]
    return (parts[0] + parts[1]) / 2


def _errors(ratios_SR: NDArray[np.float64], median_R: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard error of each member's median ratio: at least the typical one of all members."""
    spread_R = _NORMAL * np.median(abs(ratios_SR - median_R), axis=0)
    error_R = np.maximum(spread_R, np.median(spread_R)) * _MEDIAN / np.sqrt(len(ratios_SR))
    if len(median_R) < MANY:
        return error_R
    return np.maximum(error_R, _NORMAL * np.median(abs(median_R - np.median(median_R))))


def _shares(work: ArrayLike | None, size: int) -> NDArray[np.float64]:
    """Return each member's work over the median of the others, where it is more; otherwise 1."""
    if work is None:
        return np.ones(size)
    work_R = np.asarray(work, np.float64)[None]
    return np.maximum(1.0, work_R / np.maximum(_median_of_others(work_R), 1e-9))[0]


def _is_slower_than_before(seconds_SR: NDArray[np.float64], min_factor: float) -> NDArray[np.bool_]:
    earlier_SR = seconds_SR[:-STEPS]
    if len(earlier_SR) < STEPS:
        return np.zeros(seconds_SR.shape[1], np.bool_)
    return np.median(seconds_SR[-STEPS:], axis=0) >= min_factor * np.median(earlier_SR, axis=0)
