"""Idle windows: steps of spans, as a profile records them, to the windows that recur in every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from evermoe import _native
from evermoe.planning._arguments import names, number

Kind = Literal["forward", "backward", "optimizer", "collective", "send", "receive", "copy"]
Resource = Literal["compute", "network", "host_link"]


class Span(NamedTuple):
    """A time in which a resource was busy."""

    name: str
    """The same in every step; it may occur several times in one."""
    kind: Kind
    """Kind of activity."""
    resource: Resource
    """Resource that it kept busy."""
    start: float
    """Seconds from the step's start."""
    seconds: float
    """Duration."""
    bytes: int = 0
    """Bytes moved; 0 for compute."""
    peers: Sequence[int] = ()
    """Ranks at the other end."""


class StepProfile(NamedTuple):
    """One step of one rank."""

    seconds: float
    """Seconds from its start to the start of the next step."""
    spans: Sequence[Span]
    """In any order; one that ends after the step continues in the next one."""


class Window(NamedTuple):
    """An idle span of a resource in every step."""

    resource: Resource
    """Resource that is idle."""
    after: str | None
    """The span whose end opens it; None for the step's start."""
    occurrence: int
    """Number of the span among those of that name on the resource, from 0."""
    offset: float
    """Seconds from that end to the opening: 0 unless another span sometimes lasts longer than the one it follows."""
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
        """Read what `to_json` wrote; a ValueError if it is not that."""
        return cls(_native.Windows.from_json(text))

    def to_json(self) -> str:
        """Return the windows as JSON."""
        return self._native.to_json()

    @property
    def step_seconds(self) -> float:
        """The median of the steps' seconds."""
        return self._native.step_seconds

    @property
    def windows(self) -> list[Window]:
        """The windows by resource (compute, network, host_link), then by start; those of a resource do not overlap."""
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
        """Evidence on which the windows rest, as a sentence."""
        return self._native.evidence[2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Windows) and self._native == other._native

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Windows({len(self.windows)} in a step of {self.step_seconds:.6f} s: {self.evidence})"


class Change(NamedTuple):
    """Reason for a new plan."""

    what: Literal["sequence", "window", "total"]
    """Kind of change: other spans, another window, or another sum of all windows of the resource."""
    resource: Resource
    """The resource that changed."""
    after: str | None
    """The span that came, None at the end of a step; for a window the span whose end opens it."""
    before: float | None
    """Seconds that were expected; None for "sequence"."""
    now: float | None
    """Seconds that are now; None for "sequence"."""
    summary: str
    """One sentence for the user."""


def find_windows(
    steps: Sequence[StepProfile], *, quantile: float = 0.1, gamma: float = 0.9, ignore: Iterable[str] = ()
) -> Windows:
    """Return the idle windows of each resource.

    Between the end of the busy spans so far, which may overlap and nest, and the start of the next on the same
    resource there is a window. Steps are aligned by the order of their spans; those whose order is not that of the
    largest group are left out, and without a majority there are no windows.

        >>> def step(idle):  # network idle for `idle` seconds after the first send, for 2 after the second
        ...     sends = [Span("send", "send", "network", start, 1.0, 64, [1]) for start in (0.0, 1.0 + idle)]
        ...     return StepProfile(4.0 + idle, sends)
        >>> found = find_windows([step(3.0), step(4.0)], gamma=0.5)
        >>> [window[1:] for window in found.windows if window.resource == "network"]
        [('send', 0, 0.0, 1.0, 1.5, 3.0, 1.0), ('send', 1, 0.0, 5.0, 1.0, 2.0, 0.0)]
        >>> found
        Windows(4 in a step of 7.000000 s: all 2 steps have the same spans)

    Args:
        steps: about 20 steps of one rank.
        quantile: a window is as long as it was in all but this part of the steps; 0 is the shortest, 0.5 the median.
        gamma: the part of that which may be used, above 0, up to 1.
        ignore: span names to ignore, e.g. those of the copies being planned.

    Raises:
        ValueError: no steps, times that are none, or options out of range.
    """
    ignored = names("ignore", ignore if isinstance(ignore, str) else list(ignore))
    return Windows(_native.find_windows(steps, number("quantile", quantile), number("gamma", gamma), ignored))


def has_changed(windows: Windows, steps: Sequence[StepProfile], *, tolerance: float = 0.01) -> Change | None:
    """Return what changed since the windows were found; None if nothing that matters did.

    Half of the steps or more have another order of spans; or else a window, or all windows of a resource together,
    became shorter or longer by more than the jitter plus `tolerance` of a step. The largest such change is returned.

        >>> def step(busy):
        ...     return StepProfile(10.0, [Span("reduce", "collective", "network", 0.0, busy)])
        >>> found = find_windows([step(4.0), step(4.5)])
        >>> has_changed(found, [step(5.0)])
        >>> has_changed(found, [step(7.0)]).summary
        'the network window after "reduce" is 3.000000 s, not 5.500000 s'

    Args:
        windows: from `find_windows`.
        steps: the latest steps, at least 1.
        tolerance: part of a step that does not matter, 0 or more.

    Raises:
        ValueError: no steps, or times that are none.
    """
    found = _native.has_changed(native_windows("windows", windows), steps, number("tolerance", tolerance))
    return None if found is None else Change(*found)  # type: ignore[arg-type]


def native_windows(name: str, value: Windows) -> _native.Windows:
    """Return windows in the planners' own form; raise a TypeError that names the argument otherwise."""
    if not isinstance(value, Windows):
        raise ValueError(f"{name}: expected Windows of find_windows, got {value!r}")
    return value._native
