"""Traces: steps, windows and sent chunks in Chrome's trace event format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evermoe import _native
from evermoe.planning._arguments import count, names, number
from evermoe.planning.schedule import ChunkPlan
from evermoe.planning.windows import StepProfile, Windows, native_windows


class SentChunk(NamedTuple):
    """A chunk that was really sent."""

    start: float
    """When it began, in seconds on the clock of the trace's `start`."""
    seconds: float
    """Seconds until it was sent."""
    bytes: int
    """Number of bytes."""
    peer: int
    """The rank that got them."""
    window: int | None = None
    """Position of the window in which it began; None outside of all."""


def chrome_trace(
    steps: Sequence[StepProfile],
    windows: Windows | None = None,
    plan: ChunkPlan | None = None,
    *,
    sent: Sequence[SentChunk] = (),
    rank: int = 0,
    start: float = 0.0,
) -> str:
    """Return the steps of one rank as JSON in Chrome's trace event format, for Perfetto.

    One process a rank; a track each for compute, network, host link, the windows of each, planned chunks, and copies,
    which are chunks that were sent. Each step has the windows where its own spans open them, and the chunks of the
    plan's steps in turn. Spans that overlap without nesting go to a second track.

        >>> import json
        >>> from evermoe.planning.windows import Span
        >>> step = StepProfile(0.003, [Span("reduce", "collective", "network", 0.001, 0.002, 64, [1])])
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
        None if windows is None else native_windows("windows", windows),
        None if plan is None else plan._native,
        [_sent(each) for each in sent],
        count("rank", rank),
        number("start", start),
    )


def merge_traces(traces: Sequence[str]) -> str:
    """One trace of several ranks, each from `chrome_trace`.

    Raises:
        ValueError: a text that is no trace, or two of one rank.
    """
    return _native.merge_traces(names("traces", traces))


def _sent(value: SentChunk) -> tuple[float, float, int, int, int | None]:
    start, seconds, nbytes, peer, window = value
    size, to = count("sent: bytes", nbytes), count("sent: peer", peer)
    return number("sent: start", start), number("sent: seconds", seconds), size, to, window
