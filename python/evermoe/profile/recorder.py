"""Recorder of the spans of a step, which converts them to numbers once the step is over."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from evermoe.planning.windows import Kind, Resource, Span, StepProfile
from evermoe.profile.clocks import Clock, Mark
from evermoe.profile.memory import free_device_bytes, free_host_bytes


@dataclass(eq=False, slots=True)
class OpenSpan:
    """A span in progress; `end` is None until it is over."""

    name: str
    kind: Kind
    resource: Resource
    bytes: int
    peers: Sequence[int]
    device: torch.device | None
    start: Mark
    end: Mark | None = None


def _ignore(span: OpenSpan) -> None:
    pass


class Recorded(NamedTuple):
    """A step of this rank."""

    number: int
    """Number of steps since the profiler was created."""
    start: float
    """Start in seconds of the host's monotonic clock."""
    step: StepProfile
    """Spans of the step, with times from its start."""
    free_device_bytes: int | None
    """Unreserved device memory, at its lowest; None without a GPU."""
    free_host_bytes: int | None
    """Host memory that was available at the step's end; None if the system does not report it."""


@dataclass
class _OpenStep:
    number: int
    start: Mark
    spans: list[OpenSpan] = field(default_factory=list)


class Recorder:
    """Spans of the last `keep` steps.

    Of spans of one resource that nest in one thread, only the outermost is recorded: a recomputed forward within a
    backward, or what torch's groups do for one of ours.
    """

    def __init__(self, clock: Clock, keep: int) -> None:
        self.clock = clock
        self.on = False
        self.unfinished = 0
        """Number of spans that were left out as they had not ended a step later: transfers without a wait."""
        self.on_begin: Callable[[OpenSpan], None] = _ignore
        """Callback for each span as it begins."""
        self.on_end: Callable[[OpenSpan], None] = _ignore
        """Callback for each span when it is over, perhaps from another thread."""
        self._done: deque[Recorded] = deque(maxlen=keep)
        self._step: _OpenStep | None = None
        self._last: tuple[_OpenStep, Mark, int | None, int | None] | None = None
        """The previous step: on a GPU, its events are reached by now or soon."""
        self._works: weakref.WeakKeyDictionary[Any, list[OpenSpan]] = weakref.WeakKeyDictionary()
        self._local = threading.local()
        self._number = 0

    # ---- spans

    def begin(
        self,
        name: str,
        kind: Kind,
        resource: Resource,
        bytes: int = 0,
        peers: Sequence[int] = (),
        device: torch.device | None = None,
    ) -> OpenSpan | None:
        """Open a span; return None if recording is off, or within another span of the resource.

        With the span, `leave` must be called in the same thread, and `end` at some time.
        """
        step, inside = self._step, self._inside()
        if not self.on or step is None or resource in inside or self.clock.is_capturing():
            return None
        inside.add(resource)
        span = OpenSpan(name, kind, resource, bytes, peers, device, self.clock.mark(device))
        step.spans.append(span)
        self.on_begin(span)
        return span

    def leave(self, span: OpenSpan) -> None:
        """End this thread's part of the span, which itself may continue."""
        self._inside().discard(span.resource)

    def end(self, span: OpenSpan) -> None:
        """End the span; only the first call counts."""
        if span.end is None:
            span.end = self.clock.mark(span.device)
            self.on_end(span)

    def close(self, span: OpenSpan) -> None:
        """Call `leave` and `end`."""
        self.end(span)
        self.leave(span)

    def drop(self, span: OpenSpan) -> None:
        """Discard a span whose work failed."""
        self.leave(span)
        if self._step is not None and span in self._step.spans:
            self._step.spans.remove(span)

    def follow(self, work: Any, spans: Sequence[OpenSpan]) -> None:
        """Let the spans last until a thread has waited for `work`."""
        self._works.setdefault(work, []).extend(spans)

    def waited(self, work: Any) -> None:
        """Note that a thread has waited for `work`, or that the current stream continues only after it."""
        for span in self._works.pop(work, ()):
            self.end(span)

    @contextmanager
    def unseen(self, resource: Resource) -> Iterator[None]:
        """Exclude this thread from the record within this block."""
        inside = self._inside()
        was_inside = resource in inside
        inside.add(resource)
        try:
            yield
        finally:
            if not was_inside:
                inside.discard(resource)

    def _inside(self) -> set[Resource]:
        inside: set[Resource] | None = getattr(self._local, "inside", None)
        if inside is None:
            inside = self._local.inside = set()
        return inside

    # ---- steps

    @property
    def began(self) -> int | None:
        """Return the start of the current step; None if the host does not know it, or without a step."""
        start = None if self._step is None else self._step.start
        return start if isinstance(start, int) else None

    def start(self) -> None:
        """Start recording and discard earlier records, as steps must be consecutive."""
        self._done.clear()
        self._last = None
        self._inside().clear()
        self._step = _OpenStep(self._number, self.clock.mark())
        self.on = True

    def stop(self) -> None:
        """Stop recording; the current step is discarded."""
        self.on = False
        self._step = None
        self._works.clear()
        self._inside().clear()

    def restart_step(self) -> None:
        """Let the current step begin now."""
        if self._step is not None:
            self._step = _OpenStep(self._number, self.clock.mark())

    def next_step(self) -> None:
        """End the current step and begin the next one."""
        step = self._step
        if step is None:
            return
        self._inside().clear()  # an optimizer that raised an exception left its span open
        self._number += 1
        end = self.clock.mark()
        self._resolve_last()
        self._last = (step, end, free_device_bytes(self.clock.device), free_host_bytes())
        self._step = _OpenStep(self._number, end)

    def steps(self) -> list[Recorded]:
        """Return the completed steps, oldest first. On a GPU, waits until the last one is."""
        self._resolve_last()
        return list(self._done)

    def _resolve_last(self) -> None:
        if self._last is None:
            return
        step, end_mark, device_bytes, host_bytes = self._last
        self._last = None
        start, end = self.clock.nanoseconds(step.start), self.clock.nanoseconds(end_mark)
        spans = []
        for span in step.spans:
            if span.end is None:
                self.unfinished += 1
                continue
            first, last = self.clock.nanoseconds(span.start), self.clock.nanoseconds(span.end)
            begins, lasts = max(0.0, first - start), max(0.0, last - max(first, start))
            spans.append(
                Span(span.name, span.kind, span.resource, begins / 1e9, lasts / 1e9, span.bytes, list(span.peers))
            )
        self.clock.advance(end_mark)
        seconds = max(0.0, end - start) / 1e9
        self._done.append(Recorded(step.number, start / 1e9, StepProfile(seconds, spans), device_bytes, host_bytes))
