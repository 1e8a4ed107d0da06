"""Schedule of copies: idle windows, filled with chunks of what is to be copied.

Times are seconds, sizes bytes, rates bytes per second. `evermoe.planning.windows` finds the windows and detects when
they have changed, `plan_chunks` fills them, `evermoe.planning.trace` shows all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from evermoe import _native
from evermoe.planning._arguments import choice, count, counts, names, number
from evermoe.planning.windows import Windows, native_windows

ChunkPolicy = Literal["gemini", "baft", "moetion", "auto"]
CHUNK_POLICIES: tuple[ChunkPolicy, ...] = get_args(ChunkPolicy)
"""Policies of `plan_chunks`."""
Place = Literal["device", "host"]


class Link(NamedTuple):
    """A transfer of s bytes takes alpha + s / beta seconds."""

    alpha: float
    """Seconds that any transfer takes."""
    beta: float
    """Bytes a second."""


ALPHA_SECONDS = 50e-6
"""Seconds of any message, until a profile says better."""
BYTES_PER_SECOND = 1e9
"""Speed of the network, until a profile says better."""
DEFAULT_LINK = Link(ALPHA_SECONDS, BYTES_PER_SECOND)
"""A network that nothing is known of."""


class Memory(NamedTuple):
    """Memory that chunks pass through."""

    bytes: int
    """Size of all sub-buffers together."""
    buffers: int
    """Into how many sub-buffers of equal size it is cut; a chunk fills one at most."""
    drain: Link | None = None
    """Time in which the consumer empties a sub-buffer after the transfer; None if at once."""


def forecast_memory(bytes_per_step: int) -> Memory:
    """Return the memory for the chunks of a node that sends and receives this many bytes in a step."""
    return Memory(*_native.forecast_memory(bytes_per_step))


class CopyItem(NamedTuple):
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
    """Number of the rank."""
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
    """Name of the unit."""
    offset: int
    """First byte."""
    bytes: int
    """Number of bytes."""
    destination: int
    """The rank that gets them."""
    start: float
    """Seconds from the window's opening; without a window, from when the step's last window is over, or for
    "moetion", which sends them while compute runs, from the step's start."""
    seconds: float
    """Seconds of the transfer."""


class CopyPeriod(NamedTuple):
    """Interval between versions, and its cost."""

    steps: int
    """Between two versions."""
    delay_seconds: float
    """That a version delays training."""
    wasted_seconds: float
    """That a failure wastes on average."""


class ChunkReason(NamedTuple):
    """Achievement of a plan; `str(reason)` is its summary."""

    fits: bool
    """True if all bytes are in windows."""
    steps_per_version: int
    """Steps after which a version is complete."""
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
    """Bytes outside of windows."""
    summary: str
    """One sentence for the user."""

    def __str__(self) -> str:
        return self.summary

    def pace(self, step_seconds: float, link: Link, failures_per_step: float, *, most: int = 64) -> CopyPeriod | None:
        """Find the interval between versions that loses the least time, to delays and to failures (Gemini, Eq. 1).

        A version may use the windows of all steps until the next one, as far as its messages fit into them; what does
        not delays training. A failure wastes the time of a version, half of the time between two, and the time to
        retrieve one. None where the plan delays nothing, or a step takes no time.

        A step takes 1 s and has 0.3 s of windows, a version takes 1 s to send; one failure in 10,000 steps:

            >>> reason = ChunkReason(False, 1, None, 0.7, 0.3, 0.3, 100, 70, "")
            >>> reason.pace(1.0, Link(0.0, 100.0), 1e-4)
            CopyPeriod(steps=4, delay_seconds=0.0, wasted_seconds=7.0)

        Args:
            step_seconds: of a step without copies.
            link: the way to the destinations, by which a recovery fetches a version, too.
            failures_per_step: expected.
            most: steps, 1 to 4096.

        Raises:
            ValueError: a time is below 0 or no number, or `most` is out of its range.
        """
        plan = self.steps_per_version, self.delay_seconds, self.used_seconds, self.bytes
        seconds, failures = number("step_seconds", step_seconds), number("failures_per_step", failures_per_step)
        found = _native.version_pace(plan, seconds, _link("link", link), failures, count("most", most))
        return None if found is None else CopyPeriod(*found)


class ChunkPlan:
    """Transfers and their times, from `plan_chunks`; the JSON is for the executor and for files."""

    def __init__(self, native: _native.ChunkPlan) -> None:
        self._native = native

    @classmethod
    def from_json(cls, text: str) -> ChunkPlan:
        """Read what `to_json` wrote; a ValueError if it is not that."""
        return cls(_native.ChunkPlan.from_json(text))

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return self._native.to_json()

    @property
    def chunks(self) -> list[Chunk]:
        """In the order in which they are sent: by step, window and start; those without a window end each step."""
        return [Chunk(*row) for row in self._native.rows]

    @property
    def reason(self) -> ChunkReason:
        """Achievement of the plan."""
        return ChunkReason(*self._native.reason)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkPlan) and self._native == other._native

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ChunkPlan({len(self.chunks)} chunks: {self.reason})"


def plan_chunks(
    pieces: Sequence[CopyItem],
    windows: Windows,
    link: Link,
    memory: Memory,
    *,
    policy: ChunkPolicy = "auto",
    receivers: Sequence[Receiver] = (),
    max_steps: int = 64,
    version_steps: int | None = 1,
) -> ChunkPlan:
    """Plan which part of which unit goes to which rank in which window.

    A chunk lies within the usable seconds of a window of the sender and, for a destination in `receivers`, of the
    destination; chunks do not overlap, and no more sub-buffers are in use than there are, drains included.
    Destinations are served one after the other, so that the first complete copy arrives early.

    - "gemini" (SOSP'23): in order, as much as fits; the rest runs after the last window and delays the step. It and the
      next two have one step for a version, or `version_steps`.
    - "baft": for each window the complete units that together have the most bytes, exact for up to dozens of sizes; a
      unit that no window can take is cut. The rest runs after the last window.
    - "moetion": floor(n * t_windows / t_copy) of the n chunks may use the windows; the rest runs while compute does and
      delays by what compute is too short for.
    - "auto": as many steps as it takes, up to `max_steps`, to delay none; what does not fit even then is spread over
      all of them. It never delays more than "gemini" or "baft". More window never means more delay, except where
        `max_steps` is too few and complete units happen to fit a smaller window better.

    Two windows of 3 seconds, each with room for 20 bytes:

        >>> from evermoe.planning.windows import Span, StepProfile, find_windows
        >>> sends = [Span("send", "send", "network", start, 1.0, 64, [1]) for start in (0.0, 4.0)]
        >>> windows = find_windows([StepProfile(8.0, sends)], gamma=1.0)
        >>> expert, link, memory = CopyItem("expert", 50, [1]), Link(1.0, 10.0), Memory(40, 2)
        >>> plan = plan_chunks([expert], windows, link, memory, policy="gemini")
        >>> [(chunk.window, chunk.offset, chunk.bytes) for chunk in plan.chunks]
        [(1, 0, 20), (2, 20, 20), (None, 40, 10)]
        >>> plan.reason.delay_seconds, plan.reason.steps_in_windows
        (2.0, 2)
        >>> print(plan_chunks([expert], windows, link, memory).reason)
        a version takes 2 steps and 8.000000 of 12.000000 s of windows; nothing is delayed
        >>> print(plan_chunks([expert], windows, link, memory, policy="gemini", version_steps=None).reason)
        a version takes 2 steps and 8.000000 of 12.000000 s of windows; nothing is delayed

    Args:
        pieces: what to copy; sent in this order.
        windows: the sender's; those of the network are used, at both ends.
        link: the way to the destinations.
        memory: what chunks pass through.
        policy: how windows are filled.
        receivers: destinations whose windows count too; "baft" needs all of them.
        max_steps: steps that a version of "auto" may take, 1 to 4096, or of any policy with `version_steps=None`.
        version_steps: steps over which the other policies send a version (BAFT's n iterations); None: as few as delay
            none, of at most `max_steps`; those where even they delay, and one where windows take nothing.

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
            native_windows("receivers: windows", end.windows),
            number("receivers: clock_offset", end.clock_offset),
        )
        for end in receivers
    ]
    return ChunkPlan(
        _native.plan_chunks(
            rows,
            native_windows("windows", windows),
            ends,
            _link("link", link),
            (count("memory.bytes", memory.bytes), count("memory.buffers", memory.buffers), drain),
            choice("policy", policy, CHUNK_POLICIES),
            count("max_steps", max_steps),
            None if version_steps is None else count("version_steps", version_steps),
        )
    )


def snapshot_memory(free_bytes: int, nbytes: Sequence[int], *, reserve: int = 0) -> list[Place]:
    """Choose for each unit the memory of its snapshot: the GPU's while it has room, else the host's (BAFT).

    Largest units first, so that few of them go to the host.

        >>> snapshot_memory(100, [10, 40, 60], reserve=30)  # 70 bytes to use
        ['device', 'host', 'device']

    Args:
        free_bytes: free device memory.
        nbytes: size of each unit.
        reserve: device memory to leave free.
    """
    found = _native.snapshot_memory(
        count("free_bytes", free_bytes), counts("nbytes", nbytes), count("reserve", reserve)
    )
    return found  # type: ignore[return-value]


def _link(name: str, value: Link) -> tuple[float, float]:
    return number(f"{name}.alpha", value.alpha), number(f"{name}.beta", value.beta)
