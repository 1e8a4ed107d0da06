"""When snapshots travel: profile → windows → chunk plan → cuts and places, again whenever the steps have changed.

    rank 0   pacer records some steps ─ find_windows ─┐             ┌─ plans of rank 0 and of its senders ─ cuts, places
    rank 1   pacer records some steps ─ find_windows ─┴─ all gather ┴─ plans of rank 1 and of its senders ─ cuts, places

Both ends of a message must cut a bundle alike, so they plan from the same gathered data, at a step that all know from
its number. The training thread does it, between two steps; there is no thread of its own, and between profiles no cost.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from evermoe.arrangement import ALPHA_SECONDS, BYTES_PER_SECOND
from evermoe.config import SessionConfig
from evermoe.copies import CopyStore, Cut, Cuts
from evermoe.courier import IN_FLIGHT, Courier, Pacer, Sent, TimedStep
from evermoe.elastic import Membership
from evermoe.group import Group
from evermoe.planning.presets import PRESETS
from evermoe.planning.schedule import (
    Change,
    ChunkPlan,
    ChunkPolicy,
    Link,
    Memory,
    Piece,
    Receiver,
    SentChunk,
    Span,
    Step,
    Windows,
    chrome_trace,
    find_windows,
    has_changed,
    plan_chunks,
)
from evermoe.profile.peers import clock_offset, connect

logger = logging.getLogger(__name__)

COPIES = "copies"
"""Name of the span in which the training thread waits for copies before a vote."""
WARM_UP = 3
"""Steps after a change of membership that are no measure."""
TOLERANCE = 0.05
"""Part of a step by which windows may change before it is planned anew."""
LEAST_SAMPLES = 8
"""Messages from which the network's speed is measured."""


class Load(NamedTuple):
    """A bundle that a rank sends."""

    bundle: int
    peers: list[int]
    parts: list[tuple[int, int]]
    """Offset and bytes of each unit, one behind the other. Before the first one is the table of their digests."""


@dataclass(frozen=True)
class Offer:
    """What a rank tells the others about its steps."""

    windows: str
    """`Windows.to_json`; empty from a replica node, whose network is always idle."""
    starts: list[float]
    """When its recorded steps began: seconds on rank 0's clock."""
    changed: str
    """What is otherwise than in its last offer, in words; empty if nothing that matters."""
    link: tuple[float, float]
    """Of what it sends."""
    loads: list[Load]


# ---- pure


def as_steps(timed: Sequence[TimedStep], until_vote: bool) -> list[Step]:
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
        steps.append(Step((end - start) / 1e9, spans))
    return steps


def places_of(windows: Windows) -> dict[tuple[str | None, int], tuple[int, float]]:
    """The network's windows as `Pacer.expect` takes them."""
    found = [(number, window) for number, window in enumerate(windows.windows) if window.resource == "network"]
    return {
        (window.after, window.occurrence): (number, window.seconds) for number, window in found if window.offset == 0.0
    }


def measure_link(sent: Sequence[Sent], default: Link) -> Link:
    """What transfers took: alpha and beta of a line through the medians of the smaller and of the larger half.

    A message that was begun while another one was under way has had the link for itself only since that one's end.

        >>> def message(start, milliseconds, nbytes):
        ...     return Sent(start, start + milliseconds * 10**6, nbytes, 1, None)
        >>> sent = [message(number * 10**9, 2 if number % 2 else 3, 10**6 if number % 2 else 2 * 10**6)
        ...         for number in range(8)]
        >>> measure_link(sent, Link(1e-4, 1e9))  # 1 MB in 2 ms, 2 MB in 3 ms
        Link(alpha=0.001, beta=1000000000.0)
        >>> measure_link(sent[:7], Link(1e-4, 1e9))  # too few
        Link(alpha=0.0001, beta=1000000000.0)

    Args:
        sent: in the order in which they ended.
        default: the answer where there are fewer than `LEAST_SAMPLES`; its alpha also where all sizes are alike.
    """
    samples = []
    before = 0
    for each in sent:
        samples.append((each.nbytes, max(1e-7, (each.end - max(each.start, before)) / 1e9)))
        before = max(before, each.end)
    if len(samples) < LEAST_SAMPLES:
        return default
    samples.sort()
    half = len(samples) // 2
    (small, quick), (large, slow) = (
        [statistics.median(values) for values in zip(*part, strict=True)] for part in (samples[:half], samples[half:])
    )
    if large > 1.5 * small and slow > quick:
        alpha = max(0.0, quick - small * (slow - quick) / (large - small))
    else:
        alpha = min(default.alpha, slow / 2)
    return Link(alpha, max(1.0, large) / (slow - min(alpha, slow / 2)))


def pieces_of(loads: Sequence[Load], policy: ChunkPolicy) -> tuple[list[Piece], list[tuple[int, int]]]:
    """What a rank sends, for `plan_chunks`; and of each piece, bundle and first byte. BAFT packs whole units.

    Digests come last: they are known when all units are captured.
    """
    pieces, origins = [], []
    for bundle, peers, parts in loads:
        first = parts[0][0]
        units = parts if policy == "baft" else [(first, sum(nbytes for _, nbytes in parts))]
        for offset, nbytes in [*units, (0, first)]:
            pieces.append(Piece(f"{bundle}:{offset}", nbytes, peers))
            origins.append((bundle, offset))
    return pieces, origins


def plan_of(rank: int, offers: Sequence[Offer], policy: ChunkPolicy, chunk_bytes: int) -> ChunkPlan:
    """When a rank sends what: the same wherever it is computed. Chunks are in windows that both ends have."""
    pieces, _ = pieces_of(offers[rank].loads, policy)
    windows = Windows.from_json(offers[rank].windows)
    ends = []
    for peer in sorted(_peers(offers[rank].loads)):
        if offers[peer].windows:
            ends.append(Receiver(peer, Windows.from_json(offers[peer].windows), _lead(offers[rank], offers[peer])))
        else:
            ends.append(Receiver(peer, windows))
    memory = Memory(IN_FLIGHT * chunk_bytes, IN_FLIGHT)
    return plan_chunks(pieces, windows, Link(*offers[rank].link), memory, policy=policy, receivers=ends)


def _lead(sender: Offer, receiver: Offer) -> float:
    return statistics.median(b - a for a, b in zip(sender.starts, receiver.starts, strict=True))


def cuts_of(plan: ChunkPlan, loads: Sequence[Load], policy: ChunkPolicy) -> list[Cut]:
    """The chunks of a sender as cuts of its bundles; `peer` is the destination."""
    pieces, origins = pieces_of(loads, policy)
    origin = {piece.unit: found for piece, found in zip(pieces, origins, strict=True)}
    cuts: list[Cut] = []
    places: dict[tuple[int, int], int] = {}
    for chunk in plan.chunks:
        bundle, first = origin[chunk.unit]
        place = places.get((bundle, chunk.destination), 0)
        places[bundle, chunk.destination] = place + 1
        cuts.append(Cut(bundle, chunk.destination, place, first + chunk.offset, chunk.bytes, chunk.window))
    return cuts


# ---- with the clock and the others


class Pacing:
    """Profiles the session's steps and says when its snapshots travel.

    Args:
        pacer: follows the group of the training thread.
        courier: sends the snapshots.
        store: whose bundles are cut.
        membership: the members.
        config: of the session.
    """

    def __init__(
        self, pacer: Pacer, courier: Courier, store: CopyStore, membership: Membership, config: SessionConfig
    ) -> None:
        self._pacer, self._courier, self._store, self._membership = pacer, courier, store, membership
        self._config, self._until_vote = config, False
        self._policy = PRESETS[config.preset].schedule if config.copies else None
        self._default = Link(ALPHA_SECONDS, BYTES_PER_SECOND)
        self._base = 0
        self._offers: list[Offer] = []
        self._recorded: tuple[list[TimedStep], Windows | None] = [], None
        self.windows: Windows | None = None
        """Of this member's network, as copies use them now; None before the first profile."""
        self.step_seconds: float | None = None
        """Of the latest profile, also one of earlier members."""
        self.network_seconds: float | None = None
        """Idle seconds of this member's network in a step, of the same profile."""
        self.words = ""
        """What the plan of the slowest member achieves."""
        self.plans = 0
        """How often it was planned."""
        store.chunk_bytes = config.copy_buffer_bytes
        courier.link = self._default

    @property
    def _group(self) -> Group:
        """All members, replica nodes included."""
        return self._membership.everyone

    def restart(self, step: int, until_vote: bool) -> None:
        """Other members or another arrangement from this step on: what was planned is void.

        `until_vote`: each version must be whole before the vote that follows it.
        """
        self._until_vote = until_vote
        self._base, self._offers, self.windows = step, [], None
        self._store.cuts = None
        self._pacer.record(0)
        self._pacer.expect({})

    def after(self, step: int) -> None:
        """A step is over, the same on all members: begins a profile or plans from it when it is time to. Collective.

        Raises:
            PeerLost: another member is gone.
        """
        steps = self._config.profile_steps
        since = step - self._base - WARM_UP
        if self._policy is None or self._group.size == 1 or not steps or since < 0:
            return
        if since % self._config.profile_every == 0:
            self._pacer.record(steps)
        elif since % self._config.profile_every == steps + 1:
            self._consider(step, self._policy)

    def _consider(self, step: int, policy: ChunkPolicy) -> None:
        offers = self._gather(*self._profile())
        changed = [f"rank {rank}: {offer.changed}" for rank, offer in enumerate(offers) if offer.changed]
        if self._offers and not changed:
            return
        self._offers = offers
        if offers[self._group.rank].windows:
            mine = self.windows = Windows.from_json(offers[self._group.rank].windows)
            idle = [window.seconds for window in mine.windows if window.resource == "network"]
            self.step_seconds, self.network_seconds = mine.step_seconds, sum(idle)
        self._adopt(policy)
        if self._group.rank == 0 and any(offer.loads for offer in offers):
            why = f"; planned anew, because of {changed[0]}" if self.plans > 1 and changed else ""
            logger.info("copies in windows from step %d on: %s%s", step, self.words, why)

    def _profile(self) -> tuple[list[Step], list[float]]:
        """The steps to find windows in, and when they started: seconds of `time.perf_counter`."""
        timed = self._pacer.recorded()
        self._pacer.record(0)
        self._recorded = timed, self.windows
        return as_steps(timed, self._until_vote), [each.start / 1e9 for each in timed]

    def _gather(self, steps: Sequence[Step], starts: Sequence[float]) -> list[Offer]:
        offset = clock_offset(connect(self._group)).seconds
        change: Change | None = None
        if self.windows is not None:
            change = has_changed(self.windows, steps, tolerance=TOLERANCE)
        link = measure_link(list(self._courier.sent), self._default)
        mine = Offer(
            find_windows(steps).to_json() if steps else "",
            [start + offset for start in starts],
            "" if change is None else change.words,
            (link.alpha, link.beta),
            self._loads(),
        )
        everyone = [json.loads(text) for text in self._group.all_gather_bytes(json.dumps(asdict(mine)).encode())]
        return [Offer(**fields | {"loads": [Load(*load) for load in fields["loads"]]}) for fields in everyone]

    def _loads(self) -> list[Load]:
        found = []
        for kept in self._store.own:
            peers = list(kept.bundle.holders[1:])
            if peers:
                starts = [*(offset for _, offset, _ in kept.arena.units()), kept.arena.payload_bytes]
                parts = [(a, b - a) for a, b in zip(starts, starts[1:], strict=False)]
                found.append(Load(kept.number, peers, parts))
        return found

    def _adopt(self, policy: ChunkPolicy) -> None:
        """Plans for this rank and for those that send to it. Collective."""
        rank, offers = self._group.rank, self._offers
        is_sender = [offer.windows and (s == rank or rank in _peers(offer.loads)) for s, offer in enumerate(offers)]
        senders = [s for s, is_one in enumerate(is_sender) if is_one]
        plans = {s: plan_of(s, offers, policy, self._config.copy_buffer_bytes) for s in senders}
        cuts = {s: cuts_of(plan, offers[s].loads, policy) for s, plan in plans.items()}
        receives = [cut._replace(peer=s) for s in senders if s != rank for cut in cuts[s] if cut.peer == rank]
        self._store.cuts = Cuts(cuts.get(rank, []), receives)
        self._courier.link = Link(*offers[rank].link)
        mine = [0.0, 0, ""]
        if self.windows is not None and rank in plans:
            self._pacer.expect(places_of(self.windows))
            reason = plans[rank].reason
            mine = [reason.delay_seconds, reason.steps_per_version, f"{reason} (rank {rank})"]
        everyone = [json.loads(text) for text in self._group.all_gather_bytes(json.dumps(mine).encode())]
        self.words = max(everyone)[2]
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


def _peers(loads: Sequence[Load]) -> set[int]:
    return {peer for load in loads for peer in load.peers}
