"""Plans when snapshots travel: profile → windows → chunk plan → segments; repeated when the steps have changed.

    rank 0   pacer records its steps ─ find_windows ─┐             ┌─ plans of rank 0 and of its senders ─ cuts, places
    rank 1   pacer records its steps ─ find_windows ─┴─ all gather ┴─ plans of rank 1 and of its senders ─ cuts, places

Both ends must divide a bundle the same way, so they plan from the same gathered data, at a step given by its number.
The training thread plans between two steps; between profiles it costs nothing.

The first plan is made from one step, and checked as more are recorded, if anything is sent in windows. When the members
change, their windows stay in use, also by newcomers, until the next steps are recorded. Only complete profiles decide
over how many steps a version is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from evermoe.comm.courier import Courier
from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.comm.membership import MembershipManager
from evermoe.copies.snapshot.frequency import lowered, steps_of
from evermoe.copies.snapshot.held_parts import sent_parts
from evermoe.copies.snapshot.link import message_bytes
from evermoe.copies.snapshot.member_speeds import MemberSpeeds
from evermoe.copies.snapshot.rank_plan import (
    Outgoing,
    RankReport,
    peers_of,
    places_of,
    plan_of,
    segments_of,
)
from evermoe.copies.snapshot.segments import Segments
from evermoe.copies.snapshot.step_source import StepSource
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.copies.snapshot.version_division import VersionDivision
from evermoe.planning.budgets import Budgets, budgets_of
from evermoe.planning.schedule import DEFAULT_LINK, ChunkPlan, ChunkPolicy, Link, Memory
from evermoe.planning.windows import Change, StepProfile, Windows, find_windows, has_changed
from evermoe.presets import IdleWindows
from evermoe.profile.peers import clock_offset, connect

logger = logging.getLogger(__name__)

WARM_UP = 1
"""Steps after a change of membership that are not representative."""
FIRST_LOOKS: tuple[int, ...] = (1, 2, 4, 8, 16)
"""Recorded steps after a change of membership after which a first plan is made, before the profile is complete."""
TOLERANCE = 0.05
"""Part of a step by which windows may change before a new plan is made."""


class _ProfileTimes:
    """Steps after which members plan, from what their pacers have recorded by then; the same on all members.

    Args:
        options: the schedule of profiles.
    """

    def __init__(self, options: IdleWindows) -> None:
        self._options, self._base, self._looks = options, 0, FIRST_LOOKS

    def restart(self, step: int, *, is_urgent: bool) -> None:
        """Begin the first profile after this number of steps; if plans are not urgent, with one look at it only."""
        self._base, self._looks = step, FIRST_LOOKS if is_urgent else FIRST_LOOKS[:1]

    def is_complete_after(self, step: int) -> bool | None:
        """Return whether the profile is complete after a step; None if no plan is scheduled then."""
        steps, since = self._options.profile_steps, step - self._base - WARM_UP
        if since < 0:
            return None
        number, place = divmod(since, self._options.profile_interval)
        last = steps if number == 0 else steps + 1
        is_look = number == 0 and place < last and place in self._looks
        return place == last if place == last or is_look else None


class WindowPlanner:
    """Profiles the session's steps and plans when its snapshots travel.

    Args:
        steps: the steps in which windows are found, and their pacer.
        courier: sends the snapshots.
        store: holds the bundles.
        membership: the members.
        options: sizes, and the schedule of profiles.
        policy: plans chunks for windows; None: snapshots never wait for one.
        fixed_steps: over which a version is sent; None for the fewest that windows need, and 1 until they are known.
    """

    def __init__(
        self,
        steps: StepSource,
        courier: Courier,
        store: SnapshotStore,
        membership: MembershipManager,
        options: IdleWindows,
        policy: ChunkPolicy | None,
        fixed_steps: int | None = 1,
    ) -> None:
        self._steps, self._store, self._membership = steps, store, membership
        self._options, self._policy = options, policy
        self._profiles, self.speeds = _ProfileTimes(options), MemberSpeeds(courier)
        self.versions = VersionDivision(fixed_steps)
        self._reports: list[RankReport] = []
        self._is_settled = False
        """Whether the plan is that of a complete profile of these members."""
        self.knows_pace = False
        """Whether the latest windows are those of a complete profile."""
        self.windows: Windows | None = None
        """Windows of this member's network, as copies use them now; None before the first profile."""
        self.budgets = Budgets()
        """Bytes that copies can take in a step, by the latest profile of these members; the same on all."""
        self.summary = ""
        """Summary of the plan of the slowest member."""
        self.plans = 0
        """Number of plans so far."""
        store.chunk_bytes, courier.in_flight = self._message_bytes(DEFAULT_LINK), options.copy_buffers
        courier.link = DEFAULT_LINK

    @property
    def _group(self) -> Group:
        """Group of all members, replica nodes included."""
        return self._membership.everyone

    def restart(self, step: int, until_vote: bool, *, is_urgent: bool = True) -> None:
        """Discard the plan, since the members or the protection plan change from this step on. Collective.

        The previous windows are used for a new plan until the next steps are recorded.

        Args:
            step: steps taken.
            until_vote: whether each version must be complete before the vote that follows it.
            is_urgent: whether copies wait for windows, or for room in a step; the same on all members.

        Raises:
            PeerLost: another member is lost.
        """
        self._steps.until_vote = until_vote
        self._profiles.restart(step, is_urgent=is_urgent)
        self.versions.restart()
        self._reports, self.windows, self._is_settled, self.budgets = [], None, False, Budgets()
        self._store.segments = None
        self._steps.pacer.expect_windows({})
        if self._policy is not None and self._is_used:
            self._steps.pacer.record_steps(self._options.profile_steps, WARM_UP)
            self._carry_over(step, self._policy)

    @property
    def _is_used(self) -> bool:
        return self._group.size > 1 and self._options.profile_steps > 0

    def _carry_over(self, step: int, policy: ChunkPolicy) -> None:
        """Plan by the previous windows of the members; newcomers get windows as `StepSource.inherit` says."""
        mine = self._steps.known(self._group.rank)
        reports, self.knows_pace = self._steps.inherit(
            self._group,
            self._exchange(mine.windows, [mine.lead]),
            self._membership.num_trainers,
            knows_pace=self.knows_pace,
        )
        if any(report.windows for report in reports):
            self._adopt(reports, policy, step, "; by the previous windows", paces=True)

    def after(self, step: int) -> None:
        """Plan from the latest steps, if scheduled after this step, the same on all members. Collective.

        Raises:
            PeerLost: another member is lost.
        """
        if self._policy is None or not self._is_used:
            return
        is_complete = self._profiles.is_complete_after(step)
        if is_complete is not None:
            self._consider(step, self._policy, is_complete=is_complete)

    def _consider(self, step: int, policy: ChunkPolicy, *, is_complete: bool) -> None:
        """Plan if the recorded steps differ from the plan; by a first complete profile in any case."""
        with self._steps.unseen():
            reports = self._gather(*self._steps.profile(self._group, self.windows))
            changed = [f"rank {rank}: {report.changed}" for rank, report in enumerate(reports) if report.changed]
            if self._reports and not changed and (self._is_settled or not is_complete):
                return
            self._is_settled = self.knows_pace = is_complete
            if reports[self._group.rank].windows:
                self.speeds.note_profile(Windows.from_json(reports[self._group.rank].windows))
            why = f"; planned again, because of {changed[0]}" if changed else ""
            self._adopt(reports, policy, step, why, paces=is_complete)

    def _adopt(self, reports: list[RankReport], policy: ChunkPolicy, step: int, why: str, *, paces: bool) -> None:
        self._reports, self.budgets = reports, self._budgets(reports)
        self._steps.remember(reports, self._group.rank)
        if reports[self._group.rank].windows:
            self.windows = Windows.from_json(reports[self._group.rank].windows)
        self._plan(policy, paces=paces)
        if self._group.rank == 0 and any(report.outgoing for report in reports):
            logger.info("copies in windows from step %d on: %s%s", step, self.summary, why)

    def _budgets(self, reports: Sequence[RankReport]) -> Budgets:
        trainers = [report for report in reports if report.windows]
        seconds = max((Windows.from_json(report.windows).step_seconds for report in trainers), default=0.0)
        links = [None if report.link == DEFAULT_LINK else report.link[1] for report in trainers]
        return budgets_of(seconds, links, [report.host_speed or None for report in trainers])

    def _gather(self, steps: Sequence[StepProfile], starts: Sequence[float]) -> list[RankReport]:
        offset = clock_offset(connect(self._group)).seconds
        change: Change | None = None
        if self.windows is not None:
            change = has_changed(self.windows, steps, tolerance=TOLERANCE)
        windows = find_windows(steps, gamma=self._options.window_share).to_json() if steps else ""
        return self._exchange(windows, [start + offset for start in starts], "" if change is None else change.summary)

    def _exchange(self, windows: str, starts: list[float], changed: str = "") -> list[RankReport]:
        link = self.speeds.measure_link()
        is_on_gpu = any(device.type == "cuda" for device in self._store.state.devices())
        mine = RankReport(
            windows, starts, changed, (link.alpha, link.beta), self._outgoing(), self.speeds.host, is_on_gpu
        )
        if self._reports and not changed and mine.outgoing:
            bundles = (sum(each.parts[-1]) if each.parts else each.table for each in mine.outgoing)
            largest = min(self._message_bytes(mine.pace), max(bundles))
            mine = replace(mine, changed=mine.new_pace(self._reports[self._group.rank], largest))
        return [RankReport.from_json(fields) for fields in gather_json(self._group, asdict(mine))]

    def _outgoing(self) -> list[Outgoing]:
        found = []
        for kept in self._store.own:
            peers = list(kept.bundle.holders[1:])
            if peers:
                parts = sent_parts(kept)
                found.append(Outgoing(kept.number, peers, parts, kept.arena.units()[0][1]))
        return found

    def _plan(self, policy: ChunkPolicy, *, paces: bool) -> None:
        """Plan for this rank and for those that send to it. Collective.

        `paces`: whether to choose the steps of a version again, too.
        """
        rank, reports = self._group.rank, self._reports
        if self.versions.fixed_steps is None and paces:
            alone = 1
            if self.knows_pace and self.windows is not None:
                sent = self.versions.reports_of_smallest(reports)
                needed = plan_of(rank, sent, policy, self._memory(sent[rank]), None)
                alone = steps_of(needed.reason, self.windows.step_seconds, reports[rank].pace)
            self.versions.steps = max(gather_json(self._group, alone))
        plans = self._divide(policy)
        self.speeds.use_link(Link(*reports[rank].link))
        mine = [0.0, 0, ""]
        if self.windows is not None and rank in plans:
            self._steps.pacer.expect_windows(places_of(self.windows))
            reason = max((plan.reason for plan, _ in plans[rank]), key=lambda each: each.delay_seconds)
            is_done = self.versions.fixed_steps is None and self.knows_pace
            said = lowered(reason, self.windows.step_seconds, reports[rank].pace, is_done=is_done)
            if reports[rank].waits_for_host:
                said += f"; messages keep pace with the copy from GPU to host, {self.speeds.host / 1e6:.3g} MB/s"
            words = f"{reason}{said}"
            if self.versions.numbers:
                words = f"of {len(plans[rank])} slices, each as a version in a step, the largest: {reason}"
            mine = [reason.delay_seconds, reason.steps_per_version, f"{words} (rank {rank})"]
        everyone = gather_json(self._group, mine)
        self.summary = max(everyone)[2] + self._steps.summary
        self.plans += 1

    def prepare_version(self, left_out: Collection[int], other_bytes: Mapping[int, int]) -> None:
        """Plan the next version, the same on all members.

        Args:
            left_out: some of the optional bundles of `versions`, which the version omits.
            other_bytes: bytes of the bundles that it sends in another form than their state.
        """
        has_changed = self.versions.prepare_version(left_out, other_bytes)
        if has_changed and self._reports and self._policy is not None:
            self._divide(self._policy)

    @property
    def bytes_per_step(self) -> int:
        """Bytes of a version's bundles that this rank can send in the windows of one step."""
        rank = self._group.rank
        if self._policy is None or not self._reports or not self._reports[rank].windows:
            return 0
        plan = plan_of(rank, self._reports, self._policy, self._memory(self._reports[rank]), 1)
        return sum(chunk.bytes for chunk in plan.chunks if chunk.window is not None)

    def _message_bytes(self, link: Link) -> int:
        return self._options.copy_buffer_bytes or message_bytes(link.beta)

    def _memory(self, sender: RankReport) -> Memory:
        buffers = self._options.copy_buffers
        return Memory(buffers * self._message_bytes(sender.pace), buffers)

    def _divide(self, policy: ChunkPolicy) -> dict[int, list[tuple[ChunkPlan, list[Outgoing]]]]:
        """Divide what this rank sends and receives from now on into segments; return the plans, by sender."""
        rank, reports = self._group.rank, self.versions.reports_of_version(self._reports)
        is_sender = [
            report.windows and (s == rank or rank in peers_of(report.outgoing)) for s, report in enumerate(reports)
        ]
        plans = {s: self._plans_of(s, reports, policy) for s, is_one in enumerate(is_sender) if is_one}
        segments = {
            s: [each for plan, outgoing in some for each in segments_of(plan, outgoing, policy)]
            for s, some in plans.items()
        }
        receives = [
            segment._replace(peer=s) for s in plans if s != rank for segment in segments[s] if segment.peer == rank
        ]
        self._store.segments = Segments(segments.get(rank, []), receives)
        return plans

    def _plans_of(
        self, sender: int, reports: Sequence[RankReport], policy: ChunkPolicy
    ) -> list[tuple[ChunkPlan, list[Outgoing]]]:
        """Return a sender's plans and what each sends: one plan for a version, or one for each step of a capture."""
        parts, steps = self.versions.divide(reports[sender].outgoing)
        found = []
        for part in parts:
            adjusted = [replace(each, outgoing=part) if s == sender else each for s, each in enumerate(reports)]
            found.append((plan_of(sender, adjusted, policy, self._memory(reports[sender]), steps), part))
        return found

    def write_trace(self, path: str | Path) -> None:
        """Write this member's latest profiled steps, its windows and its copies: see `StepSource.write_trace`."""
        self._steps.write_trace(path, self.windows, self.speeds.sent_messages(), self._group.rank)
