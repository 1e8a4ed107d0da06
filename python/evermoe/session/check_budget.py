"""Number of bytes that members compare in a vote, and the votes in which they do, by the time that it takes."""

from __future__ import annotations

SHARE = 0.003
"""Largest part of a step's time that digests take."""
MIN_BYTES = 256 << 10
"""Fewer bytes take no less time."""
MAX_BYTES = 4 << 30
INTERVALS = (1, 2, 4, 8)
"""Steps from one comparison to the next: a step whose number is a multiple of 8 always has one."""


class CheckBudget:
    """Adapts bytes and interval to the sums of a vote, so that they are the same on all members.

    >>> budget = CheckBudget()
    >>> budget.after(seconds=0.001, step_seconds=10.0)  # a tenth of what may be spent
    >>> budget.nbytes // MIN_BYTES, budget.interval
    (2, 1)
    >>> budget.after(seconds=0.01, step_seconds=0.1)
    >>> budget.after(seconds=0.01, step_seconds=0.1)
    >>> budget.nbytes // MIN_BYTES, budget.interval
    (1, 8)
    """

    def __init__(self) -> None:
        self.nbytes = MIN_BYTES
        """Bytes of the state and the gradients that a member reads at a time."""
        self.interval = 1
        """Steps from one comparison to the next."""

    def is_due(self, step: int) -> bool:
        """Return whether members compare something in the vote on this step."""
        return step % self.interval == 0

    def after(self, seconds: float, step_seconds: float) -> None:
        """Adapt to a vote with a comparison.

        Args:
            seconds: that the members' digests took.
            step_seconds: of their steps; both are sums over all members.
        """
        if not seconds > 0 or not step_seconds > 0:
            return
        allowed = SHARE * step_seconds
        wanted = self.nbytes * min(2.0, max(0.5, allowed / seconds))
        self.nbytes = min(MAX_BYTES, max(MIN_BYTES, int(wanted)))
        needed = seconds / allowed if wanted < MIN_BYTES else 1
        self.interval = next((each for each in INTERVALS if each >= needed), INTERVALS[-1])
