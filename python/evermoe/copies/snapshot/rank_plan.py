"""A rank's report on its steps and snapshots, and the schedule of its messages: the same at both ends. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from evermoe import _native
from evermoe.comm.pacer import ANY_TIME
from evermoe.comm.timed_steps import TimedStep
from evermoe.copies.snapshot.segments import Segment, joined
from evermoe.planning.schedule import ChunkPlan, ChunkPolicy, CopyItem, Link, Memory, Receiver, plan_chunks
from evermoe.planning.windows import Span, StepProfile, Windows

COPIES = "copies"
"""Name of the span in which the training thread waits for copies before a vote."""
PACE_FACTOR = 2.0
"""Factor by which a message may take less time before a new plan is made."""
MAX_VERSION_STEPS = _native.MAX_VERSION_STEPS
"""Maximum number of steps over which a version is sent, unless more are requested."""


class Outgoing(NamedTuple):
    """A bundle that a rank sends."""

    bundle: int
    peers: list[int]
    parts: list[tuple[int, int]]
    """Offset and bytes of each unit, or of the parts of it that are sent, in order."""
    table: int
    """Bytes of the table of the units' digests, which precedes them."""


@dataclass(frozen=True)
class RankReport:
    """Report of a rank on its steps, and on what it sends."""

    windows: str
    """`Windows.to_json`; empty from a replica node, whose network is always idle."""
    starts: list[float]
    """Start times of its recorded steps, in seconds on rank 0's clock."""
    changed: str
    """Difference between this rank's profile and its last report; empty if not significant."""
    link: tuple[float, float]
    """Alpha and beta of its link."""
    outgoing: list[Outgoing]
    host_speed: float = 0.0
    """Bytes per second at which its state is copied into its own memory; 0 before that was measured."""
    is_on_gpu: bool = False
    """Whether that is a copy from a GPU to its host."""

    @property
    def pace(self) -> Link:
        """The link by which its messages are planned: the slower of its network and its copy from GPU to host.

        Both run concurrently, in the same windows, so a message can begin once the copy has passed its first byte.
        """
        alpha, beta = self.link
        return Link(alpha, min(beta, self.host_speed) if self.is_on_gpu and self.host_speed else beta)

    @property
    def waits_for_host(self) -> bool:
        """Whether its messages are planned by the copy from GPU to host."""
        return self.pace.beta < self.link[1]

    def new_pace(self, before: RankReport, nbytes: int) -> str:
        """Return the change of `pace` since an earlier report; empty unless a message takes half as long.

        A slower message, perhaps during a busy moment, is sent in a later window than planned.

        Args:
            before: the earlier report.
            nbytes: size of a message.
        """
        was, now = (each.pace.alpha + nbytes / each.pace.beta for each in (before, self))
        if PACE_FACTOR * now >= was:
            return ""
        return f"a message of {nbytes} bytes takes {now:.6f} s, not {was:.6f} s"

    @staticmethod
    def from_json(fields: dict[str, Any]) -> RankReport:
        """Return the report of fields from JSON, which has only lists."""
        alpha, beta = fields["link"]
        outgoing = [Outgoing(*each) for each in fields["outgoing"]]
        return RankReport(**fields | {"link": (alpha, beta), "outgoing": outgoing})


def as_steps(timed: Sequence[TimedStep], until_vote: bool) -> list[StepProfile]:
    """Return what a pacer has recorded, in the form that `find_windows` takes.

    Args:
        timed: steps.
        until_vote: whether a version must be complete before the next vote. If so, the network counts as busy from the
            start of that wait to the end of the step.
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
    """Return the network's windows in the form that `Pacer.expect_windows` takes."""
    found = [(number, window) for number, window in enumerate(windows.windows) if window.resource == "network"]
    return {
        (window.after, window.occurrence): (number, window.seconds) for number, window in found if window.offset == 0.0
    }


def items_of(outgoing: Sequence[Outgoing], policy: ChunkPolicy) -> tuple[list[CopyItem], list[tuple[int, int]]]:
    """Return what a rank sends, for `plan_chunks`, and each piece's bundle and first byte. BAFT packs complete units.

    Digests come last: they are known once all units are captured.
    """
    items, origins = [], []
    for bundle, peers, parts, table in outgoing:
        for offset, nbytes in [*(parts if policy == "baft" else joined(parts)), (0, table)]:
            items.append(CopyItem(f"{bundle}:{offset}", nbytes, peers))
            origins.append((bundle, offset))
    return items, origins


def plan_of(
    rank: int, reports: Sequence[RankReport], policy: ChunkPolicy, memory: Memory, version_steps: int | None = 1
) -> ChunkPlan:
    """Return when a rank sends what, the same wherever it is computed. Chunks are in windows that both ends have.

    `memory` and `version_steps`: as `plan_chunks` takes them.
    """
    items, _ = items_of(reports[rank].outgoing, policy)
    windows = Windows.from_json(reports[rank].windows)
    ends = []
    for peer in sorted(peers_of(reports[rank].outgoing)):
        if reports[peer].windows:
            ends.append(Receiver(peer, Windows.from_json(reports[peer].windows), lead(reports[rank], reports[peer])))
        else:
            ends.append(Receiver(peer, windows))
    link, most = reports[rank].pace, MAX_VERSION_STEPS
    return plan_chunks(
        items, windows, link, memory, policy=policy, receivers=ends, max_steps=most, version_steps=version_steps
    )


def lead(sender: RankReport, receiver: RankReport) -> float:
    """Return the seconds by which the receiver's steps begin later than the sender's."""
    return statistics.median(b - a for a, b in zip(sender.starts, receiver.starts, strict=True))


def segments_of(plan: ChunkPlan, outgoing: Sequence[Outgoing], policy: ChunkPolicy) -> list[Segment]:
    """Return the chunks of a sender as segments of its bundles; `peer` is the destination.

    Pieces without a window come last. MoEtion sends them while compute runs (W* of its Algorithm 4), so with it they
    are first in their step. Nothing waits for a version of `auto`: its chunks may be sent before their planned step.
    """
    items, origins = items_of(outgoing, policy)
    origin = {item.unit: found for item, found in zip(items, origins, strict=True)}
    segments: list[Segment] = []
    places: dict[tuple[int, int], int] = {}
    during_compute = policy == "moetion"
    for chunk in sorted(
        plan.chunks, key=lambda c: (c.step, c.window is not None) if during_compute else c.window is None
    ):
        bundle, first = origin[chunk.unit]
        place = places.get((bundle, chunk.destination), 0)
        places[bundle, chunk.destination] = place + 1
        step = None if policy == "auto" else chunk.step
        window = ANY_TIME if chunk.window is None and during_compute else chunk.window
        segments.append(Segment(bundle, chunk.destination, place, first + chunk.offset, chunk.bytes, window, step))
    return segments


def sent_reports(
    reports: Sequence[RankReport], left_out: Collection[int], other_bytes: Mapping[int, int]
) -> list[RankReport]:
    """Return the ranks' reports, with what they send of a version.

    Args:
        reports: by rank.
        left_out: bundles that the version omits.
        other_bytes: bytes of the bundles that it sends in another form than their state.
    """

    def as_sent(bundle: Outgoing) -> Outgoing:
        nbytes = other_bytes.get(bundle.bundle)
        return bundle if nbytes is None else bundle._replace(parts=[(bundle.table, nbytes)])

    return [
        replace(report, outgoing=[as_sent(each) for each in report.outgoing if each.bundle not in left_out])
        for report in reports
    ]


def peers_of(outgoing: Sequence[Outgoing]) -> set[int]:
    """Return the ranks that bundles are sent to."""
    return {peer for each in outgoing for peer in each.peers}
