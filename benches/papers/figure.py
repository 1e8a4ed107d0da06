"""Figures of the papers: published numbers, evermoe's numbers, how these are computed, and reasons of differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

How = Literal["exact", "planner", "simulation", "real run", "arithmetic", "not computed"]
"""Ways to compute a number:

- exact: a closed form, or an enumeration, of a setting that the paper states completely;
- planner: evermoe's planners, for a setting of which the paper leaves something open; `Row.why` says what was assumed;
- simulation: a job with many failures in simulated time, by `evermoe.simulate`: evermoe's planners and protocol,
  seconds of the paper where it states them and assumed ones where not; `Row.why` says which;
- real run: a real training or a measured time, smaller than the paper's;
- arithmetic: sums, products and quotients of numbers that the paper states, such as parameters times bytes or bytes
  over bandwidth. They test whether the paper's numbers agree with each other, and nothing of evermoe;
- not computed: the paper states a number that evermoe cannot compute, or cannot fail to reach; `Row.why` says why.
"""

Outcome = Literal["not stated", "not computed", "fitted", "bound holds", "within 1 %", "within 10 %", "further"]
"""Outcomes of a comparison, in the order of the summary's columns. Each row has one."""

PAPERS = {
    "gemini": "Gemini: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints (SOSP 2023)",
    "pec": "Partial Experts Checkpoint: Efficient Fault Tolerance for Sparse Mixture-of-Experts Model Training",
    "lazarus": "Lazarus: Resilient and Elastic Training of Mixture-of-Experts Models with Adaptive Expert Placement",
    "baft": "BAFT: bubble-aware fault-tolerant framework for distributed training (from its introduction on)",
    "moetion": "MoEtion: Efficient and Reliable Checkpointing for Mixture-of-Experts Models at Scale (first version)",
}
"""Titles, by the prefix of IDs."""


@dataclass(frozen=True)
class Stated:
    """Number that a paper states: one value, or bounds where the text says "more than" or "up to"."""

    low: float
    high: float
    place: str
    """Place in the paper: section, figure or table."""
    terms: str = ""
    """The numbers that the text states, where this one is their quotient."""

    def __post_init__(self) -> None:
        if not self.low <= self.high or (math.isinf(self.low) and math.isinf(self.high)) or not self.place:
            raise ValueError(f"expected low <= high, one of them finite, and a place; got {self!r}")

    @property
    def is_value(self) -> bool:
        """Whether it is one value, not a bound or a range."""
        return self.low == self.high

    def difference(self, ours: float) -> float | None:
        """Return the relative difference of `ours` to the nearest stated value; 0 within the bounds, None if that is
        zero.

        >>> stated("7.2", at_least=250).difference(320), stated("4", 93.3).difference(0.933 * 93.3)
        (0.0, -0.067)
        """
        if self.low <= ours <= self.high:
            return 0.0
        nearest = self.low if ours < self.low else self.high
        return round((ours - nearest) / abs(nearest), 12) if nearest else None

    def with_unit(self, unit: str) -> str:
        """Format the number for people, with its unit and the numbers that it is a quotient of."""
        if self.is_value:
            number = shown(self.low)
        elif math.isinf(self.high):
            number = f"≥ {shown(self.low)}"
        else:
            number = f"≤ {shown(self.high)}" if math.isinf(self.low) else f"{shown(self.low)} to {shown(self.high)}"
        return " ".join(part for part in (number, unit, f"= {self.terms}" if self.terms else "") if part)

    def __str__(self) -> str:
        return self.with_unit("")


def stated(place: str, value: float | None = None, *, at_least: float = -math.inf, at_most: float = math.inf) -> Stated:
    """Return a number that the text states: a value, or one or two bounds.

    Args:
        place: section, figure or table.
        value: the number, where the text gives one.
        at_least: the lower bound, where the text says "more than" or states a range.
        at_most: the upper bound, where it says "less than" or "no more than". "Up to" is a value, the largest one.
    """
    return Stated(at_least, at_most, place) if value is None else Stated(value, value, place)


def quotient(place: str, number: float, base: float) -> Stated:
    """Return the quotient of two numbers that the text states.

    >>> str(quotient("6.2", 45, 34))
    '1.324 = 45 / 34'
    """
    return Stated(number / base, number / base, place, f"{number:g} / {base:g}")


def change(place: str, base: float, low: float, high: float | None = None) -> Stated:
    """Return the change from a stated number to another, or to a stated range, in percent.

    A ratio near 1 would be within 1 % of any other such ratio; their changes are not.

    >>> str(change("3.1", 4.8851, 4.8808, 4.8854))
    '-0.08802 to 0.006141 = 4.8808 to 4.8854 against 4.8851'
    """
    high = low if high is None else high
    terms = f"{low:g}{f' to {high:g}' if high > low else ''} against {base:g}"
    return Stated(100 * (low / base - 1), 100 * (high / base - 1), place, terms)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number of a figure."""

    quantity: str
    """Name of the quantity, with its setting."""
    unit: str
    """Unit of both numbers; empty for a plain count or ratio."""
    paper: Stated | None
    """Number in the paper's text; None if our copy states none."""
    ours: float | None
    """evermoe's number; None if it is not computed."""
    how: How
    why: str
    """Inputs of the computation, and the reason of a difference."""
    is_fitted: bool = False
    """Whether something that the paper leaves open was chosen so that this number results."""

    def __post_init__(self) -> None:
        if (self.ours is None) != (self.how == "not computed"):
            raise ValueError(
                f"{self.quantity}: expected a number, or how='not computed' without one; got {self.ours!r}"
            )
        if self.paper is None and (self.is_fitted or self.ours is None):
            raise ValueError(f"{self.quantity}: expected a number of the paper for a fitted or not computed row")

    @property
    def difference(self) -> float | None:
        """Relative difference to the paper's number; None if either is missing."""
        return None if self.paper is None or self.ours is None else self.paper.difference(self.ours)

    @property
    def outcome(self) -> Outcome:
        """Column of the summary that counts this row."""
        if self.paper is None or self.ours is None:
            return "not stated" if self.paper is None else "not computed"
        if self.is_fitted:
            return "fitted"
        if self.difference == 0 and not self.paper.is_value:
            return "bound holds"
        apart = math.inf if self.difference is None else abs(self.difference)
        return "within 1 %" if apart <= 0.01 else "within 10 %" if apart <= 0.1 else "further"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure, table, theorem or claim of a paper."""

    id: str
    """Paper and figure, such as `gemini-f9`."""
    title: str
    """Title of the figure."""
    rows: Callable[[], list[Row]] = list
    """Function that computes the rows; none if our copy states no number of the figure."""
    note: str = ""
    """Note about what our copy does not state, or what is left out and why."""
    is_slow: bool = False
    """Whether it takes more than a second, as it trains or measures."""
    is_error: bool = False
    """Whether it has a counter-example: a case in which the paper's statement does not hold."""


def shown(value: float) -> str:
    """Format a number for people: four digits, five around 1.

    >>> shown(93.33333), shown(2926.0), shown(0.0), shown(1.00006)
    ('93.33', '2,926', '0', '1.0001')
    """
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.5g}" if 0.9 < abs(value) < 1.1 else f"{value:.4g}"


def reasons(rows: Sequence[Row]) -> list[str]:
    """Return the rows' reasons for people: "as above" if it equals that of the previous row."""
    befores = ["", *(row.why for row in rows)]
    return ["as above" if row.why == before else row.why for before, row in zip(befores, rows, strict=False)]
