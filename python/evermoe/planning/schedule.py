"""When to copy: steps of spans, as a profile records them, to idle windows, to a plan of chunks, to a trace.

Times are seconds, sizes bytes, rates bytes a second. A profile of about 20 steps makes `find_windows` sure;
`plan_chunks` fills the windows, `has_changed` says when to plan anew, `chrome_trace` shows all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from evermoe import _native
from evermoe.planning._arguments import choice, count, counts, names, number

Kind = Literal["forward", "backward", "optimizer", "collective", "send", "receive", "copy"]
Resource = Literal["compute", "network", "host_link"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)
ChunkPolicy = Literal["gemini", "baft", "moetion", "auto"]
CHUNK_POLICIES: tuple[ChunkPolicy, ...] = get_args(ChunkPolicy)
"""Policies of `plan_chunks`."""
Place = Literal["device", "host"]
Share = Literal["modulo", "bytes"]


class Span(NamedTuple):
    """A time in which a resource was busy."""

    name: str
    """The same in every step; it may occur several times in one."""
    kind: Kind
    """What it did."""
    resource: Resource
    """What it kept busy."""
    start: float
    """Seconds from the step's start."""
    seconds: float
    """How long it took."""
    bytes: int = 0
    """Bytes moved; 0 for compute."""
    peers: Sequence[int] = ()
    """Ranks at the other end."""


class Step(NamedTuple):
    """One step of one rank."""

    seconds: float
    """From its start to the start of the next step."""
    spans: Sequence[Span]
    """In any order; one that ends after the step goes on in the next one."""


class Window(NamedTuple):
    """An idle span of a resource in every step."""

    resource: Resource
    """What is idle."""
    after: str | None
    """The span whose end opens it; None for the step's start."""
    occurrence: int
    """Which span of that name on the resource, from 0 on."""
    offset: float
    """Seconds from there to the opening: 0 unless another span sometimes lasts longer than the one it follows."""
    start: float
    """When it opens, from the step's start: the median."""
    seconds: float
    """Seconds that may be used: gamma * expected."""
    expected: float
    """Seconds that it lasts in all but the lowest `quantile` of the steps."""
    jitter: float
    """Seconds between the lowest and the highest `quantile`."""


class Windows:
    """The idle windows of a rank, from `find_windows`; the JSON is for other ranks and for files."""

    def __init__(self, native: _native.Windows) -> None:
        self._native = native

    @classmethod
    def from_json(cls, text: str) -> Windows:
        """What `to_json` wrote; a ValueError if it is not that."""
        return cls(_native.Windows.from_json(text))

    def to_json(self) -> str:
        """All of it as text."""
        return self._native.to_json()

    @property
    def step_seconds(self) -> float:
        """The median of the steps' seconds."""
        return self._native.step_seconds

    @property
    def windows(self) -> list[Window]:
        """By resource (compute, network, host_link), then by start; those of a resource do not overlap."""
        return [Window(*row) for row in self._native.rows]  # type: ignore[arg-type]

    @property
    def steps_used(self) -> int:
        """Steps that have the same spans in the same order; 0 if no majority has, and then there are no windows."""
        return self._native.evidence[0]

    @property
    def steps_left_out(self) -> int:
        """The other steps."""
        return self._native.evidence[1]

    @property
    def evidence(self) -> str:
        """What the windows rest on, in words."""
        return self._native.evidence[2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Windows) and self._native == other._native

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Windows({len(self.windows)} in a step of {self.step_seconds:.6f} s: {self.evidence})"


class Change(NamedTuple):
    """Why to plan anew."""

    what: Literal["sequence", "window", "total"]
    """Other spans, another window, or another sum of all windows of the resource."""
    resource: Resource
    """Where."""
    after: str | None
    """The span that came, None at the end of a step; for a window the span whose end opens it."""
    before: float | None
    """Seconds that were expected; None for "sequence"."""
    now: float | None
    """Seconds that are now; None for "sequence"."""
    words: str
    """All of it in words."""


class Link(NamedTuple):
    """A transfer of s bytes takes alpha + s / beta seconds."""

    alpha: float
    """Seconds that any transfer takes."""
    beta: float
    """Bytes a second."""


class Memory(NamedTuple):
    """Memory that chunks pass through."""

    bytes: int
    """All of it."""
    buffers: int
    """Into how many sub-buffers of equal size it is cut; a chunk fills one at most."""
    drain: Link | None = None
    """How long the consumer takes to empty a sub-buffer after the transfer; None if at once."""


class Piece(NamedTuple):
    """A unit that is to be copied."""

    unit: str
    """Its name."""
    bytes: int
    """Its size."""
    destinations: Sequence[int]
    """Ranks that each get all of it."""


class Receiver(NamedTuple):
    """A destination whose windows count too."""

    rank: int
    """Which."""
    windows: Windows
    """Its windows."""
    clock_offset: float = 0.0
    """When its step starts, in seconds after the sender's; below 0 if before."""


class Chunk(NamedTuple):
    """One transfer."""

    step: int
    """Step of the version, from 0 on."""
    window: int | None
    """Position in `Windows.windows`; None if no window has room for it."""
    unit: str
    """Of which unit."""
    offset: int
    """First byte."""
    bytes: int
    """How many."""
    destination: int
    """The rank that gets them."""
    start: float
    """Seconds from the window's opening; without a window, from when the step's last window is over, or for
    "moetion", which lets them run beside compute, from the step's start."""
    seconds: float
    """Seconds of the transfer."""


class SentChunk(NamedTuple):
    """A chunk that was really sent."""

    start: float
    """When it began, in seconds on the clock of the trace's `start`."""
    seconds: float
    """Until it was sent."""
    bytes: int
    """How many."""
    peer: int
    """The rank that got them."""
    window: int | None = None
    """Position of the window in which it began; None outside of all."""


class ChunkReason(NamedTuple):
    """What a plan achieves; `str(reason)` says it in words."""

    fits: bool
    """All bytes are in windows."""
    steps_per_version: int
    """Steps after which a version is whole."""
    steps_in_windows: int | None
    """Steps that it would take in windows alone: the checkpoint interval without delay; None if more than 4096."""
    delay_seconds: float
    """Seconds by which copying delays a step, on average over the version's."""
    used_seconds: float
    """Seconds of the windows that transfers use, in all steps of the version."""
    available_seconds: float
    """Seconds of the windows, in all steps of the version."""
    bytes: int
    """Bytes of the version, counted for each destination."""
    outside_bytes: int
    """Those outside of windows."""
    words: str
    """All of it in words."""

    def __str__(self) -> str:
        return self.words


class ChunkPlan:
    """What to send when, from `plan_chunks`; the JSON is for the executor and for files."""

    def __init__(self, native: _native.ChunkPlan) -> None:
        self._native = native

    @classmethod
    def from_json(cls, text: str) -> ChunkPlan:
        """What `to_json` wrote; a ValueError if it is not that."""
        return cls(_native.ChunkPlan.from_json(text))

    def to_json(self) -> str:
        """All of it as text."""
        return self._native.to_json()

    @property
    def chunks(self) -> list[Chunk]:
        """In the order in which they are sent: by step, window and start; those without a window end each step."""
        return [Chunk(*row) for row in self._native.rows]

    @property
    def reason(self) -> ChunkReason:
        """What it achieves."""
        return ChunkReason(*self._native.reason)

    def by_window(self) -> list[dict[int | None, list[Chunk]]]:
        """For each step of a version, the chunks of each window that has some."""
        steps: list[dict[int | None, list[Chunk]]] = [{} for _ in range(self.reason.steps_per_version)]
        for chunk in self.chunks:
            steps[chunk.step].setdefault(chunk.window, []).append(chunk)
        return steps

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkPlan) and self._native == other._native

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ChunkPlan({len(self.chunks)} chunks: {self.reason})"


def find_windows(
    steps: Sequence[Step], *, quantile: float = 0.1, gamma: float = 0.9, ignore: Iterable[str] = ()
) -> Windows:
    """The idle windows of each resource.

    Between the end of the busy spans so far, which may overlap and nest, and the start of the next on the same
    resource there is a window. Steps are aligned by the order of their spans; those whose order is not that of the
    largest group are left out, and without a majority there are no windows.

        >>> def step(idle):  # network idle for `idle` seconds after the first send, for 2 after the second
        ...     sends = [Span("send", "send", "network", start, 1.0, 64, [1]) for start in (0.0, 1.0 + idle)]
        ...     return Step(4.0 + idle, sends)
        >>> found = find_windows([step(3.0), step(4.0)], gamma=0.5)
        >>> [window[1:] for window in found.windows if window.resource == "network"]
        [('send', 0, 0.0, 1.0, 1.5, 3.0, 1.0), ('send', 1, 0.0, 5.0, 1.0, 2.0, 0.0)]
        >>> found
        Windows(4 in a step of 7.000000 s: all 2 steps have the same spans)

    Args:
        steps: about 20 steps of one rank.
        quantile: a window is as long as it was in all but this part of the steps; 0 is the shortest, 0.5 the median.
        gamma: the part of that which may be used, above 0, up to 1.
        ignore: names of spans that are not there: those of the copies that are being planned.

    Raises:
        ValueError: no steps, times that are none, or options out of range.
    """
    ignored = names("ignore", ignore if isinstance(ignore, str) else list(ignore))
    return Windows(_native.find_windows(steps, number("quantile", quantile), number("gamma", gamma), ignored))


def has_changed(windows: Windows, steps: Sequence[Step], *, tolerance: float = 0.01) -> Change | None:
    """What changed since the windows were found; None if nothing that matters did.

    Half of the steps or more have another order of spans; or else a window, or all windows of a resource together,
    became shorter or longer by more than the jitter plus `tolerance` of a step. The largest such change is returned.

        >>> def step(busy):
        ...     return Step(10.0, [Span("reduce", "collective", "network", 0.0, busy)])
        >>> found = find_windows([step(4.0), step(4.5)])
        >>> has_changed(found, [step(5.0)])
        >>> has_changed(found, [step(7.0)]).words
        'the network window after "reduce" is 3.000000 s, not 5.500000 s'

    Args:
        windows: from `find_windows`.
        steps: the latest steps, at least 1.
        tolerance: part of a step that does not matter, 0 or more.

    Raises:
        ValueError: no steps, or times that are none.
    """
    found = _native.has_changed(_windows("windows", windows), steps, number("tolerance", tolerance))
    return None if found is None else Change(*found)  # type: ignore[arg-type]


def plan_chunks(
    pieces: Sequence[Piece],
    windows: Windows,
    link: Link,
    memory: Memory,
    *,
    policy: ChunkPolicy = "auto",
    resource: Resource = "network",
    receivers: Sequence[Receiver] = (),
    max_steps: int = 64,
) -> ChunkPlan:
    """Which part of which unit goes where in which window.

    A chunk lies within the usable seconds of a window of the sender and, for a destination in `receivers`, of the
    destination; chunks do not overlap, and no more sub-buffers are in use than there are, drains included.
    Destinations are served one after the other, so that the first whole copy is there early.

    - "gemini" (SOSP'23): in order, as much as fits; the rest runs after the last window and delays the step.
    - "baft": for each window the whole units that together have the most bytes, exact for up to dozens of sizes; a
      unit that no window can take is cut. The rest runs after the last window.
    - "moetion": floor(n * t_windows / t_copy) of the n chunks may use the windows; the rest runs beside compute and
      delays by what compute is too short for.
    - "auto": as many steps as it takes, up to `max_steps`, to delay none; what does not fit even then is spread over
      all of them. It never delays more than "gemini" or "baft". More window never means more delay, except where
      `max_steps` is too few and whole units happen to fit a smaller window better.

        >>> sends = [Span("send", "send", "network", start, 1.0, 64, [1]) for start in (0.0, 4.0)]
        >>> windows = find_windows([Step(8.0, sends)], gamma=1.0)  # two of 3 seconds: each has room for 20 bytes
        >>> expert, link, memory = Piece("expert", 50, [1]), Link(1.0, 10.0), Memory(40, 2)
        >>> plan = plan_chunks([expert], windows, link, memory, policy="gemini")
        >>> [(chunk.window, chunk.offset, chunk.bytes) for chunk in plan.chunks]
        [(1, 0, 20), (2, 20, 20), (None, 40, 10)]
        >>> plan.reason.delay_seconds, plan.reason.steps_in_windows
        (2.0, 2)
        >>> print(plan_chunks([expert], windows, link, memory).reason)
        a version takes 2 steps and 8.000000 of 12.000000 s of windows; nothing is delayed

    Args:
        pieces: what to copy; sent in this order.
        windows: the sender's.
        link: the way to the destinations.
        memory: what chunks pass through.
        policy: how windows are filled.
        resource: whose windows, at both ends.
        receivers: destinations whose windows count too; "baft" needs all of them.
        max_steps: steps that a version of "auto" may take, 1 to 4096.

    Raises:
        ValueError: a field that is out of range, a unit twice or without destination, or more than 2^22 chunks.
    """
    rows = [
        (unit, count("pieces: bytes", nbytes), counts("pieces: destinations", destinations))
        for (unit, nbytes, destinations) in pieces
    ]
    names("pieces: unit", [unit for unit, _, _ in rows])
    drain = None if memory.drain is None else _link("memory.drain", memory.drain)
    ends = [
        (
            count("receivers: rank", end.rank),
            _windows("receivers: windows", end.windows),
            number("receivers: clock_offset", end.clock_offset),
        )
        for end in receivers
    ]
    return ChunkPlan(
        _native.plan_chunks(
            rows,
            _windows("windows", windows),
            choice("resource", resource, RESOURCES),
            ends,
            _link("link", link),
            (count("memory.bytes", memory.bytes), count("memory.buffers", memory.buffers), drain),
            choice("policy", policy, CHUNK_POLICIES),
            count("max_steps", max_steps),
        )
    )


def snapshot_places(free_bytes: int, nbytes: Sequence[int], *, reserve: int = 0) -> list[Place]:
    """For each unit, where its snapshot goes: on the GPU while it fits there, else in host memory (BAFT).

    Largest units first, so that few of them go to the host.

        >>> snapshot_places(100, [10, 40, 60], reserve=30)  # 70 bytes to use
        ['device', 'host', 'device']

    Args:
        free_bytes: free device memory.
        nbytes: size of each unit.
        reserve: device memory to leave free.
    """
    found = _native.snapshot_places(
        count("free_bytes", free_bytes), counts("nbytes", nbytes), count("reserve", reserve)
    )
    return found  # type: ignore[return-value]


def unit_shares(nbytes: Sequence[int], ranks: int, share: Share = "modulo") -> list[int]:
    """For each unit that all ranks of a data-parallel group hold, the one that copies it.

        >>> unit_shares([9, 1, 1, 1], ranks=2)  # 10 and 2 bytes
        [0, 1, 0, 1]
        >>> unit_shares([9, 1, 1, 1], ranks=2, share="bytes")  # 9 and 3
        [0, 1, 1, 1]

    Args:
        nbytes: size of each unit.
        ranks: size of the group, D.
        share: "modulo", unit i is rank i mod D's (BAFT); "bytes", largest first to the rank with the fewest bytes.
    """
    return _native.unit_shares(counts("nbytes", nbytes), count("ranks", ranks), choice("share", share, get_args(Share)))


def chrome_trace(
    steps: Sequence[Step],
    windows: Windows | None = None,
    plan: ChunkPlan | None = None,
    *,
    sent: Sequence[SentChunk] = (),
    rank: int = 0,
    start: float = 0.0,
) -> str:
    """The steps of one rank as JSON in Chrome's trace event format, which Perfetto reads.

    One process a rank; a track each for compute, network, host link, the windows of each, planned chunks, and copies,
    which are chunks that were sent. Each step has the windows where its own spans open them, and the chunks of the
    plan's steps in turn. Spans that overlap without nesting go to a second track.

        >>> import json
        >>> step = Step(0.003, [Span("reduce", "collective", "network", 0.001, 0.002, 64, [1])])
        >>> [event for event in json.loads(chrome_trace([step], rank=3))["traceEvents"] if event["ph"] == "X"][0]["ts"]
        1000.0

    Args:
        steps: one after the other.
        windows: of `find_windows`.
        plan: of `plan_chunks` with these windows.
        sent: what was sent; only what was while these steps ran is shown.
        rank: whose; `pid` of its events.
        start: when the first step starts, on a clock that all ranks have; seconds.

    Raises:
        ValueError: times that are none, or a plan whose windows are not in `windows`.
    """
    return _native.chrome_trace(
        steps,
        None if windows is None else _windows("windows", windows),
        None if plan is None else plan._native,
        [_sent(each) for each in sent],
        count("rank", rank),
        number("start", start),
    )


def merge_traces(traces: Sequence[str]) -> str:
    """One trace of several ranks.

    Args:
        traces: from `chrome_trace`, each of another rank.

    Raises:
        ValueError: a text that is no trace, or two of one rank.
    """
    return _native.merge_traces(names("traces", traces))


def _windows(name: str, value: Windows) -> _native.Windows:
    if not isinstance(value, Windows):
        raise ValueError(f"{name}: expected Windows of find_windows, got {value!r}")
    return value._native


def _sent(value: SentChunk) -> tuple[float, float, int, int, int | None]:
    start, seconds, nbytes, peer, window = value
    size, to = count("sent: bytes", nbytes), count("sent: peer", peer)
    return number("sent: start", start), number("sent: seconds", seconds), size, to, window


def _link(name: str, value: Link) -> tuple[float, float]:
    return number(f"{name}.alpha", value.alpha), number(f"{name}.beta", value.beta)
