"""Collects the spans of a step as they happen, and turns them into numbers once the step is over."""

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
    """A span as it is recorded; `end` is None until it is over."""

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
    """Steps since the profiler was made."""
    start: float
    """Seconds of the host's monotonic clock."""
    step: StepProfile
    """Its spans, with times from its start on."""
    free_device_bytes: int | None
    """Unreserved device memory, at its lowest; None without a GPU."""
    free_host_bytes: int | None
    """Host memory that was available at the step's end; None where the system does not say."""


@dataclass
class _OpenStep:
    number: int
    start: Mark
    spans: list[OpenSpan] = field(default_factory=list)


class Recorder:
    """The spans of the last `keep` steps.

    Of spans of one resource that nest in one thread, only the outermost is recorded: a recomputed forward within a
    backward, or what torch's groups do for one of ours.
    """

    def __init__(self, clock: Clock, keep: int) -> None:
        self.clock = clock
        self.on = False
        self.unfinished = 0
        """Spans that had not ended a step later, and were left out: transfers that were not waited for."""
        self.on_begin: Callable[[OpenSpan], None] = _ignore
        """Callback for each span as it begins."""
        self.on_end: Callable[[OpenSpan], None] = _ignore
        """Callback for each span when it is over; perhaps in another thread."""
        self._done: deque[Recorded] = deque(maxlen=keep)
        self._step: _OpenStep | None = None
        self._last: tuple[_OpenStep, Mark, int | None, int | None] | None = None
        """The step before this one: on a GPU, its events are reached by now or soon."""
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
        """Opens a span; None if nothing is recorded now, or within another one of the resource.

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
        """What this thread does from now on is not part of the span, which may continue."""
        self._inside().discard(span.resource)

    def end(self, span: OpenSpan) -> None:
        """The span is over; only the first call counts."""
        if span.end is None:
            span.end = self.clock.mark(span.device)
            self.on_end(span)

    def close(self, span: OpenSpan) -> None:
        """`leave` and `end`."""
        self.end(span)
        self.leave(span)

    def drop(self, span: OpenSpan) -> None:
        """Forgets a span whose work failed."""
        self.leave(span)
        if self._step is not None and span in self._step.spans:
            self._step.spans.remove(span)

    def follow(self, work: Any, spans: Sequence[OpenSpan]) -> None:
        """The spans last until a thread has waited for `work`."""
        self._works.setdefault(work, []).extend(spans)

    def waited(self, work: Any) -> None:
        """A thread has waited for `work`, which is over, or the current stream continues only after it."""
        for span in self._works.pop(work, ()):
            self.end(span)

    @contextmanager
    def unseen(self, resource: Resource) -> Iterator[None]:
        """What this thread does meanwhile is not recorded."""
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
        """When the step that runs began; None if the host does not know, or none runs."""
        start = None if self._step is None else self._step.start
        return start if isinstance(start, int) else None

    def start(self) -> None:
        """Begins to record; what was recorded before is gone, as steps must follow each other."""
        self._done.clear()
        self._last = None
        self._inside().clear()
        self._step = _OpenStep(self._number, self.clock.mark())
        self.on = True

    def stop(self) -> None:
        """The step that runs is left out."""
        self.on = False
        self._step = None
        self._works.clear()
        self._inside().clear()

    def restart_step(self) -> None:
        """The step that runs begins only now."""
        if self._step is not None:
            self._step = _OpenStep(self._number, self.clock.mark())

    def next_step(self) -> None:
        """The step that runs ends, and the next one begins."""
        step = self._step
        if step is None:
            return
        self._inside().clear()  # an optimizer that raised has left its span open
        self._number += 1
        end = self.clock.mark()
        self._resolve_last()
        self._last = (step, end, free_device_bytes(self.clock.device), free_host_bytes())
        self._step = _OpenStep(self._number, end)

    def steps(self) -> list[Recorded]:
        """The steps that are over, oldest first. On a GPU, waits until the last one is."""
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
