"""When snapshots travel: profile → windows → chunk plan → segments and places, again whenever the steps have changed.

    rank 0   pacer records some steps ─ find_windows ─┐             ┌─ plans of rank 0 and of its senders ─ cuts, places
    rank 1   pacer records some steps ─ find_windows ─┴─ all gather ┴─ plans of rank 1 and of its senders ─ cuts, places

Both ends must divide a bundle alike, so they plan from the same gathered data, at a step that all know from its number.
The training thread does it, between two steps; there is no thread of its own, and between profiles no cost.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from evermoe.comm.courier import Courier
from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.comm.membership import Membership
from evermoe.comm.pacer import ANY_TIME, Pacer, TimedStep
from evermoe.options import Options, option
from evermoe.planning.schedule import (
    DEFAULT_LINK,
    ChunkPlan,
    ChunkPolicy,
    CopyItem,
    Link,
    Memory,
    Receiver,
    plan_chunks,
)
from evermoe.planning.trace import SentChunk, chrome_trace
from evermoe.planning.windows import Change, Span, StepProfile, Windows, find_windows, has_changed
from evermoe.profile.peers import clock_offset, connect
from evermoe.snapshot.frequency import lowered
from evermoe.snapshot.link import Budgets, budgets_of, measure_link
from evermoe.snapshot.segments import Segment, Segments
from evermoe.snapshot.store import SnapshotStore

logger = logging.getLogger(__name__)

COPIES = "copies"
"""Name of the span in which the training thread waits for copies before a vote."""
WARM_UP = 3
"""Steps after a change of membership that are no measure."""
TOLERANCE = 0.05
"""Part of a step by which windows may change before it is planned anew."""
MOST_VERSION_STEPS = 64
"""Steps over which a version is sent at most, unless more are asked for."""


@dataclass(frozen=True, kw_only=True)
class WindowOptions(Options):
    """How snapshots travel."""

    copy_buffer_bytes: int = option(4 << 20, shared=True, least=1)
    """Bytes of a snapshot that travel at once, at most."""
    copy_buffers: int = option(2, shared=True, least=1, most=64)
    """Messages of a snapshot that are under way at a time: Gemini's b sub-buffers. 1: each waits for the end of the
    one before, which is the paper's variant without a pipeline."""
    window_share: float = option(0.9, shared=True, above=0, most=1)
    """Part of an idle window that copies may use: Gemini's gamma."""
    copy_pacing: Literal["windows", "blocking"] = option("windows", shared=True)
    """`windows`: snapshots travel while the network is idle. `blocking`: training waits after each update until they
    are there, as in the paper's baseline."""
    profile_steps: int = option(20, shared=True, least=0)
    """Steps that are recorded to find the network's idle windows, in which snapshots travel from then on; 0: none, they
    travel whenever no collective runs."""
    profile_every: int = option(1000, shared=True, least=1)
    """Steps between two such profiles. Another one follows each change of the members."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.profile_every < self.profile_steps + 2:
            raise ValueError(
                f"expected profile_every >= profile_steps + 2 = {self.profile_steps + 2}, got {self.profile_every}"
            )


class Outgoing(NamedTuple):
    """A bundle that a rank sends."""

    bundle: int
    peers: list[int]
    parts: list[tuple[int, int]]
    """Offset and bytes of each unit, one behind the other. Before the first one is the table of their digests."""


@dataclass(frozen=True)
class RankReport:
    """What a rank tells the others about its steps, and what it sends."""

    windows: str
    """`Windows.to_json`; empty from a replica node, whose network is always idle."""
    starts: list[float]
    """When its recorded steps began: seconds on rank 0's clock."""
    changed: str
    """How this rank's profile differs from its last report; empty if not significantly."""
    link: tuple[float, float]
    """Alpha and beta of its link."""
    outgoing: list[Outgoing]
    host_speed: float = 0.0
    """Bytes per second at which its state is copied in its own memory; 0 before that was measured."""


# ---- pure


def as_steps(timed: Sequence[TimedStep], until_vote: bool) -> list[StepProfile]:
    """What a pacer has recorded, as `find_windows` takes it.

    Args:
        timed: steps.
        until_vote: a version must be whole before the next vote: from when it is waited for, the network counts as
            busy until the step is over.
    """
    steps = []
    for start, end, busy in timed:
        spans = []
        for name, since, until in busy:
            is_last = until_vote and name == COPIES
            ends = end if is_last else until
            spans.append(Span(name, "collective", "network", (since - start) / 1e9, (ends - since) / 1e9))
            if is_last:
                break
        steps.append(StepProfile((end - start) / 1e9, spans))
    return steps


def places_of(windows: Windows) -> dict[tuple[str | None, int], tuple[int, float]]:
    """The network's windows as `Pacer.expect` takes them."""
    found = [(number, window) for number, window in enumerate(windows.windows) if window.resource == "network"]
    return {
        (window.after, window.occurrence): (number, window.seconds) for number, window in found if window.offset == 0.0
    }


def items_of(outgoing: Sequence[Outgoing], policy: ChunkPolicy) -> tuple[list[CopyItem], list[tuple[int, int]]]:
    """What a rank sends, for `plan_chunks`; and of each piece, bundle and first byte. BAFT packs whole units.

    Digests come last: they are known when all units are captured.
    """
    items, origins = [], []
    for bundle, peers, parts in outgoing:
        first = parts[0][0]
        units = parts if policy == "baft" else [(first, sum(nbytes for _, nbytes in parts))]
        for offset, nbytes in [*units, (0, first)]:
            items.append(CopyItem(f"{bundle}:{offset}", nbytes, peers))
            origins.append((bundle, offset))
    return items, origins


def plan_of(
    rank: int, reports: Sequence[RankReport], policy: ChunkPolicy, memory: Memory, version_steps: int | None = 1
) -> ChunkPlan:
    """When a rank sends what: the same wherever it is computed. Chunks are in windows that both ends have.

    `memory` and `version_steps`: as `plan_chunks` takes them.
    """
    items, _ = items_of(reports[rank].outgoing, policy)
    windows = Windows.from_json(reports[rank].windows)
    ends = []
    for peer in sorted(_peers(reports[rank].outgoing)):
        if reports[peer].windows:
            ends.append(Receiver(peer, Windows.from_json(reports[peer].windows), _lead(reports[rank], reports[peer])))
        else:
            ends.append(Receiver(peer, windows))
    link, most = Link(*reports[rank].link), MOST_VERSION_STEPS
    return plan_chunks(
        items, windows, link, memory, policy=policy, receivers=ends, max_steps=most, version_steps=version_steps
    )


def _lead(sender: RankReport, receiver: RankReport) -> float:
    return statistics.median(b - a for a, b in zip(sender.starts, receiver.starts, strict=True))


def segments_of(plan: ChunkPlan, outgoing: Sequence[Outgoing], policy: ChunkPolicy) -> list[Segment]:
    """The chunks of a sender as segments of its bundles; `peer` is the destination.

    What has no window comes last; in MoEtion, which sends it beside compute (W* of its Algorithm 4), first.
    A version of `auto` is not waited for: its chunks may go before the step that they are planned for.
    """
    items, origins = items_of(outgoing, policy)
    origin = {item.unit: found for item, found in zip(items, origins, strict=True)}
    segments: list[Segment] = []
    places: dict[tuple[int, int], int] = {}
    is_beside = policy == "moetion"
    for chunk in sorted(plan.chunks, key=lambda chunk: (chunk.window is None) != is_beside):
        bundle, first = origin[chunk.unit]
        place = places.get((bundle, chunk.destination), 0)
        places[bundle, chunk.destination] = place + 1
        step = None if policy == "auto" else chunk.step
        window = ANY_TIME if chunk.window is None and is_beside else chunk.window
        segments.append(Segment(bundle, chunk.destination, place, first + chunk.offset, chunk.bytes, window, step))
    return segments


# ---- with the clock and the others


class WindowPlanner:
    """Profiles the session's steps and says when its snapshots travel.

    Args:
        pacer: follows the group of the training thread.
        courier: sends the snapshots.
        store: holds the bundles.
        membership: the members.
        options: sizes, and when steps are recorded.
        policy: plans chunks for windows; None: snapshots never wait for one.
        fixed_steps: over which a version is sent; None for as few as windows need, and 1 while they are not known.
    """

    def __init__(
        self,
        pacer: Pacer,
        courier: Courier,
        store: SnapshotStore,
        membership: Membership,
        options: WindowOptions,
        policy: ChunkPolicy | None,
        fixed_steps: int | None = 1,
    ) -> None:
        self._fixed_steps = fixed_steps
        self.version_steps = fixed_steps or 1
        """Steps over which the next version is sent; the same on all members."""
        self._pacer, self._courier, self._store, self._membership = pacer, courier, store, membership
        self._options, self._policy, self._until_vote = options, policy, False
        self._default = DEFAULT_LINK
        self._base = 0
        self._reports: list[RankReport] = []
        self._recorded: tuple[list[TimedStep], Windows | None] = [], None
        self.windows: Windows | None = None
        """Windows of this member's network, as copies use them now; None before the first profile."""
        self.step_seconds: float | None = None
        """Seconds of a step, from the latest profile, also one of earlier members."""
        self.network_seconds: float | None = None
        """Idle seconds of this member's network in a step, of the same profile."""
        self.link: tuple[float, float] | None = None
        """Measured latency and bytes per second of this member's link; None before there was enough to measure."""
        self.couriers: Sequence[Courier] = [courier]
        """Those whose messages tell how fast the link is."""
        self.host_speed = 0.0
        """Bytes per second of the latest capture."""
        self.budgets = Budgets()
        """What copies can take in a step, by the latest profile of these members; the same on all."""
        self.summary = ""
        """Summary of the plan of the slowest member."""
        self.plans = 0
        """Number of plans so far."""
        store.chunk_bytes, courier.in_flight = options.copy_buffer_bytes, options.copy_buffers
        courier.link = self._default

    @property
    def _group(self) -> Group:
        """Group of all members, replica nodes included."""
        return self._membership.everyone

    def restart(self, step: int, until_vote: bool) -> None:
        """Discards the plan: other members, or another protection plan, from this step on.

        `until_vote`: each version must be whole before the vote that follows it.
        """
        self._until_vote = until_vote
        self._base, self._reports, self.windows = step, [], None
        self.version_steps, self.budgets = self._fixed_steps or 1, Budgets()
        self._store.segments = None
        self._pacer.record(0)
        self._pacer.expect({})

    def after(self, step: int) -> None:
        """A step is over, the same on all members: begins a profile or plans from it when it is time to. Collective.

        Raises:
            PeerLost: another member is gone.
        """
        steps = self._options.profile_steps
        since = step - self._base - WARM_UP
        if self._policy is None or self._group.size == 1 or not steps or since < 0:
            return
        if since % self._options.profile_every == 0:
            self._pacer.record(steps)
        elif since % self._options.profile_every == steps + 1:
            self._consider(step, self._policy)

    def _consider(self, step: int, policy: ChunkPolicy) -> None:
        reports = self._gather(*self._profile())
        changed = [f"rank {rank}: {report.changed}" for rank, report in enumerate(reports) if report.changed]
        if self._reports and not changed:
            return
        self._reports, self.budgets = reports, self._budgets(reports)
        if reports[self._group.rank].windows:
            mine = self.windows = Windows.from_json(reports[self._group.rank].windows)
            idle = [window.seconds for window in mine.windows if window.resource == "network"]
            self.step_seconds, self.network_seconds = mine.step_seconds, sum(idle)
        self._adopt(policy)
        if self._group.rank == 0 and any(report.outgoing for report in reports):
            why = f"; planned anew, because of {changed[0]}" if self.plans > 1 and changed else ""
            logger.info("copies in windows from step %d on: %s%s", step, self.summary, why)

    def _budgets(self, reports: Sequence[RankReport]) -> Budgets:
        trainers = [report for report in reports if report.windows]
        seconds = max((Windows.from_json(report.windows).step_seconds for report in trainers), default=0.0)
        links = [None if report.link == self._default else report.link[1] for report in trainers]
        return budgets_of(seconds, links, [report.host_speed or None for report in trainers])

    def _profile(self) -> tuple[list[StepProfile], list[float]]:
        """The steps to find windows in, and when they started: seconds of `time.perf_counter`."""
        timed = self._pacer.recorded()
        self._pacer.record(0)
        self._recorded = timed, self.windows
        return as_steps(timed, self._until_vote), [each.start / 1e9 for each in timed]

    def _gather(self, steps: Sequence[StepProfile], starts: Sequence[float]) -> list[RankReport]:
        offset = clock_offset(connect(self._group)).seconds
        change: Change | None = None
        if self.windows is not None:
            change = has_changed(self.windows, steps, tolerance=TOLERANCE)
        sent = sorted((each for courier in self.couriers for each in list(courier.sent)), key=lambda each: each.end)
        link = measure_link(sent, self._default)
        if link != self._default:
            self.link = link.alpha, link.beta
        mine = RankReport(
            find_windows(steps, gamma=self._options.window_share).to_json() if steps else "",
            [start + offset for start in starts],
            "" if change is None else change.summary,
            (link.alpha, link.beta),
            self._outgoing(),
            self.host_speed,
        )
        everyone = gather_json(self._group, asdict(mine))
        return [
            RankReport(**fields | {"outgoing": [Outgoing(*each) for each in fields["outgoing"]]}) for fields in everyone
        ]

    def _outgoing(self) -> list[Outgoing]:
        found = []
        for kept in self._store.own:
            peers = list(kept.bundle.holders[1:])
            if peers:
                starts = [*(offset for _, offset, _ in kept.arena.units()), kept.arena.payload_bytes]
                parts = [(a, b - a) for a, b in zip(starts, starts[1:], strict=False)]
                found.append(Outgoing(kept.number, peers, parts))
        return found

    def _adopt(self, policy: ChunkPolicy) -> None:
        """Plans for this rank and for those that send to it. Collective."""
        rank, reports = self._group.rank, self._reports
        is_sender = [
            report.windows and (s == rank or rank in _peers(report.outgoing)) for s, report in enumerate(reports)
        ]
        senders = [s for s, is_one in enumerate(is_sender) if is_one]
        buffers = self._options.copy_buffers
        memory = Memory(buffers * self._options.copy_buffer_bytes, buffers)
        if self._fixed_steps is None:
            alone = plan_of(rank, reports, policy, memory, None).reason.steps_per_version if rank in senders else 1
            self.version_steps = max(gather_json(self._group, alone))
        plans = {s: plan_of(s, reports, policy, memory, self.version_steps) for s in senders}
        segments = {s: segments_of(plan, reports[s].outgoing, policy) for s, plan in plans.items()}
        receives = [
            segment._replace(peer=s) for s in senders if s != rank for segment in segments[s] if segment.peer == rank
        ]
        self._store.segments = Segments(segments.get(rank, []), receives)
        self._courier.link = Link(*reports[rank].link)
        mine = [0.0, 0, ""]
        if self.windows is not None and rank in plans:
            self._pacer.expect(places_of(self.windows))
            reason = plans[rank].reason
            better = lowered(reason, self.windows.step_seconds, Link(*reports[rank].link))
            mine = [reason.delay_seconds, reason.steps_per_version, f"{reason}{better} (rank {rank})"]
        everyone = gather_json(self._group, mine)
        self.summary = max(everyone)[2]
        self.plans += 1

    # ---- traces

    def trace(self) -> str:
        """The steps of the latest profile, the windows that copies used then, and what was sent; for Perfetto.

        Raises:
            ValueError: no profile is over yet.
        """
        timed, windows = self._recorded
        if not timed:
            raise ValueError("trace: no profile is over yet")
        steps = as_steps(timed, until_vote=False)
        start = timed[0].start / 1e9
        sent = [
            SentChunk(each.start / 1e9, (each.end - each.start) / 1e9, *each[2:]) for each in list(self._courier.sent)
        ]
        return chrome_trace(steps, windows, sent=sent, rank=self._group.rank, start=start)


def _peers(outgoing: Sequence[Outgoing]) -> set[int]:
    return {peer for each in outgoing for peer in each.peers}
