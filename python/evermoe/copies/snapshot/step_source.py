"""Steps in which a planner finds windows, and the windows of earlier members."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from evermoe.comm.courier import Sent
from evermoe.comm.group import Group
from evermoe.comm.pacer import Pacer
from evermoe.comm.timed_steps import TimedStep
from evermoe.copies.snapshot.rank_plan import RankReport, as_steps
from evermoe.planning.trace import SentChunk, chrome_trace
from evermoe.planning.windows import StepProfile, Windows


class KnownWindows(NamedTuple):
    """Windows of a rank, from an earlier plan."""

    windows: str = ""
    """`Windows.to_json`; empty where nothing is known."""
    lead: float = 0.0
    """Seconds by which its steps begin later than those of rank 0."""


class StepSource:
    """Steps that a pacer records, each with the collectives of one group.

    Args:
        pacer: records the steps.
    """

    def __init__(self, pacer: Pacer) -> None:
        self.pacer = pacer
        self.until_vote = False
        """Whether each version must be complete before the vote that follows it; see `as_steps`."""
        self._timed: Sequence[TimedStep] = []
        self._windows: Windows | None = None
        self._latest: dict[bool, str] = {}

    def profile(self, group: Group, windows: Windows | None) -> tuple[list[StepProfile], list[float]]:
        """Return the latest steps, and their start times: seconds of `time.perf_counter`. May be collective.

        Args:
            group: all members.
            windows: of this member, as copies use them now.
        """
        timed = self.pacer.recorded_steps()
        self._timed, self._windows = timed, windows
        return as_steps(timed, self.until_vote), [each.start / 1e9 for each in timed]

    def unseen(self) -> AbstractContextManager[None]:
        """Leave the exchanges of a block out of the steps: most steps have none of them."""
        return nullcontext()

    @property
    def summary(self) -> str:
        """End of the summary of a plan."""
        return ""

    # ---- windows of earlier members

    def known(self, rank: int) -> KnownWindows:
        """Return the latest windows of this member, which has this rank."""
        return KnownWindows(self._latest.get(self.until_vote, ""))

    def remember(self, reports: Sequence[RankReport], rank: int) -> None:
        """Remember the windows of a plan, from the reports of all ranks; this member has this one."""
        if reports[rank].windows:
            self._latest[self.until_vote] = reports[rank].windows

    def inherit(
        self, group: Group, reports: Sequence[RankReport], trainers: int, *, knows_pace: bool
    ) -> tuple[list[RankReport], bool]:
        """Return the ranks' reports with windows for newcomers: those that train take the windows of another member.

        Args:
            group: all members.
            reports: with the windows that each rank knows.
            trainers: number of ranks that train, the first ones.
            knows_pace: whether the windows of this member are those of a complete profile.

        Returns:
            The reports, and whether the windows are those of a complete profile.
        """
        found = next((report.windows for report in reports[:trainers] if report.windows), "")
        trained = [replace(report, windows=report.windows or found) for report in reports[:trainers]]
        return [*trained, *reports[trainers:]], knows_pace

    # ---- traces

    def write_trace(self, path: str | Path, windows: Windows | None, sent: Sequence[Sent], rank: int) -> None:
        """Write a trace for Perfetto: the steps of the latest profile, their windows, and the messages that were sent.

        Args:
            path: the file.
            windows: of this member, as copies use them now.
            sent: messages.
            rank: of this member.

        Raises:
            ValueError: no profile is complete yet.
        """
        if not self._timed:
            raise ValueError("trace: no profile is complete yet")
        start = self._timed[0].start / 1e9
        chunks = [SentChunk(each.start / 1e9, (each.end - each.start) / 1e9, *each[2:5]) for each in sent]
        steps = as_steps(self._timed, until_vote=False)
        Path(path).write_text(chrome_trace(steps, self._windows, sent=chunks, rank=rank, start=start))
