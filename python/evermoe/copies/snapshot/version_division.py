"""The bundles that a version sends in each of its steps: the same on all members. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from evermoe.copies.snapshot.rank_plan import Outgoing, RankReport, sent_reports


class VersionDivision:
    """Divides versions over steps, and knows what they omit.

    Args:
        fixed_steps: over which a version is sent; None for the fewest that windows need, and 1 until they are known.
    """

    def __init__(self, fixed_steps: int | None) -> None:
        self.fixed_steps = fixed_steps
        """Steps over which a version is sent from the next `restart` on; None: the fewest that windows need."""
        self.steps = fixed_steps or 1
        """Steps over which the next version is sent."""
        self.numbers: Sequence[int] = ()
        """Per bundle, the step of a version in which it is captured and sent; empty if all are captured at once."""
        self.optional: Collection[int] = ()
        """Bundles that a version may omit: it is sent over the fewest steps that the others need."""
        self._left_out: Collection[int] = ()
        """Bundles that the latest version omits."""
        self._other_bytes: Mapping[int, int] = {}
        """Bytes of the bundles that the latest version sends in another form than their state."""

    def restart(self) -> None:
        """Begin again with complete versions, since the members or the protection plan change."""
        self._left_out, self._other_bytes = (), {}
        self.steps = self.fixed_steps or 1

    def divide_captures(self, numbers: Sequence[int], steps: int) -> None:
        """Capture and send each version over some steps, from the next `restart` on.

        Args:
            numbers: as the attribute.
            steps: of a version.
        """
        if numbers or self.numbers:
            self.fixed_steps = steps if numbers else None
        self.numbers = numbers

    def prepare_version(self, left_out: Collection[int], other_bytes: Mapping[int, int]) -> bool:
        """Set what the next version sends: see `WindowPlanner.prepare_version`. Return whether that has changed."""
        before = self._left_out, self._other_bytes
        self._left_out, self._other_bytes = left_out, other_bytes
        return before != (left_out, other_bytes)

    def reports_of_version(self, reports: Sequence[RankReport]) -> list[RankReport]:
        """Return the ranks' reports with what the latest version sends."""
        return sent_reports(reports, self._left_out, self._other_bytes)

    def reports_of_smallest(self, reports: Sequence[RankReport]) -> list[RankReport]:
        """Return the ranks' reports with what each version sends: all but the optional bundles."""
        return sent_reports(reports, self.optional, self._other_bytes)

    def divide(self, outgoing: list[Outgoing]) -> tuple[list[list[Outgoing]], int]:
        """Divide what a rank sends of a version: into one part, or one for each step of a capture.

        Returns:
            The parts, and the steps over which each is sent.
        """
        if not self.numbers:
            return [outgoing], self.steps
        by_step = ([each for each in outgoing if self.numbers[each.bundle] == step] for step in range(self.steps))
        return [part for part in by_step if part] or [outgoing], 1
