"""Plans when the copies of a pipeline's stages travel: in windows that the profilers of all ranks have found."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from evermoe.comm.courier import Courier
from evermoe.comm.gather import share_json
from evermoe.comm.membership import MembershipManager
from evermoe.comm.pacer import Pacer
from evermoe.copies.snapshot.rank_plan import COPIES, Outgoing, RankReport, lead, plan_of
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.copies.snapshot.window_plan import WARM_UP, WindowPlanner
from evermoe.planning.schedule import ChunkPolicy
from evermoe.planning.windows import StepProfile
from evermoe.presets import IdleWindows
from evermoe.profile import Profiler
from evermoe.profile.bubble_time import BubbleTime, bubble_time


class _Known(NamedTuple):
    """Knowledge of all ranks about one of them."""

    windows: str
    """`Windows.to_json`; empty where nothing is known."""
    lead: float
    """Seconds by which its steps begin later than those of rank 0."""


_UNKNOWN = _Known("", 0.0)


class StageWindowPlanner(WindowPlanner):
    """Find windows in the profiles of all ranks of a pipeline.

    The network of a rank that waits for a peer is idle. A transfer keeps it busy from the time when both ends have
    begun until this rank learns that it is over, since the pacer learns of it then.

    Args:
        pacer, courier, store, membership, options, policy, fixed_steps: as of `WindowPlanner`.
        stages: of the pipeline.
    """

    profiler: Profiler
    bubbles: BubbleTime | None = None
    """Bubbles of the rank that has the most, by the latest profile; the same on all ranks."""
    step_bytes: Mapping[int, int] = MappingProxyType({})
    """Bytes of the steps of each bundle that the latest version sends as a step; the same on all ranks. See
    `evermoe.pipeline.step_contents`."""
    _known: Sequence[_Known] = ()
    """Input of the latest plan, by rank; empty on a newcomer, the same on all others."""

    def __init__(
        self,
        pacer: Pacer,
        courier: Courier,
        store: SnapshotStore,
        membership: MembershipManager,
        options: IdleWindows,
        policy: ChunkPolicy | None,
        fixed_steps: int | None,
        stages: int,
    ) -> None:
        super().__init__(pacer, courier, store, membership, options, policy, fixed_steps)
        self._stages = stages

    @property
    def bubble_bytes(self) -> int:
        """Bytes of a version's bundles that this rank can send in the windows of one step."""
        mine = self._reports[self._group.rank] if self._reports else None
        if self._policy is None or mine is None or not mine.windows:
            return 0
        plan = plan_of(self._group.rank, self._reports, self._policy, self._memory, 1)
        return sum(chunk.bytes for chunk in plan.chunks if chunk.window is not None)

    def cut(self, numbers: Sequence[int], steps: int) -> None:
        """Divide versions into slices from the next `restart` on.

        Args:
            numbers: as `WindowPlanner.numbers`.
            steps: of a window.
        """
        if numbers or self.numbers:
            self.fixed_steps = steps if numbers else None
        self.numbers = numbers

    def send_steps(self, step_bytes: Mapping[int, int]) -> None:
        """Plans for a next version that sends some bundles as steps; `step_bytes` has their bytes."""
        if step_bytes != self.step_bytes:
            self.step_bytes = step_bytes
            if self._reports and self._policy is not None:
                self._divide(self._policy)

    def _without(self, bundles: Collection[int]) -> list[RankReport]:
        reports = super()._without(bundles)
        return [replace(report, outgoing=[*map(self._as_sent, report.outgoing)]) for report in reports]

    def _as_sent(self, bundle: Outgoing) -> Outgoing:
        nbytes = self.step_bytes.get(bundle.bundle)
        return bundle if nbytes is None else bundle._replace(parts=[(bundle.parts[0][0], nbytes)])

    def _carry_over(self, policy: ChunkPolicy) -> None:
        """Plans with the previous windows; a newcomer takes those of its predecessor, which all others remember.

        Ranks run the same schedule, so windows lie between the same transfers.
        """
        mine = self._known[self._group.rank] if self._known else _UNKNOWN
        reports = self._exchange(mine.windows, [mine.lead])
        missing = [rank for rank, report in enumerate(reports) if not report.windows]
        if len(missing) == len(reports):
            return
        source = next(rank for rank, report in enumerate(reports) if report.windows)
        shared = None
        if self._group.rank == source:
            shared = [self.knows_pace, self.bubbles, [self._known[rank] for rank in missing]]
        self.knows_pace, bubbles, rows = share_json(self._group, shared, source)
        self.bubbles = None if bubbles is None else BubbleTime(*bubbles)
        for rank, row in zip(missing, rows, strict=True):
            known = _Known(*row)
            reports[rank] = replace(reports[rank], windows=known.windows, starts=[known.lead])
        self._remember(reports)
        self._adopt(reports, policy, self._base, "; by the previous windows", paces=True)

    def _remember(self, reports: Sequence[RankReport]) -> None:
        self._known = [_Known(report.windows, lead(reports[0], report)) for report in reports]

    def _consider(self, step: int, policy: ChunkPolicy, *, is_complete: bool) -> None:
        plans = self.plans
        with self.profiler.unseen():  # most steps have none of this
            super()._consider(step, policy, is_complete=is_complete)
        if self.plans != plans:
            self._remember(self._reports)

    def _plan(self, policy: ChunkPolicy, *, paces: bool) -> None:
        super()._plan(policy, paces=paces)
        if self.bubbles is not None:
            self.summary += f"; {self.bubbles}"

    def _profile(self) -> tuple[list[StepProfile], list[float]]:
        gathered = self.profiler.gather_windows(self._group)
        times = [bubble_time(gathered.steps, gathered.starts, rank, self._stages) for rank in range(gathered.size)]
        self.bubbles = max((each for each in times if each is not None), default=None)
        met = gathered.steps[self._group.rank]
        recorded = self.profiler.recorded[-len(met) :]
        found = [each for each in zip(recorded, met, strict=True) if each[0].number >= WARM_UP]
        return [known_busy(local.step, both) for local, both in found], [local.start for local, _ in found]


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
