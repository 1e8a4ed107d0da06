"""The bubbles of a pipeline's schedule, in which its copies travel: windows in the profiles of all ranks.

The network of a rank that waits for a peer is idle. A transfer keeps it busy from the time when both ends have begun
until this rank learns that it is over, since the pacer learns of it then.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch

from evermoe.comm.courier import Sent
from evermoe.comm.gather import share_json
from evermoe.comm.group import Group
from evermoe.comm.pacer import Pacer
from evermoe.copies.snapshot.rank_plan import COPIES, RankReport, lead
from evermoe.copies.snapshot.step_source import KnownWindows, StepSource
from evermoe.copies.snapshot.window_plan import WARM_UP, WindowPlanner
from evermoe.planning.windows import StepProfile, Windows
from evermoe.profile import Profiler
from evermoe.profile.bubble_time import BubbleTime, bubble_time
from evermoe.profile.follower import StreamFollower
from evermoe.profile.recorder import OpenSpan


class Bubbles(StepSource):
    """The steps since the last recovery, as a profiler records them; the pacer is notified of each transfer.

    Ranks run the same schedule, so windows lie between the same transfers, also of a newcomer.

    Args:
        pacer: is notified of the schedule's transfers.
        rank: of the pipeline.
        stages: of the pipeline.
        steps: number of steps that are kept.
        device: of the rank's stage.
    """

    def __init__(self, pacer: Pacer, rank: int, stages: int, steps: int, device: torch.device) -> None:
        super().__init__(pacer)
        self._rank, self._stages, self._steps, self._device = rank, stages, steps, device
        self._follower = StreamFollower() if device.type == "cuda" else None
        self._bubbles: BubbleTime | None = None
        """Bubbles of the rank that has the most, by the latest profile; the same on all ranks."""
        self._known: Sequence[KnownWindows] = ()
        """Input of the latest plan, by rank; empty on a newcomer, the same on all others."""
        self.profiler = self._new_profiler()

    def restart(self, planner: WindowPlanner, step: int) -> None:
        """Begin a new profile and plan after a recovery, since all ranks must record the same steps.

        Until the profile is complete the previous windows are used.
        """
        self.profiler.detach()
        self.profiler = self._new_profiler()
        self.profiler.attach()
        planner.restart(step, True)
        self.pacer.begin_step(self.profiler.began)

    def begin_step(self) -> None:
        """Begin a step in the profile and in the pacer, at the same time."""
        self.profiler.step()
        self.pacer.begin_step(self.profiler.began)

    def end(self) -> None:
        """End the profile."""
        self.profiler.detach()
        if self._follower is not None:
            self._follower.close()

    def _new_profiler(self) -> Profiler:
        profiler = Profiler(device=self._device, keep=max(1, self._steps), rank=self._rank)
        profiler.follow_network(self._transfer_begins, self._transfer_ends)
        return profiler

    def _transfer_begins(self, span: OpenSpan) -> None:
        if span.kind != "send":  # a receive waits for its sender, and meanwhile the network is idle
            return
        if isinstance(span.start, int):
            self.pacer.transfer_begins()
        elif self._follower is not None:
            self._follower.follow(span.start, lambda at: self.pacer.transfer_begins())

    def _transfer_ends(self, span: OpenSpan) -> None:
        if isinstance(span.end, int):
            self.pacer.transfer_ends(span.name, span.end)
        elif self._follower is not None and span.end is not None:
            self._follower.follow(span.end, functools.partial(self.pacer.transfer_ends, span.name))

    # ---- for the planner

    @property
    def summary(self) -> str:
        """Time of the bubbles, once it is known."""
        return "" if self._bubbles is None else f"; {self._bubbles}"

    def profile(self, group: Group, windows: Windows | None) -> tuple[list[StepProfile], list[float]]:
        """Return the latest steps, and their start times; collective."""
        gathered = self.profiler.gather_windows(group)
        times = [bubble_time(gathered.steps, gathered.starts, rank, self._stages) for rank in range(gathered.size)]
        self._bubbles = max((each for each in times if each is not None), default=None)
        met = gathered.steps[group.rank]
        recorded = self.profiler.recorded[-len(met) :]
        found = [each for each in zip(recorded, met, strict=True) if each[0].number >= WARM_UP]
        return [known_busy(local.step, both) for local, both in found], [local.start for local, _ in found]

    def unseen(self) -> AbstractContextManager[None]:
        """Leave the exchanges of a block out of the steps."""
        return self.profiler.unseen()

    def known(self, rank: int) -> KnownWindows:
        """Return the latest windows of this rank."""
        return self._known[rank] if self._known else KnownWindows()

    def remember(self, reports: Sequence[RankReport], rank: int) -> None:
        """Remember the windows of all ranks."""
        self._known = [KnownWindows(report.windows, lead(reports[0], report)) for report in reports]

    def inherit(
        self, group: Group, reports: Sequence[RankReport], trainers: int, *, knows_pace: bool
    ) -> tuple[list[RankReport], bool]:
        """Return the reports with windows for newcomers: those of their predecessors, which all others remember."""
        missing = [rank for rank, report in enumerate(reports) if not report.windows]
        if len(missing) == len(reports):
            return [*reports], knows_pace
        source = next(rank for rank, report in enumerate(reports) if report.windows)
        shared = None
        if group.rank == source:
            shared = [knows_pace, self._bubbles, [self._known[rank] for rank in missing]]
        knows_pace, bubbles, rows = share_json(group, shared, source)
        self._bubbles = None if bubbles is None else BubbleTime(*bubbles)
        found = {rank: KnownWindows(*row) for rank, row in zip(missing, rows, strict=True)}
        heirs = {rank: replace(reports[rank], windows=w, starts=[lead]) for rank, (w, lead) in found.items()}
        return [heirs.get(rank, report) for rank, report in enumerate(reports)], knows_pace

    def write_trace(self, path: str | Path, windows: Windows | None, sent: Sequence[Sent], rank: int) -> None:
        """Write a trace for Perfetto; see `PipelineSession.write_trace`."""
        self.profiler.write_trace(path, windows=windows, sent=sent)


def known_busy(local: StepProfile, met: StepProfile) -> StepProfile:
    """The transfers of a step, each from the time when both ends have begun until this rank learns that it is over.

    The wait before the vote is the last one: from then on the network counts as busy until the step ends.

        >>> from evermoe.planning.windows import Span
        >>> mine = StepProfile(9.0, [Span("receive from 0", "receive", "network", 1.0, 5.0, 64, [0])])
        >>> both = StepProfile(9.0, [Span("receive from 0", "receive", "network", 4.0, 1.5, 64, [0])])
        >>> known_busy(mine, both).spans[0][3:5]
        (4.0, 2.0)

    Args:
        local: profile of this rank alone.
        met: the same step, from `evermoe.profile.meet`.
    """
    spans = []
    for mine, both in zip(local.spans, met.spans, strict=True):
        if mine.resource == "network":
            end = local.seconds if mine.name == COPIES else mine.start + mine.seconds
            spans.append(mine._replace(start=both.start, seconds=max(0.0, end - both.start)))
    return StepProfile(local.seconds, spans)
