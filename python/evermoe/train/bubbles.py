"""The bubbles of a pipeline's schedule: what is recorded of its steps, and the pacer that learns of its transfers."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from evermoe.comm.courier import Sent
from evermoe.comm.pacer import Pacer
from evermoe.profile import Profiler
from evermoe.profile.clocks import Event
from evermoe.profile.recorder import OpenSpan
from evermoe.train.stage_windows import StageWindowPlanner

CLOSE_SECONDS = 5.0
"""Time for a GPU to reach the last transfers."""


class TransferFollower:
    """A thread that says when transfers on a GPU's streams begin and are over: the host runs ahead of them."""

    def __init__(self) -> None:
        self._reached: queue.SimpleQueue[tuple[Event, Callable[[int], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="evermoe-transfers", daemon=True)
        self._thread.start()

    def follow(self, event: Event, tell: Callable[[int], None]) -> None:
        """Calls `tell` in the thread, with the time of `time.perf_counter_ns`, when an event is reached.

        Events are waited for in the order in which they come here: one that is reached before them is told of with
        them.
        """
        self._reached.put((event, tell))

    def _run(self) -> None:
        while (each := self._reached.get()) is not None:
            event, tell = each
            with suppress(RuntimeError):  # the GPU has failed: who computes on it is told
                event.synchronize()
                tell(time.perf_counter_ns())

    def close(self) -> None:
        """Ends the thread, once all events are reached; waits for that for a while, as a GPU may never reach them."""
        self._reached.put(None)
        self._thread.join(CLOSE_SECONDS)


class Bubbles:
    """Keeps a profile of the steps since the last recovery.

    Args:
        window_planner: finds windows in it.
        pacer: is told of the schedule's transfers.
        rank: of the pipeline.
        steps: how many are kept.
        device: of the rank's stage.
    """

    def __init__(
        self, window_planner: StageWindowPlanner, pacer: Pacer, rank: int, steps: int, device: torch.device
    ) -> None:
        self._window_planner, self._pacer, self._rank, self._steps = window_planner, pacer, rank, steps
        self._device = device
        self._follower = TransferFollower() if device.type == "cuda" else None
        self.profiler = self._new_profiler()

    def restart(self, step: int) -> None:
        """Every recovery begins a new profile, as all ranks must have recorded the same steps; until then windows are
        those of before."""
        self.profiler.detach()
        self.profiler = self._new_profiler()
        self.profiler.attach()
        self._window_planner.restart(step, True)
        self._pacer.begin_step()

    def _new_profiler(self) -> Profiler:
        profiler = Profiler(device=self._device, keep=max(1, self._steps), rank=self._rank)
        profiler.follow_network(self._transfer_begins, self._transfer_ends)
        self._window_planner.profiler = profiler
        return profiler

    def _transfer_begins(self, span: OpenSpan) -> None:
        if span.kind != "send":  # a receive waits for its sender, and meanwhile the network is idle
            return
        if isinstance(span.start, int):
            self._pacer.transfer_begins()
        elif self._follower is not None:
            self._follower.follow(span.start, lambda at: self._pacer.transfer_begins())

    def _transfer_ends(self, span: OpenSpan) -> None:
        if isinstance(span.end, int):
            self._pacer.transfer_ends(span.name, span.end)
        elif self._follower is not None and span.end is not None:
            self._follower.follow(span.end, functools.partial(self._pacer.transfer_ends, span.name))

    def write_trace(self, path: str | Path, sent: Sequence[Sent]) -> None:
        """See `PipelineSession.write_trace`."""
        self.profiler.write_trace(path, windows=self._window_planner.windows, sent=sent)

    def end(self) -> None:
        """Ends the profile."""
        self.profiler.detach()
        if self._follower is not None:
            self._follower.close()
